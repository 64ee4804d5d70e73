"""Whether a row's losses are those of the reference: the same model, batches, recipe and dtype.

Invariant: a speed is ranked only where the losses agree, and which row is the reference depends on
no row's speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.identity import PLAIN, products_of
from sweeps.result import Row

REFERENCE = "in_memory"
"""The system whose losses the others must agree with."""
STAND_IN = "zero3"
"""The reference where REFERENCE was not measured: an independent implementation with an fp32
master."""
STAND_IN_KEPT = "kept"
"""The one preset of either that may be: the same arithmetic, less recomputation."""
STAND_IN_ON_DISK = "zero_infinity"
"""The same arithmetic too, its optimizer's state on a disk: the last resort."""
ADAPTERS = ("lora", "qlora")
"""Systems that train another function: their losses are held against nobody's."""
NO_ROOM = ("wont_fit", "oom_device", "oom_host")
LOSS_TOLERANCE = 2e-3
"""Largest absolute difference from the reference's losses, nats per token, at which a row
`agrees`."""
FLOAT8_TOLERANCE = 2e-2
"""The same where layers multiply in float8, whose fraction has 3 bits for bf16's 7. One recipe,
eager and compiled, was 1.3e-2 apart in 21 steps of 3B, and 4.4e-2 from bf16 (docs/log.md, 143)."""
COMPARED_STEPS = 30
"""The first steps, whose losses are compared. Later ones are further apart under two exact systems,
for training amplifies what they round otherwise; a long run is judged by its held-out loss."""


def compared(row: Row, rows: Sequence[Row], *, complete: bool = False) -> Row:
    """`row`, its losses compared with the reference of the same model, batches, recipe and dtype.

    The reference is REFERENCE, eager. STAND_IN, eager, takes its place where rows say that there is
    no room for it; where `rows` are `complete`, wherever it was not measured, and then also
    compiled, STAND_IN_KEPT, REFERENCE likewise or, as a last resort, STAND_IN_ON_DISK. The latest
    of its rows counts, of those on the fewest ranks the first of its repeats; its others are
    compared with that one like any row.
    """
    if row.status != "ok" or row.system in ADAPTERS:
        return row
    beside = [
        item for item in reversed(rows) if item.config and item.compared_with == row.compared_with
    ]
    refused = any(
        item.system == REFERENCE and item.preset is None and item.status in NO_ROOM
        for item in beside
    )
    kinds: list[tuple[str, str | None, bool]] = [(REFERENCE, None, False)]
    kinds += [(STAND_IN, None, False)] * (refused or complete)
    kinds += [(STAND_IN, None, True), (STAND_IN, STAND_IN_KEPT, True)] * complete
    kinds += [(REFERENCE, None, True), (REFERENCE, STAND_IN_KEPT, True)] * complete
    kinds += [(STAND_IN_ON_DISK, None, False), (STAND_IN_ON_DISK, None, True)] * complete
    measured = [item for item in (row, *beside) if item.status == "ok" and _kind(item) in kinds]
    reference = min(
        measured,
        key=lambda item: (kinds.index(_kind(item)), item.num_ranks, repeat_of(item.config)),
        default=None,
    )
    if reference is row:
        return dataclasses.replace(row, agrees=True, max_loss_difference=0.0)
    if reference is None or not row.losses:
        return row
    pairs = list(zip(row.losses, reference.losses, strict=False))[:COMPARED_STEPS]
    worst = max(abs(mine - theirs) for mine, theirs in pairs)
    return dataclasses.replace(row, agrees=worst <= tolerance(row), max_loss_difference=worst)


def tolerance(row: Row) -> float:
    """How far its losses may be from the reference's."""
    return LOSS_TOLERANCE if products_of(row.config) == PLAIN else FLOAT8_TOLERANCE


def _kind(row: Row) -> tuple[str, str | None, bool]:
    """What decides whether others may be held against the row: system, preset, whether it is
    compiled."""
    return row.system, row.preset, is_compiled(row)


def is_compiled(row: Row) -> bool:
    """Whether the row's system compiled its layers."""
    return bool(row.config.get("system", {}).get("compile"))


def repeat_of(config: Mapping[str, Any]) -> int:
    """Which round of its run a row of this config is of; older ones had one."""
    return int(config.get("measure", {}).get("repeat", 1))
