"""What one setting does to speed: pairs of rows that differ in it and in nothing else.

Invariant: both rows of a pair come from one file and one commit, were measured alike on one machine (the frame's `host`), and have
losses not known to differ from the reference's. Repeats pair round by round: a round that holds one of the two tells nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import load, stats
from analysis.cells import Cell, cell_of, comparable
from analysis.stats import Estimate
from sweeps.identity import configuration

SETTINGS: dict[str, tuple[str, int, int]] = {
    "without double buffering": ("depth", 1, 2),
    "checkpoint interval 1": ("checkpoint_interval", 1, 4),
}
"""A setting of the paper's ablation -> the field of `system` that stands for it, its value, and the value it is held against."""
STREAMS = "system.streams"
Record = dict[Hashable, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What changing one field did: two cells that differ in nothing else, and tokens/s of the first over the second's, less 1."""

    cell: Cell
    """Of the first round, as `base`."""
    base: Cell
    estimate: Estimate
    num_rounds: int
    num_windows: int
    """Windows of each of the two, over all rounds."""
    steps_per_window: int
    file: str
    """Where its rows are; empty where they come from no file."""


def setting_changes(frame: pd.DataFrame, setting: str) -> list[Change]:
    """What a setting of the paper's ablation does in these rows, best-founded first; empty where no two differ in it alone.

    That is the pair with most streams (overlap is what is taken away), of such pairs that with most steps measured, then the last.
    """
    if setting not in SETTINGS:
        return []
    name, value, base_value = SETTINGS[setting]
    found: list[Change] = []
    for rows in load.by_file(frame):
        for _, alike in rows.groupby([*load.GROUP, "git_commit"], sort=False, dropna=False):
            found += _changes(alike.to_dict("records"), name, value, base_value)
    found.reverse()
    return sorted(found, key=lambda one: (-(one.cell.config.get(STREAMS) or 0), -one.num_windows * one.steps_per_window))


def _changes(records: list[Record], name: str, value: int, base_value: int) -> list[Change]:
    """One for each configuration that was measured with both values: what its rounds, each on one machine, say together."""
    configurations: dict[str, dict[tuple[Hashable, ...], dict[Any, Record]]] = {}
    for record in records:
        config = record["config"]
        if "measure" in config and comparable(cell_of(record)):
            system = {key: item for key, item in config["system"].items() if key != name}
            rounds = configurations.setdefault(configuration({**config, "system": system}), {})
            place = config["measure"].get("repeat", 1), record["host"]
            rounds.setdefault(place, {})[config["system"].get(name)] = record
    found = []
    for rounds in configurations.values():
        pairs = [(both[value], both[base_value]) for both in rounds.values() if value in both and base_value in both]
        if pairs:
            found.append(_change(pairs))
    return found


def _change(rounds: list[tuple[Record, Record]]) -> Change:
    over = stats.paired([(_run(record), _run(base)) for record, base in rounds])
    assert over is not None
    lo, hi = (None if end is None else end - 1 for end in (over.lo, over.hi))
    (first, base), source = rounds[0], Path(str(rounds[0][0]["source"]))
    return Change(
        cell=cell_of(first),
        base=cell_of(base),
        estimate=Estimate(value=over.value - 1, lo=lo, hi=hi, num_samples=over.num_samples),
        num_rounds=len(rounds),
        num_windows=sum(min(len(record["step_s"]), len(base["step_s"])) for record, base in rounds),
        steps_per_window=int(first["config"]["measure"].get("steps_per_window", 1)),
        file=source.name if source.suffix == ".jsonl" else "",
    )


def _run(record: Record) -> stats.Run:
    return float(record["tokens_per_s"]), record["step_s"]
