"""The options of the DeepSpeed systems, each of which writes DeepSpeed's own configuration of
itself.

Invariant: every size that DeepSpeed would choose by itself is set here, and is in the cell's hash.
Sizes are in parameters, as in DeepSpeed's configuration (https://www.deepspeed.ai/docs/config-json,
checked against deepspeed/runtime/zero/config.py of 0.19.8).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from baselines.model import count_params
from baselines.options import CommonOptions, at_least, share, text
from baselines.rival import adamw_settings
from baselines.system import SystemSpec

ONE_LAYER = -1
"""The value of `prefetch_bucket_size` that stands for the size of the largest decoder layer."""
SMALLEST = 0.0
"""The value of `offload_ratio` that stands for the smallest that has room."""
REUSE_DISTANCE = 1_000_000_000
"""Stage 3 does not release a parameter that is used again within this many others."""
NUM_BUFFERS = 12
"""Pinned buffers of one sub-group's fp32 each, for an optimizer on a disk: master, two moments and
gradients of the three sub-groups in memory."""
BLOCK_BYTES = 1 << 20
"""Bytes of one request to the disk."""


def accumulation_dtype(spec: SystemSpec) -> torch.dtype:
    """One micro-batch accumulates nothing, so its gradients stay in the compute dtype."""
    return spec.dtype if spec.shape.num_micro_batches == 1 else torch.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions(CommonOptions):
    """Options of every stage."""

    overlap_comm: bool = True
    """Copy gradients to the host beside the backward, through a second bucket."""
    reduce_bucket_size: int = 500_000_000
    """Gradients gathered on the device before they leave together; larger ones leave alone."""

    def config(self, spec: SystemSpec) -> dict[str, Any]:
        """DeepSpeed's configuration of one step of `spec`."""
        accumulated = "bf16" if accumulation_dtype(spec) == torch.bfloat16 else "fp32"
        return {
            "train_micro_batch_size_per_gpu": spec.rows,
            "gradient_accumulation_steps": spec.shape.num_micro_batches,
            "gradient_clipping": self.clip_norm(spec),
            "bf16": {"enabled": spec.dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": accumulated},
            "zero_optimization": self.zero_optimization(spec),
            "steps_per_print": None,
            "wall_clock_breakdown": False,
        }

    def zero_optimization(self, spec: SystemSpec) -> dict[str, Any]:
        """The part of `config` that each kind of options extends by its own."""
        return {
            "offload_optimizer": self.offload(spec),
            "overlap_comm": self.overlap_comm,
            "contiguous_gradients": True,
            "reduce_bucket_size": self.reduce_bucket_size,
        }

    def offload(self, spec: SystemSpec) -> dict[str, Any]:
        """Where what is offloaded goes."""
        return {"device": "cpu", "pin_memory": self.pins(spec)}

    def pins(self, spec: SystemSpec) -> bool:
        """Whether what is offloaded is pinned: on a GPU, where copies then run beside the
        computation, in blocks of powers of two."""
        return spec.device.type == "cuda"

    def bucket_params(self) -> int:
        """Gradients in the buckets: one, and a second where copies overlap."""
        return (2 if self.overlap_comm else 1) * self.reduce_bucket_size

    def clip_norm(self, spec: SystemSpec) -> float:
        """The norm that DeepSpeed clips at, the recipe's; 0 clips nothing."""
        return spec.recipe.clip_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero2Options(DeepSpeedOptions):
    """Options of `Zero2`: nothing is fetched, and one update takes all parameters."""

    def zero_optimization(self, spec: SystemSpec) -> dict[str, Any]:
        """Stage 2."""
        return {"stage": 2} | super().zero_optimization(spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZenFlowOptions(Zero2Options):
    """Options of `ZenFlow`; shares and intervals are those of its authors' DeepSpeedExamples."""

    topk_share: float = share(0.1, whole=False)
    """Share of each matrix's columns, by gradient, that the device updates in every step."""
    update_interval: int = 4
    """Steps whose gradients are gathered for one update of all the other columns, on the CPU."""
    cpu_share: float = share(0.5, whole=False)
    """Share of the cores that the CPU optimizer's process gets; training keeps the others."""

    def config(self, spec: SystemSpec) -> dict[str, Any]:
        """DeepSpeed's configuration with the settings that its second optimizer is made with."""
        optimizer = {"type": "AdamW", "params": adamw_settings(spec.recipe)}
        return super().config(spec) | {"optimizer": optimizer}

    def zero_optimization(self, spec: SystemSpec) -> dict[str, Any]:
        """Stage 2 with ZenFlow."""
        zenflow = {
            "topk_ratio": self.topk_share,
            "select_strategy": "auto",  # the columns are chosen once, in the first step
            "select_interval": "auto",
            "update_interval": self.update_interval,
            "overlap_step": True,
            "full_warm_up_rounds": 0,
            "pt_reserved_cores_perc": 1 - self.cpu_share,
        }
        return super().zero_optimization(spec) | {"zenflow": zenflow}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero3Options(DeepSpeedOptions):
    """Options of `Zero3`."""

    offload_param: bool = True
    """Weights in host memory; false keeps them on the device alone, where the CPU's updates arrive
    through pageable memory."""
    prefetch_bucket_size: int = at_least(ONE_LAYER, ONE_LAYER)
    """Parameters fetched ahead of use, never beyond max_live_parameters: 0 none, -1 as many as one
    decoder layer has."""
    param_persistence_threshold: int = at_least(0, 100_000)
    """Parameters up to this size stay on the device and are fetched once a step, after the update:
    the norms and biases."""
    max_live_parameters: int = 1_000_000_000
    """Parameters on the device at a time, before the module in use asks for its own."""
    sub_group_size: int = 1_000_000_000
    """Parameters that the CPU optimizer takes at a time."""
    offload_ratio: float = share(1.0, chosen=True)
    """Share of the sub-groups that the CPU updates; state of the others stays on the device and is
    updated there (Twin-Flow). 0 is the smallest share with which the plan has room on the
    device."""

    def zero_optimization(self, spec: SystemSpec) -> dict[str, Any]:
        """Stage 3, with Twin-Flow's ratio where not all of the optimizer is offloaded."""
        ahead = self.prefetch_bucket_size
        zero = super().zero_optimization(spec) | {
            "stage": 3,
            "stage3_prefetch_bucket_size": count_params(spec.model).largest_layer
            if ahead == ONE_LAYER
            else ahead,
            "stage3_param_persistence_threshold": self.param_persistence_threshold,
            "stage3_max_live_parameters": self.max_live_parameters,
            "stage3_max_reuse_distance": REUSE_DISTANCE,
            "sub_group_size": self.sub_group_size,
            # DeepSpeed's own linear reads a weight's state in its backward, which cannot be traced.
            "memory_efficient_linear": not self.compile,
        }
        if self.offload_param:
            zero["offload_param"] = self.offload(spec)
        if self.offload_ratio < 1:
            zero["offload_optimizer"]["ratio"] = self.offload_ratio
        return zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperOffloadOptions(Zero3Options):
    """Options of `SuperOffload`: its authors' sizes (DeepSpeedExamples), else for a GPU on PCIe."""

    overlap_comm: bool = False
    reduce_bucket_size: int = 400_000_000
    param_persistence_threshold: int = at_least(0, 1_000_000_000_000)
    sub_group_size: int = 400_000_000
    cpu_share: float = share(0.75, whole=False)
    """Share of the cores that the optimizer's process gets; training keeps the others."""
    clip: bool = False
    """Clip as the recipe asks, so that no update starts before the backward ends; or never."""

    def zero_optimization(self, spec: SystemSpec) -> dict[str, Any]:
        """Stage 3 whose optimizer runs in a process of its own."""
        zero = super().zero_optimization(spec)
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": self.cpu_share}
        return zero

    def clip_norm(self, spec: SystemSpec) -> float:
        """The recipe's, or 0 where nothing is clipped."""
        return spec.recipe.clip_norm if self.clip else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfinityOptions(Zero3Options):
    """Options of `ZeroInfinity`."""

    sub_group_size: int = 100_000_000
    nvme_path: str | None = text("the path of a folder")
    """Folder on a local disk that the optimizer state is written to: 16 bytes a parameter."""
    pipeline: bool = True
    """Read and write other sub-groups beside the update of one; three are in memory then."""
    io_queue_depth: int = 32
    """Requests under way at a time, in each thread."""
    io_threads: int = 8
    """Threads that one read or write is divided among."""

    def within(self, folder: Path) -> InfinityOptions:
        """The same, writing to `folder`."""
        return dataclasses.replace(self, nvme_path=str(folder))

    def config(self, spec: SystemSpec) -> dict[str, Any]:
        """DeepSpeed's configuration with that of its asynchronous IO."""
        asynchronous_io = {
            "block_size": BLOCK_BYTES,
            "queue_depth": self.io_queue_depth,
            "intra_op_parallelism": self.io_threads,
            "single_submit": False,  # many requests a system call
            "overlap_events": True,  # submits while others are under way
        }
        return super().config(spec) | {"aio": asynchronous_io}

    def zero_optimization(self, spec: SystemSpec) -> dict[str, Any]:
        """Stage 3 with the optimizer on a disk."""
        zero = super().zero_optimization(spec)
        zero["offload_optimizer"] |= {
            "device": "nvme",
            "nvme_path": self.nvme_path,
            "buffer_count": NUM_BUFFERS,
            "pipeline_read": self.pipeline,
            "pipeline_write": self.pipeline,
        }
        return zero
