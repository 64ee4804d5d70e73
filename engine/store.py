"""The store: the only owner of parameters, optimizer state and gradients, on the host but for
blocks placed on the device. Of several ranks each has its own part of every block.

Two kinds of memory, allocated once: pinned (all that a DMA touches: weights, gradient and
activation slabs; one arena of exact size unless `system.pinned` says otherwise) and pageable (all
that only the CPU touches: master or remainder, moments, parked gradients). Invariant: nothing is
allocated or pinned after setup, and every byte is in `host_bytes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.blocks import STAGES
from engine.layout import within
from engine.master import BlockState, read_master, write_master
from engine.ranks import Ranks
from engine.sizes import PAGE, StoreSpec
from engine.tier import Tier

PIECE = 1 << 20
"""Elements of a parameter that are split into weight and master at a time: each takes 16 bytes
more while it is."""


class Store:
    """The arenas, cut up by block."""

    def __init__(
        self, spec: StoreSpec, *, device: torch.device, ranks: Ranks, folders: Sequence[Path] = ()
    ) -> None:
        """folders: one a drive, where there is state on disk. Raises what `Drives` does."""
        self.spec, self.ranks = spec, ranks
        sizes = spec.hosted_numels
        resident = [0 if block in spec.on_disks else size for block, size in enumerate(sizes)]
        self._arena = Arena(spec.buffers(), pinned=spec.pinned)
        pieces = iter(self._arena.pieces)
        weights = [next(pieces).view(spec.dtype) for _ in sizes]
        self.slabs = {slab: next(pieces).view(spec.dtype) for slab in spec.slabs}
        self.activations = {layer: next(pieces) for layer in spec.activations}
        numels = {block: spec.part(block) for block in spec.parked}
        self.parked = {b: torch.zeros(numel, dtype=spec.dtype) for b, numel in numels.items()}
        moments = [_cut(torch.zeros(sum(resident)), resident) for _ in range(2)]
        extras: list[torch.Tensor] | list[None] = [None] * len(sizes)
        if spec.extra_dtype is not None:
            extras = _cut(torch.zeros(sum(resident), dtype=spec.extra_dtype), resident)
        self.states = [
            BlockState(weight=w, extra=x, exp_avg=m, exp_avg_sq=v)
            for w, x, m, v in zip(weights, extras, *moments, strict=True)
        ]
        self.homes: dict[int, torch.Tensor] = {}
        """Block on the device -> its whole weights; of them the state has this rank's part."""
        for block in range(spec.on_device):
            home = torch.zeros(spec.layouts[block].numel, dtype=spec.dtype, device=device)
            self.homes[block] = home
            self.states[block] = _device_state(spec, home[self.part(block)])
        self.stages = Arena([spec.stage_bytes] * STAGES, pinned="none").pieces
        """Buffers that state on disk passes through."""
        self.tier = Tier(spec, folders, self.stages) if spec.on_disks else None
        """State on disk, where there is any."""
        for block in spec.on_disks:
            self.states[block] = staged_state(
                spec, self.states[block].weight, self.on_disk.places[block][1]
            )

    @property
    def on_disk(self) -> Tier:
        """State on disk."""
        assert self.tier is not None, "nothing is on disk"
        return self.tier

    def fetch(self, block: int, *, changes: bool = False) -> None:
        """Between steps: have the state of a block in memory. changes: whether it will be written
        over."""
        if block in self.spec.on_disks:
            self.on_disk.fetch(block, changes=changes)

    def settle(self) -> None:
        """Before the next step: what `fetch` fetched is where it belongs."""
        if self.tier is not None:
            self.tier.settle()

    def part(self, block: int) -> slice:
        """This rank's elements of a block."""
        return self.ranks.part(self.spec.layouts[block].numel)

    def spread(self) -> None:
        """Weights on the device are whole again, and state on disk is there, after this rank's part
        of them was written."""
        self.settle()
        for home in self.homes.values():
            self.ranks.gather(home)

    def set_parameter(self, block: int, name: str, value: torch.Tensor) -> None:
        """Store an initial or resumed parameter, of any dtype and device, as master and weight:
        what of it this rank has."""
        field = next(f for f in self.spec.layouts[block].fields if f.name == name)
        assert value.shape == field.shape, f"{name}: {tuple(value.shape)}, not {tuple(field.shape)}"
        self.fetch(block, changes=True)
        state = self.states[block].part(within(field.stretch, self.part(block)))
        flat = value.reshape(-1)[within(self.part(block), field.stretch)]
        split = state.extra is not None and state.extra.dtype == torch.int16
        if value.dtype == state.weight.dtype and (state.extra is None or split):
            state.weight.copy_(flat)  # exact: the remainder is zero
            if state.extra is not None:
                state.extra.zero_()
            return
        for start in range(0, flat.numel(), PIECE):
            part = state.part(slice(start, min(start + PIECE, flat.numel())))
            master = flat[start : start + PIECE].float().to(part.weight.device)
            write_master(master, part.weight, part.extra)

    def parameters(self, block: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(local name, fp32 copy on the host) of a block's parameters."""
        return self._named(block, lambda state: read_master(state.weight, state.extra))

    def moments(self, block: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(local name, fp32 copy on the host) of the first moment of a block's parameters."""
        return self._named(block, lambda state: state.exp_avg)

    def _named(
        self, block: int, read: Callable[[BlockState], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What `read` finds, by parameter; alone one at a time, so that a copy is no larger."""
        layout, state = self.spec.layouts[block], self.states[block]
        self.fetch(block)
        if self.ranks.count == 1:
            for f in layout.fields:
                yield f.name, read(state.part(f.stretch)).to("cpu", copy=True).view(f.shape)
            return
        whole = torch.zeros(layout.numel)
        whole[self.part(block)] = read(state).to("cpu")
        self.ranks.gather(whole)
        for f, view in layout.items(whole):
            yield f.name, view.clone()

    def close(self) -> None:
        """Unpin, and give the drives back; idempotent."""
        self._arena.close()
        if self.tier is not None:
            self.tier.close()


def staged_state(spec: StoreSpec, weight: torch.Tensor, buffer: torch.Tensor) -> BlockState:
    """State whose arrays but the weight lie in a buffer, one behind the other."""
    numel = weight.numel()
    first, second, third = _cut(buffer, [buffer.numel() - 8 * numel, 4 * numel, 4 * numel])
    return BlockState(
        weight=weight,
        extra=None if spec.extra_dtype is None else first.view(spec.extra_dtype),
        exp_avg=second.view(torch.float32),
        exp_avg_sq=third.view(torch.float32),
    )


def _device_state(spec: StoreSpec, weight: torch.Tensor) -> BlockState:
    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(weight, dtype=dtype)

    return BlockState(
        weight=weight,
        extra=None if spec.extra_dtype is None else zeros(spec.extra_dtype),
        exp_avg=zeros(torch.float32),
        exp_avg_sq=zeros(torch.float32),
    )


def _cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive pieces of the given lengths, which fill `flat`."""
    return list(torch.split(flat, list(sizes)))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def free_pinned_cache() -> None:
    """Give back what torch pinned and holds for reuse; nothing may be on its way to or from it.

    The compiler's tuning copies there what a kernel changes (docs/log.md, below 142).
    """
    now = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 has it elsewhere
    (now or torch._C._host_emptyCache)()


class Arena:
    """Zeroed bytes in pieces of exactly the sizes asked for, pinned as `system.pinned` says; the
    exact kind is page-aligned and in one."""

    def __init__(self, sizes: Sequence[int], *, pinned: str) -> None:
        self._unpin: weakref.finalize[..., Arena] | None = None
        """Of what is registered: runs where the arena is given up half made, too."""
        if pinned == "torch":
            self.pieces = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            return
        total = sum(sizes)
        # Zeroing is the parallel first touch.
        storage = torch.zeros(total + PAGE, dtype=torch.uint8)
        start = -storage.data_ptr() % PAGE
        whole = storage[start : start + total]
        self.pieces = _cut(whole, sizes)
        if pinned == "exact" and total:
            error = int(_cudart().cudaHostRegister(whole.data_ptr(), total, 0))
            if error != 0:
                raise MemoryError(
                    f"cannot pin {total} bytes of host memory (CUDA error {error}); "
                    "use a smaller model"
                )
            self._unpin = weakref.finalize(self, _unregister, whole)
            self._unpin.atexit = False

    def close(self) -> None:
        """Unpin; idempotent."""
        if self._unpin is not None:
            self._unpin()


def _unregister(whole: torch.Tensor) -> None:
    _cudart().cudaHostUnregister(whole.data_ptr())
