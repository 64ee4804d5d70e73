"""The store: the only owner of parameters, optimizer state and gradients, on the host but for blocks placed on the device.

Two kinds of memory, allocated once: pinned (all that a DMA touches: weights, gradient and activation slabs; one arena of
exact size unless `system.pinned` says otherwise) and pageable (all that only the CPU touches: master or remainder, moments,
kept gradients). Invariant: nothing is allocated or pinned after setup, and every byte is in `host_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.layout import Layout
from engine.adamw import BlockState, read_master, write_master

PAGE = 4096
MASTERS = ("split", "fp32", "bf16")
"""What a bf16 system updates: an fp32 master, held as bf16 weight + int16 remainder (12 B/param with the moments) or apart (14),
or the bf16 weight itself (10), as the published code does, which loses small updates."""

PINNED = ("exact", "torch", "none")
"""How memory that a DMA touches is held: one registered arena of exact size; one buffer a block from torch's pinned allocator,
which rounds each up to a power of two; or pageable, which the driver copies through a staging buffer while the caller waits."""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """Sizes of the store."""

    layouts: Sequence[Layout]
    """One a block."""
    dtype: torch.dtype
    """Of weights and gradients: bfloat16 or float32."""
    master: str
    """One of MASTERS; a float32 weight is always the master itself."""
    slabs: Mapping[int, int]
    """Host gradient slab -> elements."""
    activations: Mapping[int, int] = field(default_factory=dict)
    """Offloaded layer -> bytes of its pinned slab for activations."""
    kept: Sequence[int] = ()
    """Blocks whose gradients move out of their slab and wait in a home of their own."""
    on_device: int = 0
    """First blocks whose weights and optimizer state live on the device instead."""
    pinned: str = "none"
    """One of PINNED; none where there is no device to copy to."""

    def buffers(self) -> list[int]:
        """Bytes of each piece that a DMA touches: weights by block, gradient slabs, activation slabs."""
        numels = (*self.numels(on_device=False), *self.slabs.values())
        return [numel * self.dtype.itemsize for numel in numels] + list(self.activations.values())

    def numels(self, *, on_device: bool) -> list[int]:
        """Elements of each block in one of the two places, 0 where the block is in the other."""
        return [layout.numel * ((block < self.on_device) is on_device) for block, layout in enumerate(self.layouts)]

    @property
    def extra_dtype(self) -> torch.dtype | None:
        """Dtype of what completes the weight to the fp32 master; None where the weight is the master."""
        if self.dtype == torch.float32 or self.master == "bf16":
            return None
        return torch.int16 if self.master == "split" else torch.float32

    def host_bytes(self) -> dict[str, int]:
        """Host bytes by kind, as they will be allocated."""
        slabs = sum(self.slabs.values()) + sum(self.layouts[block].numel for block in self.kept)
        kinds = {"gradients": slabs * self.dtype.itemsize, "activations": sum(self.activations.values())}
        if self.pinned == "torch":
            kinds["rounding"] = sum((1 << (size - 1).bit_length()) - size for size in self.buffers() if size)
        return self._state_bytes(sum(self.numels(on_device=False))) | kinds

    def device_state_bytes(self) -> dict[str, int]:
        """Device bytes, by kind, of the blocks that live there."""
        return self._state_bytes(sum(self.numels(on_device=True)))

    def _state_bytes(self, numel: int) -> dict[str, int]:
        return {
            "weights": numel * self.dtype.itemsize,
            "master": numel * self.extra_dtype.itemsize if self.extra_dtype else 0,
            "moments": numel * 8,
        }


class HostStore:
    """The arenas, cut up by block."""

    def __init__(self, spec: HostSpec, *, device: torch.device) -> None:
        self.spec = spec
        sizes = spec.numels(on_device=False)
        self._arena = _Arena(spec.buffers(), pinned=spec.pinned)
        pieces = iter(self._arena.pieces)
        weights = [next(pieces).view(spec.dtype) for _ in sizes]
        self.slabs = {slab: next(pieces).view(spec.dtype) for slab in spec.slabs}
        self.activations = {layer: next(pieces) for layer in spec.activations}
        self.kept = {block: torch.zeros(spec.layouts[block].numel, dtype=spec.dtype) for block in spec.kept}
        moments = [_cut(torch.zeros(sum(sizes)), sizes) for _ in range(2)]
        extras: list[torch.Tensor] | list[None] = [None] * len(sizes)
        if spec.extra_dtype is not None:
            extras = _cut(torch.zeros(sum(sizes), dtype=spec.extra_dtype), sizes)
        self.states = [
            BlockState(weight=w, extra=x, exp_avg=m, exp_avg_sq=v) for w, x, m, v in zip(weights, extras, *moments, strict=True)
        ]
        for block in range(spec.on_device):
            self.states[block] = _device_state(spec, spec.layouts[block].numel, device)

    def set_parameter(self, block: int, name: str, value: torch.Tensor) -> None:
        """Store an initial or resumed parameter, of any dtype and device, as master and weight."""
        field = next(f for f in self.spec.layouts[block].fields if f.name == name)
        assert value.shape == field.shape, f"{name}: got {tuple(value.shape)}, expected {tuple(field.shape)}"
        part, state = slice(field.offset, field.offset + field.numel), self.states[block]
        if value.dtype == state.weight.dtype and (state.extra is None or state.extra.dtype == torch.int16):
            state.weight[part].copy_(value.reshape(-1))  # exact: the remainder is zero
            if state.extra is not None:
                state.extra[part].zero_()
            return
        master = value.reshape(-1).float().to(state.weight.device)
        write_master(master, state.weight[part], None if state.extra is None else state.extra[part])

    def parameters(self, block: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(local name, fp32 copy on the host) of a block's parameters."""
        state = self.states[block]
        for f in self.spec.layouts[block].fields:
            part = slice(f.offset, f.offset + f.numel)
            extra = None if state.extra is None else state.extra[part]
            yield f.name, read_master(state.weight[part], extra).to("cpu", copy=True).view(f.shape)

    def moments(self, block: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(local name, fp32 copy on the host) of the first moment of a block's parameters."""
        for f, view in self.spec.layouts[block].items(self.states[block].exp_avg):
            yield f.name, view.to("cpu", copy=True)

    def close(self) -> None:
        """Unpin; idempotent."""
        self._arena.close()


def _device_state(spec: HostSpec, numel: int, device: torch.device) -> BlockState:
    return BlockState(
        weight=torch.zeros(numel, dtype=spec.dtype, device=device),
        extra=None if spec.extra_dtype is None else torch.zeros(numel, dtype=spec.extra_dtype, device=device),
        exp_avg=torch.zeros(numel, device=device),
        exp_avg_sq=torch.zeros(numel, device=device),
    )


def _cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive pieces of the given lengths, which fill `flat`."""
    return list(torch.split(flat, list(sizes)))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Arena:
    """Zeroed bytes in pieces of exactly the sizes asked for, pinned as PINNED says; the exact kind is page-aligned and in one."""

    def __init__(self, sizes: Sequence[int], *, pinned: str) -> None:
        self._registered: torch.Tensor | None = None
        if pinned == "torch":
            self.pieces = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            return
        total = sum(sizes)
        storage = torch.zeros(total + PAGE, dtype=torch.uint8)  # zeroing is the parallel first touch
        start = -storage.data_ptr() % PAGE
        whole = storage[start : start + total]
        self.pieces = _cut(whole, sizes)
        if pinned == "exact" and total:
            error = _cudart().cudaHostRegister(whole.data_ptr(), total, 0)
            if int(error) != 0:
                raise MemoryError(f"cannot pin {total} bytes of host memory (CUDA error {int(error)}); use a smaller model")
            self._registered = whole

    def close(self) -> None:
        if self._registered is not None:
            _cudart().cudaHostUnregister(self._registered.data_ptr())
            self._registered = None
