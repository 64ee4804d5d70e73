"""Chooses what to put into the device memory that streaming leaves free, which activations wait on the host, and how many layers'
inputs there is room for.

Invariant: of the placements tried whose closed-form bytes fit device and host, the one whose simulated step is the
shortest, and of equals the one with the fewest offloaded layers, then the fewest device bytes; but one that leaves nothing on the
host where it fits and costs little.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.pipeline import Pipeline

AUTO = -1
"""Option value that leaves the choice to this module."""
USABLE_DEVICE = 0.94
"""Share of the device's memory to fill; the rest is the CUDA context, library workspaces and fragmentation."""
USABLE_HOST = 0.9
"""Share of the host's memory to fill; the rest is the kernel's, for pages and pinned memory too. At 94% a run was killed."""
EQUAL = 1e-3
"""Share of a step by which two placements may differ and still count as equally fast."""
RESIDENT = 0.02
"""Share of a step to give for leaving no block on the host: no update is pending at a step's end (14% of a window of two at 3B, by
the model), none depends on what else the CPU does, and host memory is free."""


def checkpoint_interval(pipeline: Pipeline, *, fits: Callable[[Pipeline], bool], device_bytes: Callable[[Pipeline], int]) -> int:
    """The fewest layers between two kept inputs with which the pipeline fits, with nothing placed that is left to `choose`; where
    none fits, that of the fewest device bytes."""
    placed = {name: max(0, getattr(pipeline, name)) for name in ("device_blocks", "kept_layers", "offloaded_layers")}
    tried = [replace(pipeline, checkpoint_interval=number, **placed) for number in range(1, pipeline.num_layers + 1)]
    return next(filter(fits, tried), min(tried, key=device_bytes)).checkpoint_interval


def choose(
    pipeline: Pipeline,
    *,
    fits: Callable[[Pipeline], bool],
    device_bytes: Callable[[Pipeline], int],
    step_s: Callable[[Pipeline], float],
) -> Pipeline:
    """`pipeline` with device_blocks, kept_layers and offloaded_layers chosen where they are AUTO.

    For given device blocks and offloaded layers the most kept layers that fit are best: one more saves a recomputation.
    Of the other two a grid of at most 16 x 8 is tried, then every pair around its best, then everything on the device.
    """
    blocks = range(pipeline.num_blocks + 1) if pipeline.device_blocks == AUTO else (pipeline.device_blocks,)
    offloads = range(pipeline.num_layers + 1) if pipeline.offloaded_layers == AUTO else (pipeline.offloaded_layers,)
    layers = range(pipeline.num_layers + 1) if pipeline.kept_layers == AUTO else (pipeline.kept_layers,)
    found: dict[tuple[int, int], tuple[float, int, Pipeline]] = {}

    def best(pairs: Iterable[tuple[int, int]]) -> Pipeline | None:
        for pair in pairs:
            asked = replace(pipeline, device_blocks=pair[0], offloaded_layers=pair[1])
            if pair not in found and (most := _most_kept(asked, layers, fits)):
                found[pair] = (step_s(most), device_bytes(most), most)
        if not found:
            return None
        fastest = min(seconds for seconds, _, _ in found.values())
        equal = (item for item in found.values() if item[0] <= fastest * (1 + EQUAL))
        return min(equal, key=lambda item: (item[2].offloaded_layers, item[1]))[2]

    strides = -(-len(blocks) // 16), -(-len(offloads) // 8)
    chosen = best(itertools.product(blocks[:: strides[0]], offloads[:: strides[1]]))
    if chosen is None:  # nothing fits: the smallest, which plan() will refuse
        return replace(pipeline, device_blocks=blocks[0], kept_layers=layers[0], offloaded_layers=offloads[0])
    near_blocks = _around(chosen.device_blocks, blocks, strides[0])
    chosen = best(itertools.product(near_blocks, _around(chosen.offloaded_layers, offloads, strides[1]))) or chosen
    everything, seconds = (blocks[-1], offloads[0]), found[chosen.device_blocks, chosen.offloaded_layers][0]
    best([everything])
    resident = found.get(everything) if everything[0] == pipeline.num_blocks else None
    return resident[2] if resident and resident[0] <= seconds * (1 + RESIDENT) else chosen


def _around(middle: int, values: Sequence[int], stride: int) -> list[int]:
    """Those that a grid of `stride` left out beside its point, one neighbour at least."""
    return [value for value in values if abs(value - middle) < max(2, stride)]


def _most_kept(pipeline: Pipeline, layers: Sequence[int], fits: Callable[[Pipeline], bool]) -> Pipeline | None:
    """The candidate that keeps the most layers' activations and still fits; an offloaded layer cannot be kept."""
    most = None
    for kept_layers in layers:
        candidate = replace(pipeline, kept_layers=kept_layers)
        if kept_layers + pipeline.offloaded_layers > pipeline.num_layers or not fits(candidate):
            break  # more kept layers need more
        most = candidate
    return most
