"""ZeroInfinity: DeepSpeed ZeRO-3 with the optimizer state on a disk, through DeepSpeed's
asynchronous IO; weights in host memory.

Invariant: nothing is written or removed before the disk is known to have room; everything lies in
one folder of this process, which goes with it, and of other folders only those of our dead
processes go. Its speed is that of the disk, so every row says that there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines import footprint
from baselines.deepspeed.options import NUM_BUFFERS, InfinityOptions, accumulation_dtype
from baselines.deepspeed.setup import import_deepspeed
from baselines.deepspeed.stage3 import Zero3, sub_groups
from baselines.model import count_params
from baselines.system import SystemSpec, Unsupported
from engine import Batch, Plan, SwapFolder, left_behind

DISK_BYTES_PER_PARAM = 16
"""fp32 master, both moments, and gradients on their way to them."""
ARCHITECTURE = re.compile(r"\d+\.\d+(\+PTX)?")
"""What DeepSpeed's builder reads of TORCH_CUDA_ARCH_LIST: no 9.0a of torch's, and no names."""
FULL_BYTES = 64 << 20
"""A disk with less than this free is what stopped a step."""


class ZeroInfinity(Zero3):
    """ZeRO-Infinity as a `TrainingSystem`. Raises Unsupported where no folder is named or its disk
    has no room."""

    options_class = InfinityOptions
    options: InfinityOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        options = self.options
        root = Path(options.nvme_path or "").expanduser()
        if options.nvme_path is None or not root.is_dir():
            got = "nothing" if options.nvme_path is None else "what is no folder"
            raise Unsupported(
                f"machine.nvme_path: got {got}, allowed a folder on a local disk; make one and "
                "give machine.nvme_path=PATH"
            )
        self.caveat = "optimizer state on a disk, whose speed this is"
        self.root = root.resolve()
        self._folder: SwapFolder | None = None

    @property
    def _disk_bytes(self) -> int:
        return DISK_BYTES_PER_PARAM * count_params(self.spec.model).total

    def plan(self) -> Plan:
        """Closed-form bytes on device, host and disk, by kind."""
        return dataclasses.replace(super().plan(), disk={"optimizer": self._disk_bytes})

    def _host_plan(self) -> dict[str, int]:
        """Beside what is on the disk.

        moments: those that the first update makes in pageable memory (cpu_adam.py of DeepSpeed
        0.19.8) and writes a copy of. Pipelined, they live until the second update has read what
        replaces them into the buffers (swap_out_optimizer_state of
        swap_tensor/pipelined_optimizer_swapper.py releases none); else until they are written, one
        sub-group's at a time.
        """
        options, total = self.options, count_params(self.spec.model).total
        largest = max(sub_groups(self.spec.model, options.sub_group_size))
        weights = self.spec.dtype.itemsize * total if options.offload_param else 0
        accumulated = accumulation_dtype(self.spec).itemsize * total
        blocks = self._weight_blocks()
        blocks.take(accumulated)
        rounded = blocks.num_bytes - weights - accumulated if options.pins(self.spec) else 0
        return {
            "weights": weights,
            "moments": 8 * (total if options.pipeline else largest),
            "gradients": accumulated,
            "staging": NUM_BUFFERS * 4 * largest + rounded,
            "other": footprint.process_bytes(self.spec.device),
        }

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set up ZeRO-3 with a folder of its own on the disk.

        Unsupported where DeepSpeed's IO cannot be built or the disk is too small.
        """
        options, needed = self.options, self._disk_bytes
        _require_async_io(import_deepspeed(self.spec.device), self.spec.device)
        with left_behind(self.root) as folders:
            free = shutil.disk_usage(self.root).free + sum(folder.num_bytes() for folder in folders)
            if needed > free:
                raise Unsupported(
                    f"machine.nvme_path: the disk has {free:,} bytes free and needs {needed:,}; "
                    "free some or name another"
                )
            for folder in folders:
                folder.remove()
        self._folder = SwapFolder.new(self.root)
        self.options = options.within(self._folder.path)
        with self._disk():
            super().setup(weights)

    def _optimizer(self, deepspeed: Any) -> dict[str, Any]:
        """ZeRO-3's; builds async_io too, where other processes wait for it."""
        deepspeed.ops.op_builder.AsyncIOBuilder().load(verbose=False)
        return super()._optimizer(deepspeed)

    def train_step(self, batch: Batch) -> torch.Tensor:
        """ZeRO-3's step; OSError, in one line, when the disk filled up meanwhile."""
        with self._disk():
            return super().train_step(batch)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """An error while the disk is full is said to be that, as DeepSpeed's IO does not."""
        try:
            yield
        except (OSError, RuntimeError, AssertionError) as error:
            free = shutil.disk_usage(self.root).free
            if free >= FULL_BYTES:
                raise
            raise OSError(
                f"machine.nvme_path: the disk is full ({free:,} bytes free); free some"
            ) from error

    def _unsaved(self) -> str:
        return "what is on the disk"

    def close(self) -> None:
        """Close ZeRO-3 and remove what was written; idempotent."""
        super().close()
        if self._folder is not None:
            self._folder.remove()
            self._folder.release()
            self._folder = None


def _require_async_io(deepspeed: Any, device: torch.device) -> None:
    """Unsupported, in one line, where DeepSpeed's async_io cannot be built."""
    from torch.utils.cpp_extension import CUDA_HOME

    if device.type == "cuda" and CUDA_HOME is None:
        raise Unsupported(
            "DeepSpeed's async_io is built with the CUDA toolkit and there is none; install it, "
            "or set CUDA_HOME"
        )
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    parts = [part for part in re.split(r"[\s;]+", asked) if part]
    if device.type == "cuda" and not all(map(ARCHITECTURE.fullmatch, parts)):
        raise Unsupported(
            f"TORCH_CUDA_ARCH_LIST: got {asked}, of which DeepSpeed reads numbers alone; set it to "
            "9.0, for example"
        )
    if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        raise Unsupported(
            "libaio is missing and DeepSpeed's async_io is built with it; install libaio-dev "
            "(libaio-devel)"
        )
