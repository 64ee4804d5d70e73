"""Chooses what to put into the device memory that streaming leaves free: optimizer state, activations, or both.

A cost model of the two things left to win once transfers are hidden: seconds that the next forward waits for the
CPU's AdamW, and seconds of recomputation. Invariant: of all placements whose closed-form bytes fit, the one with the
fewest predicted seconds, and of equals the one with the fewest bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.layout import Layout
from engine.optimizer import AdamW, BlockState
from engine.recipe import Recipe
from engine.schedule import Pipeline

AUTO = -1
"""Option value that leaves the choice to this module."""
USABLE = 0.93
"""Share of the device's memory to fill; the rest is the CUDA context, library workspaces and fragmentation."""
LAYER_EFFICIENCY = 0.75
"""Rate of a whole layer over that of one large matrix product: 7B and 14B shapes, compiled, 32,768 tokens, one H200."""
PROBE_NUMEL = 1 << 26
PROBE_SIZE = 8192


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the machine does in a second."""

    layer_flops: float
    """Floating-point operations of a decoder layer on the device."""
    adamw_params: float
    """Parameters that the CPU's AdamW updates."""


def measure(device: torch.device, num_threads: int) -> Rates:
    """Probe both rates: a bf16 matrix product on the device, one AdamW pass over 64 Mi parameters on the host."""
    a = torch.randn(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=device)

    def product() -> None:
        torch.matmul(a, a)
        torch.cuda.synchronize(device)

    weight, gradient = (torch.zeros(PROBE_NUMEL, dtype=torch.bfloat16) for _ in range(2))
    extra, moments = torch.zeros(PROBE_NUMEL, dtype=torch.int16), [torch.zeros(PROBE_NUMEL) for _ in range(2)]
    state = BlockState(weight=weight, extra=extra, exp_avg=moments[0], exp_avg_sq=moments[1])
    optimizer = AdamW(Recipe(), num_threads=num_threads)
    update = _fastest(lambda: optimizer.step(state, gradient, step=0, scale=1.0))
    return Rates(layer_flops=LAYER_EFFICIENCY * 2 * PROBE_SIZE**3 / _fastest(product), adamw_params=PROBE_NUMEL / update)


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def predicted_s(pipeline: Pipeline, layouts: list[Layout], tokens: int, rates: Rates) -> float:
    """Seconds of a step beyond its forward and backward: waiting for updates in the forward, and recomputing."""
    updated = computed = forward = recomputed = 0.0
    for block, layout in enumerate(layouts):
        if not pipeline.on_device(block):
            updated += layout.num_params / rates.adamw_params
            if pipeline.clip:  # without clipping, updates run beside the backward
                computed = max(computed, updated)
        if pipeline.is_layer(block):
            seconds = 2 * layout.num_params * tokens / rates.layer_flops
            computed += seconds
            forward += seconds
            recomputed += seconds * (not pipeline.is_kept(block))
    return computed - forward + recomputed


def choose(
    pipeline: Pipeline, layouts: list[Layout], tokens: int, rates: Rates, *, budget: int, device_bytes: Callable[[Pipeline], int]
) -> Pipeline:
    """`pipeline` with device_blocks and kept_layers chosen where they are AUTO. budget: device bytes to stay under."""
    blocks = range(len(layouts) + 1) if pipeline.device_blocks == AUTO else (pipeline.device_blocks,)
    layers = range(pipeline.num_layers + 1) if pipeline.kept_layers == AUTO else (pipeline.kept_layers,)
    found = []
    for device_blocks in blocks:
        for kept_layers in layers:
            candidate = replace(pipeline, device_blocks=device_blocks, kept_layers=kept_layers)
            size = device_bytes(candidate)
            if size > budget:
                break  # more kept layers need more
            found.append((predicted_s(candidate, layouts, tokens, rates), size, candidate))
    if not found:  # nothing fits: the smallest, which plan() will refuse
        return replace(pipeline, device_blocks=blocks[0], kept_layers=layers[0])
    return min(found, key=lambda item: item[:2])[2]
