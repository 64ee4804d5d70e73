"""A row of the frame as a cell of a study: what was run, how fast it was or would be, and what it is called.

Invariant: a cell is a measurement only if its row has a speed; one refused for lack of room that carries a predicted step is a
prediction and stays one; one that was run and failed is neither. Repeats of one configuration are one cell.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis import stats, style
from analysis.machines import machine_of
from analysis.standing import Standing, pooled, standing_of
from analysis.stats import Estimate
from sweeps.identity import effective, flat

WORDS: dict[str, dict[Any, str]] = {
    "system.gradient_slabs": {0: "one a block"},
    "system.device_optimizer": {0: "none", -1: "fill"},
    "system.keep_activations": {0: "none", -1: "fill"},
    "system.offload_activations": {0: "none", -1: "fill"},
    "recipe.clip_norm": {0: "off"},
}
"""Values that stand for something else than their number."""
Family = tuple[str, str | None]
"""A system and its preset."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of a study. `factors` holds what was varied: config path -> this cell's value."""

    standing: Standing
    experiment: str
    file: str
    """What tells its file of rows from others."""
    machine: str
    """In words, as others of its kind."""
    machines: frozenset[str]
    """Those of the kind that its repeats ran on (machines.machine_of)."""
    model: str
    num_params: int | None
    batch_size: int
    seq_len: int
    preset: str | None
    factors: dict[str, Any]
    config: dict[str, Any]
    """Every field of the row's config by its path."""
    predicted: Estimate | None
    """Tokens/s that the cost model expects of the bench's windows, without an interval, where nothing was measured."""

    @property
    def drawn(self) -> Estimate | None:
        """Its speed: the measured one, else the predicted."""
        return self.standing.speed if self.standing.measured else self.predicted

    @property
    def study(self) -> tuple[str, str]:
        """Its experiment and file: what a line may join."""
        return self.experiment, self.file

    @property
    def family(self) -> Family:
        """Its system and preset."""
        return self.standing.system, self.preset

    @property
    def family_name(self) -> str:
        """`MegaTrain fast`, `ZeRO-3`."""
        return f"{style.name_of(self.standing.system)} {self.preset or ''}".strip()

    @property
    def label(self) -> str:
        """What tells it from the other cells of its study, in words."""
        return ", ".join(f"{named(key)} {worded(key, value)}" for key, value in self.factors.items()) or self.standing.label


def cell_of(record: Mapping[Hashable, Any]) -> Cell:
    """One record of the frame."""
    standing = standing_of(record)
    # Windows include their drains; older rows have the steady step alone.
    step_s = standing.plan.get("window_step_s") or standing.plan.get("step_s")
    shape = int(record["batch_size"]), int(record["seq_len"])
    predicted = Estimate(value=shape[0] * shape[1] / step_s, num_samples=0) if step_s and standing.status == "wont_fit" else None
    return Cell(
        standing=standing,
        experiment=str(record["experiment"]),
        file=str(record["file"]),
        machine=str(record["machine_name"]),
        machines=frozenset({machine_of(record["machine"])}),
        model=str(record["model"]),
        num_params=None if pd.isna(record["size"]) else int(record["size"]),
        batch_size=shape[0],
        seq_len=shape[1],
        preset=None if pd.isna(record["preset"]) else str(record["preset"]),
        factors={},
        config=dict(settings(record["config"])),
        predicted=predicted,
    )


def settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field of a config, but for a system's settings that are as good as not there: older rows lack
    them."""
    yield from flat({**config, "system": effective(config.get("system", {}))})


def cells_of(frame: pd.DataFrame) -> list[Cell]:
    """A cell for each configuration, its repeats pooled as in every table (`standing.pooled`); those of two files, studies or
    kinds of machine are two runs."""
    configurations: dict[tuple[str, Family, tuple[str, str], str], list[Cell]] = {}
    for record in frame.to_dict("records"):
        one = cell_of(record)
        key = str(record["configuration"]), one.family, one.study, one.machine
        configurations.setdefault(key, []).append(one)
    found = []
    for repeats in configurations.values():
        standing = pooled([one.standing for one in repeats])
        predicted = None if standing.measured else repeats[-1].predicted
        machines = frozenset(name for one in repeats for name in one.machines)
        found.append(replace(repeats[-1], standing=standing, machines=machines, predicted=predicted))
    return found


def families(cells: Iterable[Cell]) -> dict[Family, list[Cell]]:
    """The cells of each system and preset, in order of first appearance."""
    found: dict[Family, list[Cell]] = {}
    for one in cells:
        found.setdefault(one.family, []).append(one)
    return found


def variants(cells: list[Cell]) -> dict[Family, int]:
    """(system, preset) -> its variant, the same in every panel."""
    presets: dict[str, list[str | None]] = {}
    for system, preset in families(cells):
        presets.setdefault(system, []).append(preset)
    return {
        (system, preset): variant
        for system, mine in presets.items()
        for preset, variant in zip(mine, style.variants(system, mine), strict=True)
    }


def settings_apart(cell: Cell, other: Cell) -> list[str]:
    """What two cells of a system both state and do not agree in: `checkpoint interval 4, not 1`."""
    mine, theirs = ({key: one.config[key] for key in one.config if key.startswith("system.")} for one in (cell, other))
    keys = [key for key in mine if key in theirs and repr(mine[key]) != repr(theirs[key])]
    return [f"{named(key)} {worded(key, mine[key])}, not {worded(key, theirs[key])}" for key in keys]


def comparable(cell: Cell) -> bool:
    """Whether its speed may be held against others': measured, its system's own, and losses not known to differ from the
    reference's."""
    return cell.standing.measured and not (cell.standing.differs or cell.standing.fallback)


def stands_for(cell: Cell, known: Cell | None) -> bool:
    """Whether `cell` speaks for its system in place of `known`, an earlier one of the same work: each system at its best, so the
    faster does, and one that was measured before any that was not."""
    if known is None or not (cell.standing.measured or known.standing.measured):
        return True
    return (comparable(cell), speed_of(cell)) > (comparable(known), speed_of(known))


def speed_of(cell: Cell) -> float:
    """Measured tokens/s, 0 without."""
    return cell.standing.speed.value if cell.standing.speed else 0.0


def ratio(cell: Cell, base: Cell | None) -> Estimate | None:
    """How many times as fast a cell is as `base`, with Welch's interval; None unless both may be compared.

    Of two machines of a kind it has no interval: what lies between them is in the ratio and not in their windows.
    """
    if base is None or not (comparable(cell) and comparable(base)):
        return None
    over = stats.quotient(cell.standing.speed, base.standing.speed)
    if over is None or cell.machines & base.machines:
        return over
    return Estimate(value=over.value, num_samples=over.num_samples)


def change(cell: Cell, base: Cell | None) -> Estimate | None:
    """Relative change of tokens/s from `base` to `cell` (-0.31 is 31% slower), with Welch's interval; None unless both may be
    compared."""
    over = ratio(cell, base)
    if over is None:
        return None
    lo, hi = (None if end is None else end - 1 for end in (over.lo, over.hi))
    return Estimate(value=over.value - 1, lo=lo, hi=hi, num_samples=over.num_samples)


def percent(change: float, digits: int = 1) -> str:
    """A signed percentage with a true minus; what rounds to nothing has no sign."""
    told = f"{change:+.{digits}%}"
    return told.replace("-", "−") if float(told[:-1]) else told[1:]


def named(key: str) -> str:
    """A config path as an axis names it."""
    return key.rpartition(".")[2].replace("_", " ")


def worded(key: str, value: Any) -> str:
    """A value in words."""
    if key == "machine.device_bytes" and value:
        return f"{value / 1e9:.0f} GB"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "whole device" if key == "machine.device_bytes" else "not set"
    return WORDS.get(key, {}).get(value, str(value))
