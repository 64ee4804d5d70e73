"""Activations of one layer that wait in pinned host memory: saved by the forward, evicted, fetched back for the backward.

Autograd's saved-tensor hooks take what the graph would hold. Weights are not moved: the backward finds them in the
slot into which they were loaded again. Neither is what outlives the layer anyway: its input and the arguments that all
layers share. Invariant: between `drop` and the backward nothing of the layer but its input is on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

ALIGNMENT = 512
"""Bytes to which each saved tensor is aligned in its slab."""
SMALL = 1 << 12
"""Bytes up to which a tensor stays where it is: random states, scalars."""


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """Which of the moved pieces a saved tensor is, and how it looked."""

    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A saved tensor that is a view of the layer's weights."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(kw_only=True)
class Offloaded:
    """One layer in one step, all micro-batches."""

    weights: Mapping[str, torch.Tensor]
    """The leaves of the forward, by which the graph knows what it differentiates."""
    home: torch.Tensor
    """The flat device memory that they are views of; replaced by the backward's before it runs."""
    shared: set[int]
    """Storages that stay on the device: inputs and arguments."""
    capacity: int
    """Bytes of the pinned slab. What a layer saves beyond them stays on the device: right, at the price of memory."""
    graphs: list[Any] = field(default_factory=list)
    """(input, output) of each micro-batch, with the graph between them."""
    num_bytes: int = 0
    """Of all pieces in their slab."""
    _pieces: list[torch.Tensor] = field(default_factory=list)
    """Saved tensors in memory order as bytes on the device: as the forward left them, none, or as fetched."""
    _places: list[slice] = field(default_factory=list)
    """Where each lies in the slab."""
    _versions: list[int] = field(default_factory=list)
    """How often each had been written when it was saved."""
    _seen: dict[tuple[int, int], int] = field(default_factory=dict)

    def hooks(self) -> AbstractContextManager[Any]:
        """While it lasts, what autograd saves goes through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        if storage == self.home.untyped_storage().data_ptr():
            return _Weight(offset=int(tensor.storage_offset()), size=tensor.shape, stride=tensor.stride())
        if storage in self.shared or tensor.nbytes <= SMALL:
            return tensor
        flat = _flat(tensor)
        stride = tensor.stride() if flat is not None else torch.empty(tensor.shape, device="meta").stride()
        flat = tensor.contiguous().view(-1) if flat is None else flat
        key = (flat.data_ptr(), flat.nbytes)
        if key not in self._seen:
            if self.num_bytes + flat.nbytes > self.capacity:
                return tensor
            self._seen[key] = len(self._pieces)
            self._pieces.append(flat.view(torch.uint8))
            self._versions.append(self._pieces[-1]._version)
            self._places.append(slice(self.num_bytes, self.num_bytes + flat.nbytes))
            self.num_bytes += -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
        return _Moved(index=self._seen[key], dtype=tensor.dtype, size=tensor.shape, stride=stride)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Weight):
            return self.home.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _Moved):
            return self._pieces[packed.index].view(packed.dtype).as_strided(packed.size, packed.stride)
        saved: torch.Tensor = packed
        return saved

    def copies(self, slab: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(piece on the device, its place in the host `slab`) pairs, bytes."""
        return [(piece, slab[place]) for piece, place in zip(self._pieces, self._places, strict=True)]

    def drop(self) -> None:
        """Give up the device memory."""
        assert self._versions == [piece._version for piece in self._pieces], "a saved activation was written in place"
        self._pieces.clear()
        self._seen.clear()

    def stage(self) -> None:
        """Device memory of the same sizes again, which what another layer gave up fits exactly."""
        sizes = [place.stop - place.start for place in self._places]
        self._pieces = [torch.empty(size, dtype=torch.uint8, device=self.home.device) for size in sizes]


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in memory order, 1-D, where they fill one stretch of memory; else None."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def storages(values: Sequence[torch.Tensor]) -> set[int]:
    """What tells the storages of tensors apart."""
    return {value.untyped_storage().data_ptr() for value in values}


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor, piece: int) -> None:
    """Copy bytes in pieces, so that another stream's transfers find their turn between them."""
    for start in range(0, source.numel(), piece):
        target[start : start + piece].copy_(source[start : start + piece], non_blocking=True)
