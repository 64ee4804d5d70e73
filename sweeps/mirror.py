"""A row as W&B holds it: its steps as the run's history, the rest as one line of JSON.

Invariant: `unpacked` gives back the row that `packed` and `history` were made from, or a ValueError
of one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from sweeps.result import HISTORY, Row
from sweeps.rowfile import row_of_record


def history(row: Row) -> Iterator[tuple[int, dict[str, float]]]:
    """What W&B gets as history, (step, values): loss and gradient norm of every step; at a window's
    last step also its seconds and tokens/s."""
    measure = row.config.get("measure", {})
    warmup, length = int(measure.get("warmup_steps", 0)), int(measure.get("steps_per_window", 1))
    tokens = (
        row.tokens_per_s * fmean(row.step_s) if row.tokens_per_s and row.step_s else None
    )  # label tokens of a step
    ends = {
        warmup + (number + 1) * length - 1: seconds for number, seconds in enumerate(row.step_s)
    }
    by_step = {"loss": row.losses, "gradient_norm": row.gradient_norms}
    for step in sorted({*range(max(map(len, by_step.values()))), *ends}):
        values = {name: one[step] for name, one in by_step.items() if step < len(one)}
        if step in ends:
            values |= {"step_s": ends[step]} | (
                {"tokens_per_s": tokens / ends[step]} if tokens else {}
            )
        yield step, values


def packed(row: Row) -> str:
    """The rest of the row, for W&B: one line of JSON, with the number of entries in place of what
    `history` yields."""
    return json.dumps(
        json.loads(row.to_json()) | {name: len(getattr(row, name)) for name in HISTORY}
    )


def unpacked(text: str, steps: Iterable[Mapping[str, Any]], where: str) -> Row:
    """The row again, from `packed` and the history (entries with a `_step`, in any order);
    ValueError where some are missing."""
    record, ordered = json.loads(text), sorted(steps, key=lambda entry: int(entry["_step"]))
    for name, key in HISTORY.items():
        found = [entry[key] for entry in ordered if entry.get(key) is not None]
        if len(found) != record.get(name, 0):  # runs of before lack the norms
            raise ValueError(
                f"{where} has {len(found)} of {record.get(name)} {name}: its writer was stopped; "
                "upload the row again"
            )
        record[name] = found
    return row_of_record(record, where)
