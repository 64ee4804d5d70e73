"""ZenFlow: DeepSpeed's ZeRO-2 that updates a few columns of every matrix at once on the device, and
the others late, on the CPU.

Invariant: this is another algorithm, and every row of it says so. The chosen columns are updated in
the compute dtype and without clipping; the others get, once in `update_interval` steps, one update
from the gradients gathered over them, which a process of its own computes beside as many further
steps. Weights are therefore up to twice the interval behind their gradients.

DeepSpeed 0.19.8 lays the matrices out by columns for it and then reads them by rows, which trains a
model whose weights are shuffled; `_by_columns` reads them as they lie.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from baselines import footprint
from baselines.deepspeed.options import ZenFlowOptions
from baselines.deepspeed.setup import require_shared_memory
from baselines.deepspeed.stage2 import Zero2
from baselines.model import count_params
from baselines.rival import micro_batches, raise_unless_finite
from baselines.system import SystemSpec, Unsupported
from engine import Batch, dtype_name, pinned_rounding


class ZenFlow(Zero2):
    """DeepSpeed ZenFlow, stage 2 with overlapped steps, as a `TrainingSystem`; one micro-batch a
    step.

    `drain` waits for the device alone: the CPU's update goes on, as between any two steps, and is
    waited for where it is applied.
    """

    options_class = ZenFlowOptions
    options: ZenFlowOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        if spec.shape.num_micro_batches > 1:
            raise Unsupported(
                "ZenFlow counts micro-batches as steps of its update interval: "
                f"shape.num_micro_batches is {spec.shape.num_micro_batches}, use 1"
            )
        if spec.recipe.decayed != "all":
            raise Unsupported(
                "ZenFlow is given one group of parameters here: recipe.decayed is "
                f"{spec.recipe.decayed}, use all"
            )
        options = self.options
        self.caveat = (
            f"bounded staleness: a step updates {options.topk_share:.0%} of the columns, in "
            f"{dtype_name(spec.dtype)} and without clipping; the others follow every "
            f"{options.update_interval} steps, up to {2 * options.update_interval} late"
        )
        self._outcome = "updates were made"
        self._cores, self._threads = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")

    def _device_plan(self) -> dict[str, int]:
        """ZeRO-2's and the chosen columns.

        utils/tensor_fragment.py of DeepSpeed 0.19.8 flattens every weight: those that lie by
        columns are copied, and stay so.
        """
        total, itemsize = count_params(self.spec.model).total, self.spec.dtype.itemsize
        device = {**super()._device_plan(), "weights": 2 * itemsize * total, "setup": 0}
        # Gradient, moments and the values kept from before an update, of the chosen columns.
        device["optimizer"] = round(4 * itemsize * self.options.topk_share * total)
        # Weights stand three times while zenflow_utils.py transposes them and makes them one flat
        # tensor.
        device["setup"] = max(0, 3 * itemsize * total - sum(device.values()))
        return device

    def _host_plan(self) -> dict[str, int]:
        """ZeRO-2's and what the optimizer's process holds or shares, by DeepSpeed 0.19.8.

        zenflow_utils.py shares, in fp32, the master, the copy that is handed over and two gradients
        (one fills while the other is used); the pinned master and gradient that these replace stay
        in torch's cache. Its process has two of each moment. stage_1_and_2.py gathers the
        interval's gradients in a pinned block for each parameter
        (async_accumulate_grad_in_cpu_via_gpu). Weights that are handed over are cast in pageable
        memory, for torch's `copy_` to a device converts on the host (wait_last_update_and_copy).
        """
        count, itemsize = count_params(self.spec.model), self.spec.dtype.itemsize
        total = count.total
        gathered: list[int] = []
        if self.options.update_interval > 1:
            gathered = [itemsize * size for size in count.sizes]
        host = super()._host_plan() | {
            "master": 8 * total,
            "moments": 16 * total,
            "gradients": 8 * total + sum(gathered),
            "other": footprint.process_bytes(self.spec.device, 2),
        }
        if self.spec.device.type == "cuda" and itemsize < 4:
            host["staging"] += itemsize * total
        if self.options.pins(self.spec):
            host["staging"] += 8 * total + sum(map(pinned_rounding, gathered))
        return host

    def dtypes(self) -> dict[str, str]:
        """Those of ZeRO-2, but for the chosen columns."""
        chosen = f"float32, chosen columns {dtype_name(self.spec.dtype)}"
        return super().dtypes() | {"master": chosen, "moments": chosen}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set up ZeRO-2; the optimizer's process starts with the first update.

        Unsupported where shared memory is too small.
        """
        require_shared_memory(16 * count_params(self.spec.model).total, "ZenFlow")
        super().setup(weights)

    def _optimizer(self, deepspeed: Any) -> dict[str, Any]:
        """DeepSpeed makes both optimizers by its configuration; this builds their operator."""
        from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer

        ZenFlowZeroOptimizer._update_model_bit16_weights = _by_columns
        deepspeed.ops.op_builder.CPUAdamBuilder().load()
        return {"model_parameters": [param for _, param in self._named]}

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One step, the loss divided by the interval as DeepSpeed's accumulation does.

        A loss that is not finite is found after its updates.
        """
        assert self._engine is not None, "setup comes first"
        self._set_lr()
        ((tokens, labels, mask, places),) = micro_batches(batch, self.spec.device)
        loss: torch.Tensor = self._engine(tokens, labels, mask, batch.num_tokens, places)
        self._engine.backward(loss)
        raise_unless_finite(loss.detach(), "the loss", self._step, self._outcome)
        self._update()
        return loss.detach()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, trained weight), one at a time: the chosen columns have no fp32 master."""
        for name, param in self._named:
            yield name, param.detach().to("cpu", torch.float32, copy=True)

    def _unsaved(self) -> str:
        return "the moments, which are in the optimizer's process"

    def close(self) -> None:
        """End the optimizer's process and give this one its cores back; idempotent."""
        optimizer = None if self._engine is None else self._engine.optimizer
        process = getattr(optimizer, "process", None)
        if process is not None:
            process.terminate()
            process.join()
            os.sched_setaffinity(0, self._cores)
            os.environ.pop("OMP_NUM_THREADS", None)
            if self._threads is not None:
                os.environ["OMP_NUM_THREADS"] = self._threads
        super().close()


def _by_columns(optimizer: Any, group: int) -> None:
    """Stands for DeepSpeed's `_update_model_bit16_weights`: each weight as a view of the flat
    buffer that ZenFlow made of them."""
    flat, weights = optimizer.bit16_groups_flat[group], optimizer.round_robin_bit16_groups[group]
    for weight, meta, offset in zip(
        weights,
        optimizer.round_robin_bit16_meta[group],
        optimizer.round_robin_bit16_offsets[group],
        strict=True,
    ):
        piece = flat.narrow(0, offset, meta.numel())
        by_columns = len(meta.shape) == 2
        weight.data = piece.view(meta.shape[::-1]).t() if by_columns else piece.view(meta.shape)
    for weight, index in zip(
        optimizer.bit16_groups[group], optimizer.round_robin_bit16_indices[group], strict=True
    ):
        weight.data = weights[index].data
