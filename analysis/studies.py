"""Rows of one study -> its cells with what was varied among them, and the kind of figure that shows it.

Invariant: what was varied is read from the rows' own configs, never from a study's name. Speeds are held against each other only
where the work is the same: never across models of different size.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.cells import Cell, cells_of, change, comparable, families, named, percent, ratio, settings_apart, speed_of, worded
from analysis.compare import AS_IT_IS, BASELINE, CPU_NOTE, interval_text
from analysis.scales import SCALES, Scale, scale_of
from sweeps.result import LOSS_TOLERANCE, REFERENCE

VARIED = ("system.", "recipe.", "machine.device_bytes")
"""Parts of a config that a study varies; sizes and shapes are scales, the rest cannot change a measurement."""
UNVARIED = ("system.name", "system.preset")
SYSTEM = "system"
"""The factor of a study that varies something for several systems: which of them, with its preset."""
NUMERICS = ("system.master", "system.dtype")
"""Factors that change the arithmetic: their losses are told, however near."""
RUNG = re.compile(r"(\d+)_")
"""A preset that is a step of the ladder (conf/rung): its number, then its name."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Rows of one experiment on one machine. `kind`: scale, ladder, grid, factor or comparison (several systems)."""

    name: str
    machine: str
    kind: str
    factors: dict[str, list[Any]]
    """Config path -> its values, in order."""
    cells: list[Cell]
    scale_name: str | None = None
    """One of analysis.scales, where that is what the cells differ in."""

    @property
    def scale(self) -> Scale | None:
        """What a study of scale varies."""
        return SCALES.get(self.scale_name or "")

    @property
    def ablates(self) -> bool:
        """Whether it takes a part away from a system, or memory from its device: not for comparisons, nor with the paper."""
        capped = any(one.config.get("machine.device_bytes") for one in self.cells)
        return capped or self.kind in ("ladder", "grid", "factor") or self.scale_name == "device_bytes"

    @property
    def best(self) -> Cell | None:
        """The fastest measured cell whose numerics are not known to differ."""
        return max((one for one in self.cells if comparable(one)), key=speed_of, default=None)

    @property
    def bests(self) -> list[Cell]:
        """The fastest where the work is the same: at each place of a scale that several systems stand on, else of all."""
        if self.scale is None or not (self.scale.sizes_differ or self.rival):
            return [self.best] if self.best else []
        at: dict[Any, list[Cell]] = {}
        for one in self.cells:
            at.setdefault(self.scale.value(one), []).append(one)
        ready = [[one for one in cells if comparable(one)] for cells in at.values()]
        return [max(cells, key=speed_of) for cells in ready if len(cells) > 1]

    @property
    def rival(self) -> Cell | None:
        """Of a scale with several systems at one of its places, a cell of the one that the others are held against: ZeRO-3, else
        the first."""
        if self.scale is None:
            return None
        at = {(self.scale.value(one), one.family) for one in self.cells}
        if len({place for place, _ in at}) == len(at):
            return None
        mine = families(self.cells)
        family = next((one for one in mine if one[0] == BASELINE and one[1] in AS_IT_IS), next(iter(mine)))
        return mine[family][0]

    def base_of(self, cell: Cell) -> Cell | None:
        """What a cell is held against: the first rung, the rival at the same place, or the fastest where all do the same work."""
        if self.kind == "ladder":
            return self.cells[0]
        if self.scale is None or (self.rival is None and not self.scale.sizes_differ):
            return self.best
        place, rival = self.scale.value(cell), self.rival
        alike = [one for one in self.cells if rival and one.family == rival.family and self.scale.value(one) == place]
        return alike[0] if alike else None

    @property
    def first(self) -> Cell | None:
        """The cell that losses are held against: the first with losses that keeps an fp32 master (it has no caveat). None where
        the data or the model are not the same for all."""
        if self.scale is not None and self.scale_name != "device_bytes":
            return None
        told = [one for one in self.cells if one.standing.losses and one.standing.measured]
        return next((one for one in told if not one.standing.caveat), told[0] if told else None)

    @property
    def common_steps(self) -> int:
        """Steps that all measured cells have losses of."""
        return min((len(one.standing.losses) for one in self.cells if one.standing.measured), default=0)

    def loss_gap(self, cell: Cell) -> float | None:
        """Largest difference of its losses from the first's."""
        if self.first is None or not cell.standing.losses:
            return None
        pairs = zip(cell.standing.losses, self.first.standing.losses, strict=False)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=None)

    @property
    def tells_losses(self) -> bool:
        """Whether its losses belong into table and figure: the arithmetic was varied, or some are further apart than agrees."""
        if self.first is None or self.common_steps == 0:
            return False
        gaps = [gap for one in self.cells if (gap := self.loss_gap(one)) is not None]
        return len(gaps) > 1 and (any(key in NUMERICS for key in self.factors) or not max(gaps) <= LOSS_TOLERANCE)

    def words(self, cell: Cell) -> dict[str, str]:
        """What tells a cell from the others: title of a column -> words."""
        if self.kind == "ladder":
            return {"rung": rung_name(cell.preset or "")}
        if self.scale is None:
            return {named(key): worded(key, value) for key, value in cell.factors.items()}
        places = [(title, fill) for title, fill in self.scale.columns if len({fill(one) for one in self.cells}) > 1]
        system = {"system": cell.family_name} if len(families(self.cells)) > 1 else {}
        return system | {title: fill(cell) for title, fill in places[: self.scale.shown]}

    def name_of(self, cell: Cell) -> str:
        """Its rung, its place, or what tells it from the others."""
        if self.kind == "ladder":
            return f"Rung {rung_name(cell.preset or '')}"
        return cell.label if self.scale is None else f"{cell.family_name} at {self.scale.place(cell)}"

    @property
    def notes(self) -> list[str]:
        """What a reader must know beside the table."""
        told = []
        for one in self.cells:
            mine, name = one.standing, self.name_of(one) if self.scale else ", ".join(self.words(one).values())
            why = f": {mine.why}" if mine.reason else ""
            told += [f"{name}: {mine.status_label}{why}"] if why or not mine.measured else []
            told += [f"{name}: numerics differ from the reference; not compared"] if mine.differs else []
            told += [f"{name}: {mine.caveat}"] if mine.measured and mine.caveat else []
            told += [f"{name}: {known}" for known in (mine.missed, mine.unsettled) if known]
            apart = settings_apart(one, families(self.cells)[one.family][0]) if self.scale else []
            told += [f"{name}: {'; '.join(apart)}"] if apart else []
        told += ["Predicted speeds are the cost model's, not measured."] if any(one.predicted for one in self.cells) else []
        return told + ([CPU_NOTE] if self.machine.startswith("CPU only") else [])

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
    first = frame.iloc[0]
    kind, cells = _kind_of(cells_of(frame))
    varied = _varied(cells) if kind in ("grid", "factor") else []
    cells = [replace(one, factors={key: _value(one, key) for key in varied}) for one in cells]
    factors = {key: _in_order([one.factors[key] for one in cells]) for key in varied}
    name = scale_of(cells) if kind == "scale" else None
    if kind == "ladder":
        cells.sort(key=lambda one: _rung(one.preset or ""))
    elif name is not None:
        order, place = list(families(cells)), SCALES[name].value
        cells.sort(key=lambda one: (place(one) or 0, order.index(one.family)))
    elif kind in ("grid", "factor"):
        cells.sort(key=lambda one: [factors[key].index(one.factors[key]) for key in varied])
    machine = str(first["machine_name"])
    study = Study(name=str(first["experiment"]), machine=machine, kind=kind, factors=factors, cells=cells, scale_name=name)
    return replace(study, cells=[_judged(one, study) for one in cells]) if set(factors) & set(NUMERICS) else study


def _judged(cell: Cell, study: Study) -> Cell:
    """Of a study that varies the arithmetic: a cell whose losses leave those of its fp32 master differs, as from a reference."""
    gap = study.loss_gap(cell)
    apart = gap is not None and not gap <= LOSS_TOLERANCE
    return replace(cell, standing=replace(cell.standing, agrees=False)) if apart else cell


def unablated(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of comparisons and of studies of size: what runs a system as it is meant to be run, with no part taken away."""
    parts = frame.groupby(["experiment", "machine_name"], sort=False, dropna=False)
    kept = [part for _, part in parts if not study_of(part).ablates]
    return pd.concat(kept) if kept else frame.iloc[:0]


def sentence(study: Study) -> str:
    """Fastest and slowest setting in one plain sentence, with the interval of what lies between them; of several sizes or systems,
    how many times as fast the fastest is where the most work was measured of two."""
    ready = sorted((one for one in study.cells if comparable(one)), key=speed_of)
    if not ready or study.best is None:
        return f"{study.name}: no cell was measured with agreeing losses."
    if study.scale is not None and (study.rival or study.scale.sizes_differ):
        return _scale_sentence(study, study.scale, ready)
    speed = f"{study.name_of(study.best)} is the fastest ({speed_of(study.best):,.0f} tokens/s)"
    slowest = next((one for one in ready if one is not study.best), None)
    gap = change(slowest, study.best) if slowest else None
    if slowest is None or gap is None:
        return f"{speed}; no other could be compared.{_losses_told(study)}"
    ends = f" (95% interval {percent(gap.lo)} to {percent(gap.hi)})" if gap.lo is not None and gap.hi is not None else ""
    return f"{speed}; {study.name_of(slowest)} the slowest, {percent(gap.value)}{ends}.{_losses_told(study)}"


def _scale_sentence(study: Study, scale: Scale, ready: list[Cell]) -> str:
    """At the last place where two systems were measured, on one machine if any were; of one system, its speed at the first place
    and at the last."""
    pairs = []
    for best in study.bests:
        others = [one for one in ready if scale.value(one) == scale.value(best) and one is not best]
        pairs.append((best, next((one for one in others if one is study.base_of(best)), others[-1])))
    if pairs:
        best, base = next((pair for pair in reversed(pairs) if pair[0].machines & pair[1].machines), pairs[-1])
        over = ratio(best, base)
        assert over is not None
        return f"At {scale.place(best)} {best.family_name} is the fastest: {interval_text(over)} as fast as {base.family_name}."
    ends = sorted(ready, key=lambda one: scale.value(one) or 0)
    told = [f"{speed_of(one):,.0f} tokens/s at {scale.place(one)}" for one in (ends[0], ends[-1])]
    return f"{ends[0].family_name}: {', '.join(dict.fromkeys(told))}."


def _losses_told(study: Study) -> str:
    """The cell whose losses are furthest from the first's, where that is further than agrees."""
    apart = [(gap, one) for one in study.cells if (gap := study.loss_gap(one)) is not None and gap > LOSS_TOLERANCE]
    if not study.tells_losses or not apart or study.first is None:
        return ""
    one, step = max(apart, key=lambda pair: pair[0])[1], study.common_steps
    losses = [f"{study.name_of(two)} {two.standing.losses[step - 1]:.4f}" for two in (one, study.first)]
    return f" Loss at step {step}: {losses[0]}, {losses[1]}."


def rung_name(preset: str) -> str:
    """`3_recompute_once` -> `recompute once`."""
    return RUNG.sub("", preset, count=1).replace("_", " ")


def _kind_of(cells: list[Cell]) -> tuple[str, list[Cell]]:
    """What these rows are, and those that belong to it: a study of one system may hold a reference beside it."""
    if scale_of(cells):
        return "scale", cells
    if len({(one.model, one.num_params, one.batch_size, one.seq_len) for one in cells}) > 1:
        return "comparison", cells  # of each shape by itself
    if len({one.standing.system for one in cells}) > 1 and _shared(cells):
        return "factor", cells
    mine = [one for one in cells if one.standing.system not in (REFERENCE, BASELINE)]
    beside = families(one for one in cells if one.standing.system in (REFERENCE, BASELINE))
    if len({one.standing.system for one in mine}) != 1 or len(mine) < 2 or any(len(several) > 1 for several in beside.values()):
        return "comparison", cells  # of systems that are varied themselves none is a reference
    if all(RUNG.match(one.preset or "") for one in mine):
        return "ladder", mine
    varied = _varied(mine)
    if not varied or varied == ["system.preset"]:
        return "comparison", cells
    numbers = [all(type(_value(one, key)) is int for one in mine) for key in varied]
    return ("grid" if numbers == [True, True] and len(mine) > 3 else "factor"), mine


def _shared(cells: list[Cell]) -> bool:
    """Whether something that is no system's own is varied, over the same values for each system and preset, and nothing else is."""
    keys, values = _differing(cells), set()
    for family in families(cells).values():
        mine = _differing(family)
        if not mine or any(key.startswith("system.") for key in mine):
            return False
        values.add(frozenset(repr([one.config.get(key) for key in keys if key in mine]) for one in family))
    return len(values) == 1


def _varied(cells: list[Cell]) -> list[str]:
    """Config paths that differ among cells of one system and preset; these themselves, where there are several, stand for the
    rest."""
    mine = families(cells)
    found = {key: None for family in mine.values() for key in _differing(family)}
    several = [SYSTEM] if len({system for system, _ in mine}) > 1 else ["system.preset"] if len(mine) > 1 else []
    return [*several, *found]


def _differing(cells: Iterable[Cell]) -> list[str]:
    configs = [one.config for one in cells]
    keys = dict.fromkeys(key for config in configs for key in config if key.startswith(VARIED) and key not in UNVARIED)
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _value(cell: Cell, key: str) -> Any:
    if key == SYSTEM:
        return cell.family_name
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
