"""What a model's own matrix products and its attention reach on this device: at once, and held for
seconds, when power or heat hold the clock down.

    python -m sweeps.products model=qwen2.5-7b shape=b32x1024   # a minute and a half on a GPU

Every product of a layer and of the head in its three parts: forward, gradient of the input,
gradient of the weight; side by side what could be one product (`q+k+v`, `gate+up`). Invariant: each
is measured alone, on random numbers, and the last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from baselines.model import config_of
from baselines.system import Unsupported
from engine import Widths
from sweeps.ceilings import held
from sweeps.command_line import mend_streams
from sweeps.config import Cell
from sweeps.errors import USER_ERRORS, one_line, overrides_in
from sweeps.memory import DeviceSampler, Pace, device_sampler
from sweeps.plan import compose_plan

HELD_S = {"cuda": 1.5, "cpu": 0.01}
"""Seconds that count of each product; a third as long goes before."""
COOL_S, BURST_S = 0.5, 0.03
"""Seconds of rest before a burst on a GPU, and its own."""
BETWEEN_S = 0.02
"""Seconds of work between two waits for the device, which leave no gap to speak of."""
PARTS = ("forward", "input's gradient", "weight's gradient")
BACKWARD = 2.5
"""Operations of attention's backward over its forward's: five products for two (Dao,
FlashAttention-2, section 4.1)."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What one product reached; TFLOPS count the operations of the product itself."""

    name: str
    part: str
    gflop: float
    burst_tflops: float
    sustained_tflops: float
    sm_mhz: float | None
    power_w: float | None
    throttle_reasons: dict[str, float] | None


def matrices(widths: Widths) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each matrix of a layer with a gated MLP, and of the head."""
    w = widths
    return {
        "q": (w.hidden, w.queries),
        "k": (w.hidden, w.keys),
        "q+k+v": (w.hidden, w.queries + 2 * w.keys),
        "o": (w.queries, w.hidden),
        "gate": (w.hidden, w.inner),
        "gate+up": (w.hidden, 2 * w.inner),
        "down": (w.inner, w.hidden),
        "head": (w.hidden, w.vocab),
    }


def works(
    widths: Widths, rows: int, seq_len: int, chunk: int, device: torch.device
) -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    """(name, part, operations, work) of every product, each made when its turn comes. chunk: tokens
    of the head's products, as its loss has them."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    for name, (inputs, outputs) in matrices(widths).items():
        tokens = min(rows * seq_len, chunk) if name == "head" else rows * seq_len
        x, weight, y = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        for part, factors in zip(PARTS, ((x, weight.T), (y, weight), (y.T, x)), strict=True):
            yield name, part, 2.0 * tokens * inputs * outputs, partial(torch.mm, *factors)
        del x, weight, y, factors
    width = widths.queries // widths.heads
    query, key, value = (
        random(rows, heads, seq_len, width).requires_grad_()
        for heads in (widths.heads, widths.keys // width, widths.keys // width)
    )

    def attend() -> torch.Tensor:
        with torch.enable_grad():
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

    output = attend()
    given = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, [query, key, value], given, retain_graph=True)

    flops = 2.0 * rows * widths.queries * seq_len**2  # both products, of which a mask leaves half
    yield "attention", "forward", flops, attend
    yield "attention", "backward", BACKWARD * flops, backward


def reached(
    work: Callable[[], object],
    flops: float,
    synchronize: Callable[[], object],
    sampler: DeviceSampler,
    held_s: float,
) -> tuple[float, float, Pace]:
    """TFLOPS in a burst and held, and the pace meanwhile."""
    work()
    synchronize()
    time.sleep(min(COOL_S, held_s))
    burst, _ = held(_several(work, 1), synchronize, device_sampler("cpu"), 0.0, BURST_S)
    number = max(1, math.ceil(BETWEEN_S * burst))
    runs, paced = held(_several(work, number), synchronize, sampler, held_s / 3, held_s)
    return burst * flops / 1e12, number * runs * flops / 1e12, paced


def _several(work: Callable[[], object], number: int) -> Callable[[], None]:
    def all_of_them() -> None:
        for _ in range(number):
            work()

    return all_of_them


def measure(cell: Cell) -> Iterator[Reached]:
    """Every product of the cell's model at its shape, one after another."""
    device, held_s = torch.device(cell.machine.device), HELD_S[cell.machine.device]
    sampler = device_sampler(cell.machine.device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    widths, shape = Widths.of(config_of(cell.model)), cell.shape
    chunk = int(cell.options.get("loss_chunk", 4096))
    for name, part, flops, work in works(
        widths, shape.micro_batch_size, shape.seq_len, chunk, device
    ):
        burst, sustained, paced = reached(work, flops, synchronize, sampler, held_s)
        about = dataclasses.asdict(paced)
        del about["host_power_w"]
        yield Reached(
            name=name,
            part=part,
            gflop=flops / 1e9,
            burst_tflops=burst,
            sustained_tflops=sustained,
            **about,
        )


def line_of(found: Reached) -> str:
    """A line of the table."""
    reasons = ", ".join(
        f"{name} {share:.0%}" for name, share in (found.throttle_reasons or {}).items()
    )
    seen = [
        "-" if value is None else f"{value:.4g}"
        for value in (found.burst_tflops, found.sustained_tflops, found.sm_mhz, found.power_w)
    ]
    columns = "".join(f"{value:>10}" for value in seen)
    return f"{found.name:<10}{found.part:<18}{found.gflop:>10.1f}{columns}  {reasons}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a product, then one of JSON; 2 and one line where the command line is wrong."""
    mend_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        cell, _ = compose_plan(given)
    except (*USER_ERRORS, Unsupported) as error:
        print(one_line(error, overrides_in(given)), file=sys.stderr)
        return 2
    heads = "".join(f"{name:>10}" for name in ("GFLOP", "burst", "held", "MHz", "W"))
    print(f"{'product':<10}{'part':<18}{heads}  held down by", flush=True)
    found = []
    for one in measure(cell):
        print(line_of(one), flush=True)
        found.append(dataclasses.asdict(one))
    print(json.dumps({"model": cell.model.name, "products": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
