"""Zero3: DeepSpeed's ZeRO-3 with parameters and optimizer state in pinned host memory, or a share
of them (Twin-Flow).

Invariant: the plan is what DeepSpeed 0.19.8 allocates, sub-group by sub-group.

Compiled, the decoder layers are DeepSpeed's leaf modules: hooks hang on the layer and on none of
its submodules, where they would break the graph (`torch.compiler.disable`), so a layer is fetched
and released whole around one compiled call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from baselines import footprint
from baselines.deepspeed.base import DeepSpeed
from baselines.deepspeed.options import SMALLEST, Zero3Options, accumulation_dtype
from baselines.loss import CausalLMLoss
from baselines.model import count_params, decoder_layers
from baselines.system import ModelSpec, SystemSpec


def sub_groups(model: ModelSpec, sub_group_size: int, num_ranks: int = 1) -> list[int]:
    """What a rank has of the parameters of each of ZeRO-3's sub-groups; one is closed when that is
    `sub_group_size`."""
    sizes = [-(-size // num_ranks) for size in count_params(model).sizes]
    groups = [0]
    for size in sizes:
        if groups[-1] >= sub_group_size and sub_group_size < sum(sizes):
            groups.append(0)
        groups[-1] += size
    return groups


def on_device(groups: Sequence[int], offload_ratio: float) -> list[int]:
    """The sub-groups that are not offloaded: the first ones, by number and not by size."""
    return list(groups[: int((1 - offload_ratio) * len(groups))])


def state_on_device(groups: Sequence[int]) -> int:
    """Device bytes of sub-groups: master, moments, fp32 gradients, temporaries of AdamW."""
    return 16 * sum(groups) + 4 * max(groups, default=0)


def smallest_ratio(groups: Sequence[int], room: int) -> float:
    """The ratio that leaves as many sub-groups on the device as have `room`, but not the last."""
    counts = range(1, len(groups))
    kept = max((n for n in counts if state_on_device(groups[:n]) <= room), default=0)
    # Between two numbers of sub-groups, for `on_device` rounds down.
    return 1 - (kept + 0.5) / len(groups)


class Zero3(DeepSpeed):
    """ZeRO-3 with CPU offload, as a `TrainingSystem`."""

    options_class: ClassVar[type[Zero3Options]] = Zero3Options
    options: Zero3Options

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        if self.options.offload_ratio == SMALLEST:
            self.options = self._with_smallest_ratio()

    def _device_plan(self) -> dict[str, int]:
        """An upper estimate: live weights, buckets, activations, optimizer state, setting up."""
        count, options = count_params(self.spec.model), self.options
        total, itemsize = count.total, self.spec.dtype.itemsize
        # Live weights: what stays, what is in use, what is kept for reuse, what is fetched ahead.
        persistent = sum(
            size for size in count.sizes if size <= options.param_persistence_threshold
        )
        in_use = max(options.max_live_parameters, count.largest) + count.largest_layer
        fetched = min(total, persistent + in_use)
        # The bucket, a second one where copies overlap, the outer gradients beside them; leaf
        # modules hand over whole layers.
        gradients = options.bucket_params() + count.largest
        gradients += count.largest_layer if options.compile else 0
        device = {
            "weights": itemsize * (fetched if options.offload_param else self._resident(fetched)),
            "gradients": itemsize * min(total, gradients),
            **footprint.activation_bytes(self.spec, options),
        }
        if groups := self._groups_on_device():
            device["optimizer"] = state_on_device(groups)
        # deepspeed.initialize moves the whole module to the device before it takes it apart: the
        # peak of a large model.
        device["setup"] = max(0, itemsize * total - sum(device.values()))
        return device

    def _resident(self, fetched: int) -> int:
        """Weights on the device where none are on the host: a rank's part, and beside it those of
        the others that are fetched."""
        total = count_params(self.spec.model).total
        part = self.spec.part(total)
        return part + min(fetched, total - part)

    def _host_plan(self) -> dict[str, int]:
        """Within 5% of what was measured from 0.5B to 14B, where it is 24 to 29 bytes a parameter.

        Master and moments are pageable; weights, fp32 gradients and accumulated ones are pinned,
        see `_pinned_bytes`.
        """
        total = self.spec.part(count_params(self.spec.model).total)
        offloaded = max(0, total - sum(self._groups_on_device()))
        host = {
            "weights": self.spec.dtype.itemsize * total if self.options.offload_param else 0,
            "master": 4 * offloaded,
            "moments": 8 * offloaded,
            "gradients": 4 * offloaded + accumulation_dtype(self.spec).itemsize * total,
        }
        host["staging"] = max(0, self._pinned_bytes() - host["weights"] - host["gradients"])
        host["other"] = footprint.process_bytes(self.spec.device)
        return footprint.with_module(host, self.spec, self.spec.dtype.itemsize)

    def _pinned_bytes(self) -> int:
        """Bytes of torch's pinned blocks when setup is over, freed ones too; 0 where nothing is
        pinned.

        partition_parameters.py and stage3.py of DeepSpeed 0.19.8 ask for them: each weight by
        itself, one flat block that they move to, the fp32 gradients of each sub-group, the
        gradients that are accumulated. The weights' first blocks stay cached.
        """
        options, spec = self.options, self.spec
        if not options.pins(spec):
            return 0
        blocks = self._weight_blocks()
        groups = sub_groups(spec.model, options.sub_group_size, spec.num_ranks)
        num_kept = len(self._groups_on_device())
        for index, group in enumerate(groups):
            blocks.take(4 * group)
            if index < num_kept:  # pinned all the same, and then copied to the device
                blocks.free(4 * group)
        blocks.take(accumulation_dtype(spec).itemsize * sum(groups))
        return blocks.num_bytes

    def _weight_blocks(self) -> footprint.PinnedBlocks:
        """What is pinned once the offloaded weights are flat; the blocks of each are freed."""
        blocks, spec, options = footprint.PinnedBlocks(), self.spec, self.options
        sizes = count_params(spec.model).sizes if options.offload_param else ()
        weights = [spec.dtype.itemsize * spec.part(size) for size in sizes]
        for size in (*weights, sum(weights)) if weights else ():
            blocks.take(size)
        for size in weights:
            blocks.free(size)
        return blocks

    def _groups_on_device(self) -> list[int]:
        """Sizes of the sub-groups whose master, moments and fp32 gradients stay on the device."""
        if self.spec.device.type == "cpu":
            return []  # without a device DeepSpeed keeps all of it on the host, whatever the ratio
        groups = sub_groups(self.spec.model, self.options.sub_group_size, self.spec.num_ranks)
        return on_device(groups, self.options.offload_ratio)

    def _with_smallest_ratio(self) -> Zero3Options:
        """The options with the smallest offload_ratio whose plan has room on the device.

        Where none has room, all of the state is on the host. Where keep_activations is to be chosen
        too, activations get what the optimizer's state leaves.
        """
        groups = sub_groups(self.spec.model, self.options.sub_group_size, self.spec.num_ranks)
        self.options = dataclasses.replace(self.options, offload_ratio=1.0)
        room = footprint.usable_bytes(self.spec) - self.plan().device_bytes
        return dataclasses.replace(self.options, offload_ratio=smallest_ratio(groups, room))

    def _unsaved(self) -> str | None:
        kept = self._groups_on_device()
        return "the moments that offload_ratio keeps on the device" if kept else None

    def _prepare(self, deepspeed: Any, loss: CausalLMLoss) -> None:
        if self.options.compile:
            classes = {type(layer) for layer in decoder_layers(loss.model)}
            deepspeed.utils.set_z3_leaf_modules(loss, list(classes))
