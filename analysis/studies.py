"""Rows of one study -> its cells with what was varied among them, and the kind of figure that shows it.

Invariant: what was varied is read from the rows' own configs, never from a study's name. A cell is a measurement only if its row
has a speed; a row without one that carries `plan.step_s` is a prediction and stays one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis import stats, style
from analysis.compare import BASELINE, Standing, standing_of
from analysis.stats import Estimate
from sweeps.result import REFERENCE, flat

VARIED = ("system.", "recipe.", "machine.device_bytes")
"""Parts of a config that a study varies; sizes and shapes are scales, the rest cannot change a measurement."""
UNVARIED = ("system.name", "system.preset")
SCALES = ("num_params", "batch_size", "seq_len")
RUNG = re.compile(r"(\d+)_")
"""A preset that is a step of the ladder (conf/rung): its number, then its name."""
WORDS: dict[str, dict[Any, str]] = {
    "system.gradient_slabs": {0: "one a block"},
    "system.device_optimizer": {0: "none", -1: "fill"},
    "system.keep_activations": {0: "none", -1: "fill"},
    "system.offload_activations": {0: "none", -1: "fill"},
    "recipe.clip_norm": {0: "off"},
}
"""Values that stand for something else than their number."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of a study. `factors` holds what was varied: config path -> this row's value."""

    standing: Standing
    experiment: str
    machine: str
    model: str
    num_params: int | None
    batch_size: int
    seq_len: int
    preset: str | None
    factors: dict[str, Any]
    config: dict[str, Any]
    """Every field of the row's config by its path."""
    predicted: Estimate | None
    """Tokens/s from `plan.step_s`, without an interval, where nothing was measured."""

    @property
    def drawn(self) -> Estimate | None:
        """Its speed: the measured one, else the predicted."""
        return self.standing.speed if self.standing.measured else self.predicted

    def name_in(self, study: Study) -> str:
        """Its rung, or what tells it from the others."""
        return f"Rung {rung_name(self.preset or '')}" if study.kind == "ladder" else self.label

    @property
    def label(self) -> str:
        """What tells it from the other cells of its study, in words."""
        return ", ".join(f"{named(key)} {worded(key, value)}" for key, value in self.factors.items()) or self.standing.label


@dataclass(frozen=True, kw_only=True)
class Study:
    """Rows of one experiment on one machine. `kind`: scale, ladder, grid, factor or comparison (several systems)."""

    name: str
    machine: str
    kind: str
    factors: dict[str, list[Any]]
    """Config path -> its values, in order."""
    cells: list[Cell]

    @property
    def best(self) -> Cell | None:
        """The fastest measured cell whose numerics are not known to differ."""
        return max((one for one in self.cells if comparable(one)), key=_speed, default=None)

    @property
    def subject(self) -> str:
        """Model, batch and length, as far as they are the same for all."""
        models = {one.model for one in self.cells}
        shapes = {(one.batch_size, one.seq_len) for one in self.cells}
        shape = [f"batch {batch} × {length} tokens" for batch, length in shapes]
        return ", ".join([*(models if len(models) == 1 else ()), *(shape if len(shape) == 1 else ())])


def studies(frame: pd.DataFrame) -> list[Study]:
    """One for each experiment and machine of a frame (`load.latest` first), in order of first appearance."""
    parts = frame.groupby(["experiment", "machine_name"], sort=False, dropna=False)
    return [study_of(part) for _, part in parts]


def study_of(frame: pd.DataFrame) -> Study:
    """The study in rows of one experiment on one machine."""
    cells = [cell_of(record) for record in frame.to_dict("records")]
    first = frame.iloc[0]
    kind, cells = _kind_of(cells)
    varied = _varied(cells) if kind in ("grid", "factor") else []
    cells = [replace(one, factors={key: _value(one, key) for key in varied}) for one in cells]
    factors = {key: _in_order([one.factors[key] for one in cells]) for key in varied}
    if kind == "ladder":
        cells.sort(key=lambda one: _rung(one.preset or ""))
    elif kind in ("grid", "factor"):
        cells.sort(key=lambda one: [factors[key].index(one.factors[key]) for key in varied])
    return Study(name=str(first["experiment"]), machine=str(first["machine_name"]), kind=kind, factors=factors, cells=cells)


def unablated(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of comparisons and of studies of size: what runs a system as it is meant to be run, with no part taken away."""
    parts = frame.groupby(["experiment", "machine_name"], sort=False, dropna=False)
    kept = [part for _, part in parts if study_of(part).kind in ("comparison", "scale")]
    return pd.concat(kept) if kept else frame.iloc[:0]


def sentence(study: Study) -> str:
    """Fastest and slowest setting in one plain sentence, with the interval of what lies between them."""
    ready = sorted((one for one in study.cells if comparable(one)), key=_speed)
    if not ready or study.best is None:
        return f"{study.name}: no cell was measured with agreeing losses."
    speed = f"{study.best.name_in(study)} is the fastest ({_speed(study.best):,.0f} tokens/s)"
    gap = change(ready[0], study.best)
    if gap is None or ready[0] is study.best:
        return f"{speed}; no other could be compared."
    ends = f" (95% interval {percent(gap.lo)} to {percent(gap.hi)})" if gap.lo is not None and gap.hi is not None else ""
    return f"{speed}; {ready[0].name_in(study)} the slowest, {percent(gap.value)}{ends}."


def cell_of(record: Mapping[Hashable, Any]) -> Cell:
    """One record of the frame."""
    standing = standing_of(record)
    step_s = standing.plan.get("step_s")
    shape = int(record["batch_size"]), int(record["seq_len"])
    predicted = Estimate(value=shape[0] * shape[1] / step_s, num_samples=0) if step_s and not standing.measured else None
    return Cell(
        standing=standing,
        experiment=str(record["experiment"]),
        machine=str(record["machine_name"]),
        model=str(record["model"]),
        num_params=None if pd.isna(record["num_params"]) else int(record["num_params"]),
        batch_size=shape[0],
        seq_len=shape[1],
        preset=None if pd.isna(record["preset"]) else str(record["preset"]),
        factors={},
        config=dict(flat(record["config"])),
        predicted=predicted,
    )


def variants(cells: list[Cell]) -> dict[tuple[str, str | None], int]:
    """(system, preset) -> its variant, the same in every panel."""
    families: dict[str, list[str | None]] = {}
    for one in cells:
        presets = families.setdefault(one.standing.system, [])
        if one.preset not in presets:
            presets.append(one.preset)
    return {
        (system, preset): variant
        for system, presets in families.items()
        for preset, variant in zip(presets, style.variants(system, presets), strict=True)
    }


def comparable(cell: Cell) -> bool:
    """Whether its speed may be held against others': measured, and losses not known to differ from the reference's."""
    return cell.standing.measured and not cell.standing.differs


def stands_for(cell: Cell, known: Cell | None) -> bool:
    """Whether `cell` speaks for its system in place of `known`, an earlier one of the same work: each system at its best, so the
    faster does, and one that was measured before any that was not."""
    if known is None or not (cell.standing.measured or known.standing.measured):
        return True
    return (comparable(cell), _speed(cell)) > (comparable(known), _speed(known))


def change(cell: Cell, base: Cell) -> Estimate | None:
    """Relative change of tokens/s from `base` to `cell` (-0.31 is 31% slower), with Welch's interval; None unless both may be
    compared."""
    if not (comparable(cell) and comparable(base)):
        return None
    mine, theirs = cell.standing, base.standing
    assert mine.speed is not None
    assert theirs.speed is not None
    over = stats.quotient(mine.speed, theirs.speed)
    assert over is not None
    lo, hi = (None if end is None else end - 1 for end in (over.lo, over.hi))
    return Estimate(value=over.value - 1, lo=lo, hi=hi, num_samples=over.num_samples)


def percent(change: float, digits: int = 1) -> str:
    """A signed percentage with a true minus."""
    return f"{change:+.{digits}%}".replace("-", "−")


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


def rung_name(preset: str) -> str:
    """`3_recompute_once` -> `recompute once`."""
    return RUNG.sub("", preset, count=1).replace("_", " ")


def _kind_of(cells: list[Cell]) -> tuple[str, list[Cell]]:
    """What these rows are, and those that belong to it: a study of one system may hold a reference beside it."""
    scaled = any(len({getattr(one, scale) for one in cells}) > 1 for scale in SCALES)
    if scaled:
        return "scale", cells
    mine = [one for one in cells if one.standing.system not in (REFERENCE, BASELINE)]
    if len({one.standing.system for one in mine}) != 1 or len(mine) < 2:
        return "comparison", cells
    if all(RUNG.match(one.preset or "") for one in mine):
        return "ladder", mine
    varied = _varied(mine)
    if not varied or varied == ["system.preset"]:
        return "comparison", cells
    numbers = [all(type(_value(one, key)) is int for one in mine) for key in varied]
    return ("grid" if numbers == [True, True] and len(mine) > 3 else "factor"), mine


def _varied(cells: list[Cell]) -> list[str]:
    """Config paths that differ among cells of one system and preset; the preset, where there are several, stands for the rest."""
    families: dict[tuple[str, str | None], list[Cell]] = {}
    for one in cells:
        families.setdefault((one.standing.system, one.preset), []).append(one)
    found = {key: None for family in families.values() for key in _differing(family)}
    return (["system.preset"] if len({one.preset for one in cells}) > 1 else []) + list(found)


def _differing(cells: Iterable[Cell]) -> list[str]:
    configs = [one.config for one in cells]
    keys = dict.fromkeys(key for config in configs for key in config if key.startswith(VARIED) and key not in UNVARIED)
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _value(cell: Cell, key: str) -> Any:
    value = cell.preset if key == "system.preset" else cell.config.get(key)
    return value if isinstance(value, Hashable) else str(value)


def _in_order(values: list[Any]) -> list[Any]:
    """Each once: numbers by size, others as they came."""
    once = list(dict.fromkeys(values))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in once)
    return sorted(once) if numbers else once


def _rung(preset: str) -> int:
    match = RUNG.match(preset)
    return int(match.group(1)) if match else 0


def _speed(cell: Cell) -> float:
    return cell.standing.speed.value if cell.standing.speed else 0.0
