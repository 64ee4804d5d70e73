"""What each study asks and how it is shown: from studies.yaml, or inferred from its rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import rows

PATH = Path(__file__).with_name("studies.yaml")
FIGURES = ("comparison", "lines", "bars", "losses", "quality", "none")
SHAPES = ("num_params", "batch_size", "seq_len")
"""Columns of the frame that x and hue may name beside config paths and `system`."""

CHOSEN = ("system.", "process.", "recipe.")
"""Groups of the config that say how a cell was run."""
UNTOLD = ("system.name", "system.preset", "process.timeout_s", "recipe.total_steps")
"""Fields of these that tell nothing apart."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One entry of studies.yaml; its head explains the fields."""

    name: str
    title: str
    question: str = ""
    experiments: tuple[str, ...] = ()
    x: str | None = None
    hue: str | None = None
    value: str = "tokens_per_s"
    figure: str = "comparison"
    effect: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    command: str = ""
    lead: str | None = None
    beside: tuple[str, ...] = ()
    paper: str | None = None
    superseded: tuple[str, ...] = ()

    @property
    def compares(self) -> bool:
        """Whether systems are ranked and nothing is varied."""
        return self.figure == "comparison" or self.x is None

    @property
    def of_systems(self) -> bool:
        """Whether systems stand side by side along x, each held against ZeRO-3 at its place."""
        return self.hue == "system"


@cache
def listed(path: Path = PATH) -> dict[str, Study]:
    """The studies of the file by name. Raises ValueError, one line, for an entry that is none."""
    found = {}
    known = sorted({item for item in Study.__dataclass_fields__ if item != "name"})
    for name, entry in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).items():
        for key in sorted(set(entry) - set(known)):
            allowed = ", ".join(known)
            raise ValueError(f"{path.name}: {name}.{key}: got it, allowed {allowed}; leave it out")
        if (figure := entry.get("figure", "comparison")) not in FIGURES:
            allowed = ", ".join(FIGURES)
            raise ValueError(
                f"{path.name}: {name}.figure: got {figure!r}, allowed {allowed}; choose one"
            )
        experiments = tuple(entry.get("experiments", (name,)))
        superseded = tuple(entry.get("superseded", ()))
        given = entry | {"experiments": experiments, "superseded": superseded}
        found[name] = Study(name=name, **given)
    return found


def all_studies() -> list[Study]:
    """Those of studies.yaml, in its order."""
    return list(listed().values())


def study_of(experiment: str) -> str:
    """The study that an experiment's rows belong to: itself, where no other names it."""
    return next((one.name for one in all_studies() if experiment in one.experiments), experiment)


def assigned(found: pd.DataFrame) -> pd.DataFrame:
    """The frame with the `study` of every row."""
    return found.assign(study=found["experiment"].map(study_of))


def shown(lines: pd.DataFrame) -> Iterator[tuple[Study, pd.DataFrame]]:
    """Each study with its lines, less what a later run supersedes; the listed ones first."""
    current = lines[~lines["superseded"]]
    names = list(current["study"].unique())
    known = [one.name for one in all_studies() if one.name in names]
    for name in [*known, *sorted(set(names) - set(known))]:
        mine = current[current["study"] == name]
        yield of_rows(name, mine), mine


def leading(study: Study, mine: pd.DataFrame) -> pd.DataFrame:
    """Those of a study's lines that are of the run that answers.

    It is the one that studies.yaml names, else the one that measured most, of equals the last.
    """
    runs = mine["run"]
    counts = mine["tokens_per_s"].notna().groupby(runs).sum()
    chosen = (
        study.lead if study.lead in set(runs) else max(runs, key=lambda run: (counts[run], run))
    )
    return mine[runs == chosen]


def parts(study: Study, lines: pd.DataFrame) -> list[pd.DataFrame]:
    """The lines of a run; where systems are compared, those of one model and shape at a time."""
    shape = ["model", "batch_size", "seq_len"]
    return [part for _, part in lines.groupby(shape, sort=False)] if study.compares else [lines]


def of_rows(
    name: str, found: pd.DataFrame, *, x: str | None = None, hue: str | None = None
) -> Study:
    """The study `name`, or one inferred: the first thing its rows differ in is x, the second hue.

    x, hue: what the caller wants instead. Raises ValueError, one line, for a path that no row has.
    """
    known = listed().get(name) or Study(name=name, title=name.replace("_", " ").capitalize())
    listed_axes = {f"{PATH.name}: {name}.x": known.x, f"{PATH.name}: {name}.hue": known.hue}
    axes = {"--x": x, "--hue": hue} if x or hue else listed_axes
    paths = {*SHAPES, "system", "system.preset", *rows.settings(found).columns}
    for place, path in axes.items():
        if path and path not in paths:
            allowed = ", ".join(differing(found)) or "nothing, for the rows differ in nothing"
            raise ValueError(f"{place}: got {path!r}, allowed {allowed}; choose one")
    if name in listed() and axes is listed_axes:
        return known
    varied = differing(found)
    first = x or next(iter(varied), None)
    if first is None:
        return known
    rest = ["system"] if found["family"].nunique() > 1 else varied
    second = hue or next((path for path in rest if path != first), None)
    values = column(found, first)
    numeric = pd.to_numeric(values, errors="coerce").notna().all()
    figure = "lines" if numeric and values.nunique() > 2 else "bars"
    second = second if second != first else None
    return replace(known, x=first, hue=second, figure=figure, effect={}, value="tokens_per_s")


def differing(found: pd.DataFrame) -> list[str]:
    """What a study varied, in order.

    Config paths in which rows of one family differ, and shapes in which any do.
    """
    shapes = [name for name in SHAPES if found[name].nunique(dropna=False) > 1]
    known = rows.settings(found).map(repr)
    paths = list(map(str, known))
    inner = [
        path
        for path in paths
        if path.startswith((*CHOSEN, "machine.device_bytes"))
        and path not in UNTOLD
        and known[path].groupby(found["family"]).nunique().gt(1).any()
    ]
    if found["model"].nunique() > 1:
        return [*inner, *shapes]
    parts = [
        path for path in paths if path.startswith("model.config.") and known[path].nunique() > 1
    ]
    return [*inner, *parts, *(one for one in shapes if one != "num_params" or not parts)]


def column(found: pd.DataFrame, path: str) -> pd.Series:
    """The values of a column, a config path, or `system`, which is the family with its mode."""
    if path == "system":
        return (found["family"] + " " + found["mode"]).str.strip()
    return found[path] if path in found else rows.settings(found, path)[path]


def value(line: pd.Series, path: str) -> Any:
    """What one line has in that column."""
    return column(line.to_frame().T, path).iloc[0]
