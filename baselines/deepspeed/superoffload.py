"""SuperOffload: DeepSpeed's ZeRO-3 whose optimizer runs in a process of its own, a sub-group at a
time, while the backward goes on.

Invariant: what differs from ZeRO-3 is said and not hidden. Updates that start before the gradients
are all there cannot know the global norm: unless `clip` gives that overlap up, nothing is clipped,
and where the recipe asks for it the row carries a caveat. The optimizer's process shares masters
and gradients through /dev/shm; what they need there is checked before anything is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from baselines import footprint
from baselines.deepspeed.options import SuperOffloadOptions, accumulation_dtype
from baselines.deepspeed.setup import require_shared_memory
from baselines.deepspeed.stage3 import Zero3, sub_groups
from baselines.model import count_params
from baselines.rival import require_cuda
from baselines.system import SystemSpec
from engine import pinned_rounding


class SuperOffload(Zero3):
    """DeepSpeed SuperOffload as a `TrainingSystem`; CUDA only."""

    options_class = SuperOffloadOptions
    options: SuperOffloadOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        require_cuda(spec.device, "SuperOffload")
        if not self.options.clip_norm(spec):
            self._outcome = "updates were made"  # while the backward went on
            if spec.recipe.clip_norm > 0:
                self.caveat = (
                    f"no clipping, where the recipe clips at {spec.recipe.clip_norm:g} "
                    "(system.clip=true clips)"
                )
        self._cores = os.sched_getaffinity(0)

    def _host_plan(self) -> dict[str, int]:
        """What DeepSpeed 0.19.8 allocates in both processes.

        Masters and fp32 gradients are shared from their first update on. The pinned gradients that
        they replace stay in torch's cache, as do the weights' first blocks (`_pinned_bytes`). The
        optimizer's process, one more, has one pinned buffer.
        """
        options, total = self.options, count_params(self.spec.model).total
        accumulated = accumulation_dtype(self.spec).itemsize * total
        weights = self.spec.dtype.itemsize * total if options.offload_param else 0
        shared = 4 * (total - sum(self._groups_on_device()))
        buffer = 4 * max(sub_groups(self.spec.model, options.sub_group_size))
        host = {
            "weights": weights,
            "master": shared,
            "moments": 2 * shared,
            "gradients": shared + accumulated,
            "staging": buffer,
            "other": footprint.process_bytes(self.spec.device, 2),
        }
        if options.pins(self.spec):
            host["staging"] += pinned_rounding(buffer)
            host["staging"] += self._pinned_bytes() - weights - accumulated
        return host

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set up ZeRO-3 and the optimizer's process. Unsupported without enough shared memory."""
        offloaded = count_params(self.spec.model).total - sum(self._groups_on_device())
        require_shared_memory(8 * offloaded, "SuperOffload")
        super().setup(weights)

    def _unsaved(self) -> str:
        return "the moments, which are in the optimizer's process"

    def close(self) -> None:
        """End the optimizer's process and give this one its cores back; idempotent."""
        if self._engine is not None:
            self._engine.optimizer.superoffload_cpu_optimizer.close()
            os.sched_setaffinity(0, self._cores)
        super().close()
