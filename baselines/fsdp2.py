"""Fsdp2: torch's own sharding (`fully_shard`) with CPU offload, in one process or several.

Invariant: fp32 parameters live on the host and are the master; the mathematics is the recipe's;
every micro-batch's gradients go to the host unless `accumulate_on_device` says that the device has
room for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from baselines import distributed, footprint
from baselines.loss import loss_of
from baselines.model import count_params, decoder_layers, materialise
from baselines.options import CommonOptions
from baselines.rival import (
    TorchRival,
    adamw_groups,
    adamw_settings,
    micro_batches,
    raise_unless_finite,
    set_lr,
)
from baselines.system import SystemSpec
from engine import Batch, Plan, norm_of, pinned_rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fsdp2Options(CommonOptions):
    """Options of `Fsdp2`."""

    accumulate_on_device: bool = False
    """Keep fp32 gradients on the device until the last micro-batch; no effect with one."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward; false keeps them all."""


class Fsdp2(TorchRival):
    """FSDP2 with CPUOffloadPolicy and fused AdamW on the host, as a `TrainingSystem`."""

    options_class: ClassVar[type[CommonOptions]] = Fsdp2Options
    options: Fsdp2Options
    offloads: ClassVar[bool] = True
    """Whether masters, moments and gradients are on the host."""

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        self.loss: Any = None
        self._clip_s = 0.0

    def plan(self) -> Plan:
        """Closed-form bytes of a rank; on the host of one rank 20 to 24 a parameter at 3B, 7B and
        14B, within 1% of the rows of 3B and 7B.

        Each fp32 parameter is a pinned block (init of _fsdp_param.py), and each gradient, made in
        the backward and back in torch's cache by the next one (foreach_reduce of
        _fsdp_collectives.py): up to the next power of two. Moments are pageable.
        """
        spec, count = self.spec, count_params(self.spec.model)
        itemsize, part = spec.dtype.itemsize, spec.part
        layer, outer = count.largest_layer, count.outer
        waits = self.options.accumulate_on_device and spec.shape.num_micro_batches > 1
        summed = 4 * count.total if waits else 0
        # A layer's backward: the root's parameters and two layers' (one computes, one is gathered,
        # whose fp32 copy is on its way) or all, the root's gradients and a layer's, those in fp32
        # too, before and after their reduction.
        in_layers = 2 * layer if self.options.reshard_after_forward else count.in_layers
        gathered = itemsize * (outer + in_layers)
        gradients = itemsize * outer + (itemsize + 4) * layer + part(4 * layer)
        copies = itemsize * layer + part(4 * layer)
        backward = {"weights": gathered + copies, "gradients": summed + gradients}
        backward |= footprint.activation_bytes(spec, self.options)
        # Last of all the root's gradients, when activations are gone.
        last = (itemsize + 4) * outer + part(4 * outer)
        end = {"weights": itemsize * outer, "gradients": summed + last}
        device = max(backward, end, key=lambda phase: sum(phase.values()))
        held = {
            "master": part(4 * count.total),
            "moments": part(8 * count.total),
            "gradients": part(4 * count.total),
        }
        host: dict[str, int] = dict(held) if self.offloads else {}
        if not self.offloads:
            device = {**device, **held, "gradients": device["gradients"] + held["gradients"]}
        sizes = (part(4 * size) for size in count.sizes)
        pins = self.offloads and spec.device.type == "cuda"
        host["staging"] = 2 * sum(map(pinned_rounding, sizes)) if pins else 0
        host["other"] = footprint.process_bytes(spec.device)
        host = footprint.with_module(host, spec, torch.float32.itemsize)
        return footprint.plan_on(spec.device, device, host)

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Build the fp32 module on the host, shard it layer by layer, make the optimizer."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        spec = self.spec
        on_cuda = spec.device.type == "cuda"
        # Gradients are on the host: without gloo beside NCCL, clipping them fails.
        self._join("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
        model = materialise(spec.model, torch.float32, torch.device("cpu"), weights)
        names = [name for name, _ in model.named_parameters()]
        self.loss = loss_of(model, self.options)
        shard = functools.partial(
            fully_shard,
            mesh=init_device_mesh(spec.device.type, (spec.num_ranks,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=spec.dtype, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=on_cuda)
            if self.offloads
            else OffloadPolicy(),
        )
        for layer in decoder_layers(model):
            shard(layer, reshard_after_forward=self.options.reshard_after_forward)
        # The wrapper is the root: it calls the decoder and the head itself, so the head's
        # unsharding hangs on its forward.
        shard(self.loss)
        if spec.num_ranks > 1:
            self._sum_over_ranks()
        # fully_shard made new Parameter objects: ask again, in the same order.
        self._named = dict(zip(names, model.parameters(), strict=True))
        self._optimizer = torch.optim.AdamW(
            adamw_groups(spec.recipe, self._named.values()),
            **adamw_settings(spec.recipe),
            fused=True,
        )

    def _sum_over_ranks(self) -> None:
        """Have gradients summed: our losses are shares of the whole step, and torch takes the
        mean."""
        for module in self.loss.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step; clipping on the host waits for the gradients anyway."""
        assert self.loss is not None, "setup comes first"
        total = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        num_tokens = batch.num_tokens
        self._optimizer.zero_grad()
        mine = distributed.part_of(batch)
        for index, given in enumerate(micro_batches(mine, self.spec.device)):
            last = index == batch.num_micro_batches - 1
            self.loss.set_requires_gradient_sync(last or not self.options.accumulate_on_device)
            tokens, labels, mask, places = given
            loss = self.loss(tokens, labels, mask, num_tokens, places)
            loss.backward()
            total += loss.detach()
        distributed.summed(total)
        raise_unless_finite(total, "the loss", self._step)
        self._update()
        return total

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Mean loss per label token of a batch that is not trained on; changes nothing.

        A backward frees gathered weights, and here is none: what stays gathered would be stale
        after `resume`.
        """
        found = super().evaluate(batch)
        for module in self.loss.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return found

    def _update(self) -> None:
        recipe, started = self.spec.recipe, time.perf_counter()
        with self._optimizing():
            if recipe.clip_norm > 0:
                self._clip(recipe.clip_norm)
            self._clip_s += time.perf_counter() - started
            set_lr(self._optimizer, recipe.lr_at(self._step))
            self._optimizer.step()

    def _clip(self, clip_norm: float) -> None:
        """Scale the gradients as torch.nn.utils.clip_grad_norm_ does."""
        named = self._named.values()
        gradients = [_local(param.grad) for param in named if param.grad is not None]
        norm = self.gradient_norm = distributed.norm_over_ranks(norm_of(gradients))
        raise_unless_finite(norm, "the gradient norm", self._step)
        scale = clip_norm / (norm + 1e-6)
        if scale < 1:
            for gradient in gradients:
                gradient.mul_(scale)

    def counters(self) -> dict[str, float]:
        """optimizer_s: seconds of clipping (clip_s) and of AdamW on the host, not overlapped."""
        return {**super().counters(), "clip_s": self._clip_s}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the host), one at a time; all ranks take each together."""
        for name, param in self._named.items():
            whole = param.detach().full_tensor() if self.spec.num_ranks > 1 else _local(param)  # type: ignore[attr-defined]
            yield name, whole.to("cpu", copy=True)

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, torch.Tensor]]]:
        for name, param in self._named.items():
            state = self._optimizer.state[param]
            yield name, _local(param), {key: _local(value) for key, value in state.items()}

    def _hold(self, held: Mapping[str, tuple[torch.Tensor, Mapping[str, torch.Tensor]]]) -> None:
        for name, param in self._named.items():
            master, moments = held[name]
            _local(param).copy_(master)
            self._optimizer.state[param] = {
                key: value.clone() if key == "step" else _like(param, value)
                for key, value in moments.items()
            }

    def close(self) -> None:
        """Free the memory and leave the process group; idempotent."""
        if self.loss is not None:
            self.loss = None
            del self._named, self._optimizer
        super().close()


def _local(tensor: Any) -> torch.Tensor:
    """What this rank has of a DTensor, all of it where there is one rank; a plain tensor is
    itself."""
    local: torch.Tensor = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local


def _like(param: Any, value: torch.Tensor) -> torch.Tensor:
    """A copy of the plain tensor `value`, placed as the DTensor `param` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.clone(), param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
