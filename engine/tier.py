"""Optimizer state that lies on disk: each block's on the drives, and the few buffers of host memory
through which all of it passes.

Invariant: a step reads a block into its buffer, updates it there and writes it back; between steps
one block at a time is in memory, and is on the drives again before the next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.blocks import STAGES
from engine.disk import Drives
from engine.sizes import StoreSpec


class Tier:
    """What is on disk of a store."""

    def __init__(
        self, spec: StoreSpec, folders: Sequence[Path], buffers: Sequence[torch.Tensor]
    ) -> None:
        """folders: one a drive. buffers: STAGES of them, uint8, page-aligned, each as long as the
        longest block's state. Raises what `Drives` does."""
        self._drives = Drives(folders, spec.disk_bytes)
        self.places: dict[int, tuple[int, torch.Tensor]] = {}
        """Block -> where its state begins on the drives, and the buffer that it passes through."""
        offset = 0
        for place, block in enumerate(spec.on_disks):
            buffer = buffers[place % STAGES][: spec.rest_itemsize * spec.part(block)]
            self.places[block] = offset, buffer
            offset += buffer.numel()
        self._fetched, self._changed = -1, False
        """The block that is in its buffer between steps, and whether it is to go back."""

    def read(self, block: int) -> int:
        """From the drives into the block's buffer; bytes."""
        offset, buffer = self.places[block]
        self._drives.read(offset, buffer)
        return buffer.numel()

    def write(self, block: int) -> int:
        """And back; bytes."""
        offset, buffer = self.places[block]
        self._drives.write(offset, buffer)
        return buffer.numel()

    def copy(self, block: int, into: torch.Tensor) -> None:
        """What is on the drives of a block, beside the steps. into: as its buffer."""
        self._drives.read(self.places[block][0], into)

    def fetch(self, block: int, *, changes: bool) -> None:
        """Between steps: have a block in its buffer. changes: whether it will be written over, and
        must go back."""
        if block != self._fetched:
            self.settle()
            self.read(block)
            self._fetched = block
        self._changed |= changes

    def settle(self) -> None:
        """Before the next step: what `fetch` fetched is on the drives again."""
        if self._changed:
            self.write(self._fetched)
        self._fetched, self._changed = -1, False

    def close(self) -> None:
        """Give the drives back; idempotent."""
        self._drives.close()
