"""Chooses what to put into the device memory that streaming leaves free, which activations wait on
the host, and how many layers' inputs there is room for.

Invariant: of the placements tried whose closed-form bytes fit device and host, the one whose
simulated step is the shortest, and of equals the one with the fewest offloaded layers, then the
fewest device bytes; but one that leaves nothing on the host where it fits and costs little.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left as bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.blocks import Blocks
from engine.config import AUTO, PLACED

USABLE_DEVICE, LEFT_FREE = 0.94, 6_000_000_000
"""Share of the device's memory to fill, or all but so many bytes where that is more; the rest is
the CUDA context, library workspaces and fragmentation. Of an H200 they took 4.2 GB at most beyond
what was planned, in 38 rows of the engine that fill it."""
USABLE_HOST = 0.9
"""Share of the host's memory to fill; the rest is the kernel's, for pages and pinned memory too. At
94% a run was killed."""
EQUAL = 1e-3
"""Share of a step by which two placements may differ and still count as equally fast."""
RESIDENT = 0.02
"""Share of a step to give for leaving no block on the host: no update is pending at a step's end
(14% of a window of two at 3B, by the model), none depends on what else the CPU does, and host
memory is free."""

Fits = Callable[[Blocks], bool]


def usable(device_bytes: int) -> int:
    """Bytes of a device of so many that a plan may fill."""
    return max(int(USABLE_DEVICE * device_bytes), device_bytes - LEFT_FREE)


def nothing_moved(blocks: Blocks) -> Blocks:
    """What was left open chosen as nothing."""
    return replace(blocks, **{name: max(0, getattr(blocks, name)) for name in PLACED})


def checkpoint_interval(
    blocks: Blocks, *, fits: Fits, device_bytes: Callable[[Blocks], int]
) -> int:
    """The fewest layers between two kept inputs with which the blocks fit, with nothing placed that
    is left to `choose`; where none fits, that of the fewest device bytes."""
    plain = nothing_moved(blocks)
    tried = [replace(plain, checkpoint_interval=number) for number in blocks.layers]
    return next(filter(fits, tried), min(tried, key=device_bytes)).checkpoint_interval


def fewest_on_disk(asked: Blocks, *, fits: Fits, device_bytes: Callable[[Blocks], int]) -> int:
    """Of how many blocks the state must be on disk, the drives being the slowest, where the device
    has as much of it as there is room for instead of activations. Of all, for `plan` to refuse,
    where even that does not fit."""
    devices, most = _open(asked.device_optimizer, asked.num_blocks), asked.num_blocks

    def has_room(number: int) -> bool:
        """With so many at most: those on the device are not on disk."""
        blocks = replace(asked, disk_blocks=number)
        if blocks.checkpoint_interval == AUTO:
            interval = checkpoint_interval(blocks, fits=fits, device_bytes=device_bytes)
            blocks = replace(blocks, checkpoint_interval=interval)
        plain = nothing_moved(blocks)
        return any(
            fits(replace(plain, device_optimizer=here, disk_blocks=min(number, most - here)))
            for here in devices
        )

    if has_room(0):
        return 0
    # Buffers cost more than the first few save; those of the outer blocks more than these save.
    layers, outer = range(1, asked.num_layers + 1), range(asked.num_layers + 1, most)
    fewest = bisect(layers, True, key=has_room)
    if fewest < len(layers):
        return layers[fewest]
    return next(filter(has_room, outer), most)


def choose(
    asked: Blocks,
    *,
    fits: Fits,
    device_bytes: Callable[[Blocks], int],
    step_s: Callable[[Blocks], float],
) -> Blocks:
    """`asked` with what is AUTO of PLACED chosen.

    For given device blocks and offloaded layers the most kept layers that fit are best: one more
    saves a recomputation. Of the other two a grid of at most 16 x 8 is tried, then every pair
    around its best, then everything on the device; each with the weights of kept layers loaded once
    and twice.
    """
    devices = _open(asked.device_optimizer, asked.num_blocks)
    keeps = _open(asked.keep_activations, asked.num_layers)
    offloads = _open(asked.offload_activations, asked.num_layers)
    reloads = _open(asked.reload_weights, 1)
    found: dict[tuple[int, int, int], tuple[float, int, Blocks]] = {}

    def best(pairs: Iterable[tuple[int, int]]) -> Blocks | None:
        for (device, offload), reload in itertools.product(pairs, reloads):
            blocks = replace(asked, device_optimizer=device, offload_activations=offload)
            blocks = replace(blocks, reload_weights=reload)
            key = device, offload, reload
            if key not in found and (most := _most_kept(blocks, keeps, fits)):
                found[key] = (step_s(most), device_bytes(most), most)
        if not found:
            return None
        fastest = min(seconds for seconds, _, _ in found.values())
        equal = (item for item in found.values() if item[0] <= fastest * (1 + EQUAL))
        return min(equal, key=lambda item: (item[2].offload_activations, item[1]))[2]

    strides = -(-len(devices) // 16), -(-len(offloads) // 8)
    chosen = best(itertools.product(devices[:: strides[0]], offloads[:: strides[1]]))
    if chosen is None:  # room may lie between the points of the grid
        chosen = best(itertools.product(devices, offloads[:1]))
    if chosen is None:  # nothing fits: the smallest, which plan() will refuse
        return replace(
            asked,
            device_optimizer=devices[0],
            keep_activations=keeps[0],
            offload_activations=offloads[0],
            reload_weights=reloads[-1],
        )
    near_devices = _around(chosen.device_optimizer, devices, strides[0])
    near_offloads = _around(chosen.offload_activations, offloads, strides[1])
    chosen = best(itertools.product(near_devices, near_offloads)) or chosen
    key = chosen.device_optimizer, chosen.offload_activations, chosen.reload_weights
    seconds = found[key][0]
    everything = (devices[-1], offloads[0])
    best([everything])
    here = found.get((*everything, reloads[0]))
    resident = here if everything[0] == asked.num_blocks else None
    return resident[2] if resident and resident[0] <= seconds * (1 + RESIDENT) else chosen


def _open(value: int, most: int) -> Sequence[int]:
    """The values to choose among."""
    return range(most + 1) if value == AUTO else (value,)


def _around(middle: int, values: Sequence[int], stride: int) -> list[int]:
    """Those that a grid of `stride` left out beside its point, one neighbour at least."""
    return [value for value in values if abs(value - middle) < max(2, stride)]


def _most_kept(blocks: Blocks, keeps: Sequence[int], fits: Fits) -> Blocks | None:
    """The candidate that keeps the most layers' activations and still fits; an offloaded layer
    cannot be kept."""
    most = None
    for number in keeps:
        candidate = replace(blocks, keep_activations=number)
        if number + blocks.offload_activations > blocks.num_layers or not fits(candidate):
            break  # more kept layers need more
        most = candidate
    return most
