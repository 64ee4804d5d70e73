"""Chooses what to put into the device memory that streaming leaves free: optimizer state, activations, or both.

Invariant: of all placements whose closed-form bytes fit, the one whose simulated step is the shortest, and of equals
the one with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.pipeline import Pipeline

AUTO = -1
"""Option value that leaves the choice to this module."""
USABLE = 0.93
"""Share of the device's memory to fill; the rest is the CUDA context, library workspaces and fragmentation."""
EQUAL = 1e-3
"""Share of a step by which two placements may differ and still count as equally fast."""


def choose(
    pipeline: Pipeline, *, budget: int, device_bytes: Callable[[Pipeline], int], step_s: Callable[[Pipeline], float]
) -> Pipeline:
    """`pipeline` with device_blocks and kept_layers chosen where they are AUTO. budget: device bytes to stay under.

    For each number of device blocks the most kept layers that fit are best: one more saves a recomputation.
    """
    blocks = range(pipeline.num_blocks + 1) if pipeline.device_blocks == AUTO else (pipeline.device_blocks,)
    layers = range(pipeline.num_layers + 1) if pipeline.kept_layers == AUTO else (pipeline.kept_layers,)
    found = []
    for device_blocks in blocks:
        fitting = None
        for kept_layers in layers:
            candidate = replace(pipeline, device_blocks=device_blocks, kept_layers=kept_layers)
            size = device_bytes(candidate)
            if size > budget:
                break  # more kept layers need more
            fitting = (size, candidate)
        if fitting:
            found.append((step_s(fitting[1]), *fitting))
    if not found:  # nothing fits: the smallest, which plan() will refuse
        return replace(pipeline, device_blocks=blocks[0], kept_layers=layers[0])
    fastest = min(found, key=lambda item: item[0])[0]
    return min((item for item in found if item[0] <= fastest * (1 + EQUAL)), key=lambda item: item[1])[2]
