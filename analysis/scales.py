"""What a study of scale varies: model size, batch, context, device memory; and how each is held, named and told.

Invariant: cells that agree in what a scale fixes differ in nothing but the scale and their system, so that a line through them is
one of that scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from analysis.cells import Cell, families, worded

Held = tuple[Any, ...]
MOST = 0.75
"""Of the cells of a study of scale, those on lines: a system that was measured at one place has none."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One thing that a panel varies, and what is held."""

    name: str
    value: Callable[[Cell], int | None]
    fixed: Callable[[Cell], Held]
    """What a study must hold to be one of this scale."""
    held: tuple[Callable[[Cell], Held], ...]
    """How a panel of rows of several studies may hold the rest: the first that keeps most values counts."""
    told: Callable[[list[Cell]], str]
    """What a panel holds, in words."""
    title: str
    tick: Callable[[int], str]
    place: Callable[[Cell], str]
    """Where a cell stands, in a sentence."""
    columns: tuple[tuple[str, Callable[[Cell], str]], ...]
    """Where a cell stands, in a table: titles, and how each is filled. Those equal in all rows are left out."""
    shown: int = 2
    """Columns at most: a model's name stands for its layers and width."""
    sizes_differ: bool = False
    """Tokens of models of several sizes are not the same work: TFLOPS 6P then, else tokens/s."""


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g}" if count >= 1e8 else f"{count / 1e9:.1g}"


def _power(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def _held_batch(cells: list[Cell]) -> str:
    """What stays of the batch while sequences get longer."""
    batches, tokens = {one.batch_size for one in cells}, {one.batch_size * one.seq_len for one in cells}
    if len(batches) == 1:
        return f"batch {cells[0].batch_size}"
    return f"{tokens.pop():,} tokens" if len(tokens) == 1 else f"batch {min(batches)} to {max(batches)}"


def params_text(count: int | None) -> str:
    """14.77B, 3.40B, 12.3M: three or four significant figures."""
    if count is None:
        return "?"
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e6:.2g}M"


def _of_model(key: str) -> Callable[[Cell], str]:
    return lambda one: str(one.config.get(f"model.config.{key}", ""))


SCALES: dict[str, Scale] = {
    "num_params": Scale(
        name="parameters (10⁹)",
        value=lambda one: one.num_params,
        fixed=lambda one: (one.batch_size, one.seq_len),
        held=(lambda one: (one.batch_size, one.seq_len),),
        told=lambda cells: f"{cells[0].batch_size} × {cells[0].seq_len} tokens",
        title="Model size",
        tick=_billions,
        place=lambda one: f"{params_text(one.num_params)} parameters",
        columns=(
            ("parameters", lambda one: params_text(one.num_params)),
            ("model", lambda one: one.model),
            ("layers", _of_model("num_hidden_layers")),
            ("hidden size", _of_model("hidden_size")),
        ),
        sizes_differ=True,
    ),
    "batch_size": Scale(
        name="sequences a step",
        value=lambda one: one.batch_size,
        fixed=lambda one: (one.model, one.num_params, one.seq_len),
        held=(lambda one: (one.model, one.num_params, one.seq_len),),
        told=lambda cells: f"{cells[0].model}, {cells[0].seq_len} tokens each",
        title="Batch",
        tick=str,
        place=lambda one: f"batch {one.batch_size}",
        columns=(("batch", lambda one: str(one.batch_size)),),
    ),
    "seq_len": Scale(
        name="tokens a sequence",
        value=lambda one: one.seq_len,
        fixed=lambda one: (one.model, one.num_params),
        held=(
            lambda one: (one.model, one.num_params, one.batch_size),
            lambda one: (one.model, one.num_params, one.batch_size * one.seq_len),
            lambda one: (one.model, one.num_params),
        ),
        told=lambda cells: f"{cells[0].model}, {_held_batch(cells)}",
        title="Context",
        tick=_power,
        place=lambda one: f"{one.seq_len:,} tokens a sequence",
        columns=(("tokens a sequence", lambda one: f"{one.seq_len:,}"), ("batch", lambda one: str(one.batch_size))),
    ),
    "device_bytes": Scale(
        name="device memory allowed (GB)",
        value=lambda one: one.config.get("machine.device_bytes"),
        fixed=lambda one: (one.model, one.num_params, one.batch_size, one.seq_len),
        held=(),
        told=lambda cells: f"{cells[0].model}, {cells[0].batch_size} × {cells[0].seq_len} tokens",
        title="Device memory",
        tick=lambda count: f"{count / 1e9:.3g}",
        place=lambda one: worded("machine.device_bytes", one.config["machine.device_bytes"]),
        columns=(("device memory", lambda one: worded("machine.device_bytes", one.config["machine.device_bytes"])),),
    ),
}
"""The last is what one system is cut down by, an ablation: a panel of rows of several studies never holds it."""


def scale_of(cells: list[Cell]) -> str | None:
    """The one scale that cells of a study differ in: every system and preset once at a place, and few of them at one alone."""
    for name, scale in SCALES.items():
        places = Counter((one.family, scale.value(one)) for one in cells)
        unplaced = any(value is None for _, value in places)
        if unplaced or max(places.values()) > 1 or len({scale.fixed(one) for one in cells}) > 1:
            continue
        lines = [mine for mine in families(cells).values() if len(mine) > 1]
        if sum(map(len, lines)) > MOST * len(cells):
            return name
    return None
