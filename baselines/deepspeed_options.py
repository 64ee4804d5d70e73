"""The knobs of the DeepSpeed systems, and DeepSpeed's own configuration made of them.

Invariant: every size that DeepSpeed would choose by itself is set here, and is in the cell's hash; sizes are in parameters, as in
DeepSpeed's configuration (https://www.deepspeed.ai/docs/config-json, checked against deepspeed/runtime/zero/config.py of 0.19.8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baselines.common import CommonOptions, adamw_settings, at_least, share, word
from baselines.footprint import parameter_sizes
from baselines.model import count_params
from baselines.system import ModelSpec, SystemSpec

ONE_LAYER = -1
"""`prefetch_bucket_size` that stands for the parameters of the largest decoder layer."""
SMALLEST = 0.0
"""`offload_ratio` that stands for the smallest that has room."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions(CommonOptions):
    """Options of every stage."""

    pin_memory: bool = True
    """Pin what is offloaded: copies beside the computation, for host memory rounded up to powers of two. The CPU has none."""
    overlap_comm: bool = True
    """Copy gradients to the host beside the backward, through a second bucket."""
    reduce_bucket_size: int = 500_000_000
    """Gradients gathered on the device before they leave together; larger ones leave alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero3Options(DeepSpeedOptions):
    """Options of `Zero3`."""

    offload_param: bool = True
    """Weights in host memory; false keeps them on the device alone, where the CPU's updates arrive through pageable memory."""
    prefetch_bucket_size: int = at_least(ONE_LAYER, ONE_LAYER)
    """Parameters fetched ahead of use, never beyond max_live_parameters: 0 none, -1 as many as one decoder layer has."""
    param_persistence_threshold: int = at_least(0, 100_000)
    """Parameters up to this size stay on the device and are fetched once a step, after the update: the norms and biases."""
    max_live_parameters: int = 1_000_000_000
    """Parameters on the device at a time, before the module in use asks for its own."""
    max_reuse_distance: int = at_least(0, 1_000_000_000)
    """A parameter that is used again within this many others is not released."""
    sub_group_size: int = 1_000_000_000
    """Parameters that the CPU optimizer takes at a time."""
    offload_ratio: float = share(1.0, chosen=True)
    """Share of the sub-groups that the CPU updates; state of the others stays on the device and is updated there (Twin-Flow). 0 is
    the smallest share with which the plan has room on the device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperOffloadOptions(Zero3Options):
    """Options of `SuperOffload`: sizes of its authors' examples (DeepSpeedExamples), the rest for a GPU on PCIe."""

    overlap_comm: bool = False
    reduce_bucket_size: int = 400_000_000
    param_persistence_threshold: int = at_least(0, 1_000_000_000_000)
    sub_group_size: int = 400_000_000
    cpu_share: float = share(0.75, whole=False)
    """Share of the cores that the process of the optimizer runs on; the training process keeps the others."""
    clip: bool = False
    """Clip as the recipe asks, exactly: then no update starts before the backward is over. False trains without clipping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfinityOptions(Zero3Options):
    """Options of `ZeroInfinity`."""

    sub_group_size: int = 100_000_000
    nvme_path: str | None = word("the path of a folder")
    """Folder on a local disk that the optimizer state is written to: 16 bytes a parameter."""
    pipeline: bool = True
    """Read the next sub-group and write the last beside the update of one; three are in memory then."""
    buffer_count: int = at_least(4, 12)
    """Pinned buffers of one sub-group's fp32 each: master, two moments and gradients take four, of every sub-group in memory."""
    io_block_size: int = 1 << 20
    """Bytes of one request to the disk."""
    io_queue_depth: int = 32
    """Requests under way at a time, in each thread."""
    io_threads: int = 8
    """Threads that one read or write is divided among."""

    def __post_init__(self) -> None:
        if self.pipeline and self.buffer_count < 12:
            raise ValueError(
                f"system.buffer_count: got {self.buffer_count}, allowed an integer >= 12 where system.pipeline has three "
                "sub-groups in memory; raise it or set system.pipeline=false"
            )

    def within(self, folder: Path) -> InfinityOptions:
        """The same, writing to `folder`."""
        return dataclasses.replace(self, nvme_path=str(folder))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero2Options(DeepSpeedOptions):
    """Options of `Zero2`: none of ZeRO-3's own, for nothing is fetched and the CPU optimizer takes all parameters at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZenFlowOptions(Zero2Options):
    """Options of `ZenFlow`; shares and intervals are those of its authors' examples (DeepSpeedExamples, DeepSpeed-ZenFlow)."""

    topk_share: float = share(0.1, whole=False)
    """Share of each matrix's columns, those with the largest gradients, that the device updates in every step."""
    update_interval: int = 4
    """Steps whose gradients are gathered for one update of all the other columns, on the CPU."""
    select_interval: int = at_least(0, 0)
    """Steps between two choices of the columns; 0 chooses them once, in the first step."""
    cpu_share: float = share(0.5, whole=False)
    """Share of the cores that the process of the CPU optimizer runs on; the training process keeps the others."""


def accumulation_dtype(spec: SystemSpec) -> torch.dtype:
    """One micro-batch has nothing to accumulate: its gradients stay in the compute dtype and save memory."""
    return spec.dtype if spec.shape.num_micro_batches == 1 else torch.float32


def sub_groups(model: ModelSpec, sub_group_size: int) -> list[int]:
    """Parameters of each of ZeRO-3's sub-groups, in order: one is closed when it has reached `sub_group_size`."""
    sizes = parameter_sizes(model)
    groups = [0]
    for size in sizes:
        if groups[-1] >= sub_group_size and sub_group_size < sum(sizes):
            groups.append(0)
        groups[-1] += size
    return groups


def on_device(groups: Sequence[int], offload_ratio: float) -> list[int]:
    """The sub-groups that are not offloaded: the first, in number and not in size (as stage3.py counts them)."""
    return list(groups[: int((1 - offload_ratio) * len(groups))])


def state_on_device(groups: Sequence[int]) -> int:
    """Bytes of the state of these sub-groups on the device: master, moments, fp32 gradients, and what its AdamW takes at a time."""
    return 16 * sum(groups) + 4 * max(groups, default=0)


def smallest_ratio(groups: Sequence[int], room: int) -> float:
    """The ratio under which as many sub-groups as have `room` (bytes) stay on the device; the last stays on the host."""
    kept = max(count for count in range(len(groups)) if count == 0 or state_on_device(groups[:count]) <= room)
    return 1 - (kept + 0.5) / len(groups)  # between two numbers of sub-groups, for `on_device` rounds down


def deepspeed_config(spec: SystemSpec, options: DeepSpeedOptions) -> dict[str, Any]:
    """DeepSpeed's configuration of one step of `spec`; the stage follows from the kind of options."""
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": options.pin_memory and spec.device.type == "cuda"}
    zero: dict[str, Any] = {
        "stage": 2,
        "offload_optimizer": offload,
        "overlap_comm": options.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": options.reduce_bucket_size,
    }
    if isinstance(options, Zero3Options):
        zero |= _stage_3(spec, options)
        if options.offload_param:
            zero["offload_param"] = offload
        if options.offload_ratio < 1:
            zero["offload_optimizer"] = offload | {"ratio": options.offload_ratio}
    if isinstance(options, InfinityOptions):
        zero["offload_optimizer"] = zero["offload_optimizer"] | {
            "device": "nvme",
            "nvme_path": options.nvme_path,
            "buffer_count": options.buffer_count,
            "pipeline_read": options.pipeline,
            "pipeline_write": options.pipeline,
        }
    if isinstance(options, SuperOffloadOptions):
        zero["offload_optimizer"] = zero["offload_optimizer"] | {"super_offload": True, "cpuadam_cores_perc": options.cpu_share}
    if isinstance(options, ZenFlowOptions):
        zero["zenflow"] = _zenflow(options)
    config = {
        "train_micro_batch_size_per_gpu": spec.shape.micro_batch_size,
        "gradient_accumulation_steps": spec.shape.num_micro_batches,
        "gradient_clipping": clip_norm(spec, options),
        "bf16": {"enabled": spec.dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "bf16" if accumulation_dtype(spec) == torch.bfloat16 else "fp32"},
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if isinstance(options, InfinityOptions):
        config["aio"] = _asynchronous_io(options)
    if isinstance(options, ZenFlowOptions):  # it makes a second optimizer of the same settings
        config["optimizer"] = {"type": "AdamW", "params": adamw_settings(spec.recipe)}
    return config


def _asynchronous_io(options: InfinityOptions) -> dict[str, Any]:
    return {
        "block_size": options.io_block_size,
        "queue_depth": options.io_queue_depth,
        "intra_op_parallelism": options.io_threads,
        "single_submit": False,  # many requests a system call
        "overlap_events": True,  # submits while others are under way
    }


def _zenflow(options: ZenFlowOptions) -> dict[str, Any]:
    chosen_once = options.select_interval == 0
    return {
        "topk_ratio": options.topk_share,
        "select_strategy": "auto" if chosen_once else "step",
        "select_interval": "auto" if chosen_once else options.select_interval,
        "update_interval": options.update_interval,
        "overlap_step": True,
        "full_warm_up_rounds": 0,
        "pt_reserved_cores_perc": 1 - options.cpu_share,
    }


def clip_norm(spec: SystemSpec, options: DeepSpeedOptions) -> float:
    """The recipe's, or 0 for a system that is told not to clip."""
    return spec.recipe.clip_norm if getattr(options, "clip", True) else 0.0


def _stage_3(spec: SystemSpec, options: Zero3Options) -> dict[str, Any]:
    ahead = options.prefetch_bucket_size
    return {
        "stage": 3,
        "stage3_prefetch_bucket_size": count_params(spec.model).largest_layer if ahead == ONE_LAYER else ahead,
        "stage3_param_persistence_threshold": options.param_persistence_threshold,
        "stage3_max_live_parameters": options.max_live_parameters,
        "stage3_max_reuse_distance": options.max_reuse_distance,
        "sub_group_size": options.sub_group_size,
        # DeepSpeed's own linear reads a weight's state in its backward, which cannot be traced.
        "memory_efficient_linear": not options.compile,
    }
