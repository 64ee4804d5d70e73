"""Activations of one layer that wait in pinned host memory: saved by the forward, evicted, fetched
back for the backward.

Autograd's saved-tensor hooks take what the graph would hold. Weights are not moved: the backward
finds them in the slot into which they were loaded again. Where the activations stay on the device,
that is all the hooks do. Neither is what outlives the layer anyway:
its input and the arguments that all layers share. Invariant: between `drop` and the backward
nothing of the layer but its input is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

ALIGNMENT = 512
"""Bytes to which each saved tensor is aligned in its slab."""
SMALL = 1 << 12
"""Bytes up to which a tensor stays where it is: random states, scalars."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Which of the moved pieces a saved tensor lies in, and how it looked."""

    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from the piece's start."""


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
    """Bytes of the pinned slab. What a layer saves beyond them stays on the device: right, at the
    price of memory. 0 leaves all of it there."""
    num_bytes: int = 0
    """Bytes of all pieces in their slab."""
    _pieces: list[torch.Tensor] = field(default_factory=list)
    """Saved tensors in memory order as bytes on the device: as the forward left them, none, or as
    fetched."""
    _places: list[slice] = field(default_factory=list)
    """Where each lies in the slab."""
    _versions: list[int] = field(default_factory=list)
    """How often each had been written when it was saved."""
    _seen: dict[tuple[int, int], int] = field(default_factory=dict)

    def hooks(self) -> AbstractContextManager[Any]:
        """While it lasts, what autograd saves goes through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What stands for a tensor that is to be moved, or itself."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() == self.home.untyped_storage().data_ptr():
            offset = int(tensor.storage_offset())
            return _Weight(offset=offset, size=tensor.shape, stride=tensor.stride())
        if storage.data_ptr() in self.shared or tensor.nbytes <= SMALL:
            return tensor
        flat = _whole(tensor)
        if (flat.data_ptr(), flat.nbytes) not in self._seen and _is_dense(tensor):
            flat = tensor.as_strided((tensor.numel(),), (1,))
        index = self._moved(flat)
        if index is None:
            return tensor
        offset = int(tensor.storage_offset() - flat.storage_offset())
        return Moved(
            index=index,
            dtype=tensor.dtype,
            size=tensor.shape,
            stride=tensor.stride(),
            offset=offset,
        )

    def _moved(self, flat: torch.Tensor) -> int | None:
        """Number of the piece that `flat`, 1-D and contiguous, is; None where it has no room."""
        key = (flat.data_ptr(), flat.nbytes)
        if key not in self._seen:
            if self.num_bytes + flat.nbytes > self.capacity:
                return None
            self._seen[key] = len(self._pieces)
            self._pieces.append(flat.view(torch.uint8))
            self._versions.append(self._pieces[-1]._version)
            self._places.append(slice(self.num_bytes, self.num_bytes + flat.nbytes))
            self.num_bytes += -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
        return self._seen[key]

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that `pack` was given, where it is now."""
        if isinstance(packed, _Weight):
            return self.home.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, Moved):
            piece = self._pieces[packed.index].view(packed.dtype)
            start = piece.storage_offset() + packed.offset
            return piece.as_strided(packed.size, packed.stride, start)
        saved: torch.Tensor = packed
        return saved

    def copies(
        self, slab: torch.Tensor, part: int = 0, parts: int = 1
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(piece on the device, its place in the host `slab`) pairs, bytes: what of them lies in
        one of equal parts of the slab."""
        length = -(-self.num_bytes // parts)
        for piece, place in zip(self._pieces, self._places, strict=True):
            start = max(place.start, part * length)
            end = min(place.stop, (part + 1) * length)
            if start < end:
                yield piece[start - place.start : end - place.start], slab[start:end]

    def drop(self) -> None:
        """Give up the device memory."""
        seen = [piece._version for piece in self._pieces]
        assert self._versions in (seen, []), "a saved activation was written in place"
        self._pieces.clear()
        self._seen.clear()

    def stage(self) -> None:
        """Device memory of the same sizes again, which what another layer gave up fits exactly."""
        self._versions.clear()  # what comes back is written
        sizes = [place.stop - place.start for place in self._places]
        self._pieces = [
            torch.empty(size, dtype=torch.uint8, device=self.home.device) for size in sizes
        ]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements, in some order of the dimensions, fill one stretch of memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that `tensor` is a part of, 1-D, in its dtype.

    It moves as one piece for all parts that have gaps, such as queries, keys and values of one
    product: with other strides kernels would round otherwise, and compiled ones would refuse them.
    """
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def storages(values: Sequence[torch.Tensor]) -> set[int]:
    """What tells the storages of tensors apart."""
    return {value.untyped_storage().data_ptr() for value in values}
