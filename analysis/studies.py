"""What each study asks and how it is shown: studies.yaml, and what is inferred for a study that is not listed there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import rows

PATH = Path(__file__).with_name("studies.yaml")
FIGURES = ("comparison", "lines", "bars", "losses", "none")
CHOSEN = ("system.", "process.", "recipe.")
"""Groups of the config that say how a cell was run."""
COLUMNS = ("num_params", "batch_size", "seq_len", "device_gb")
"""Columns of the frame that x may name beside config paths and `system`."""


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
    """The run that answers; None for the one that measured most."""
    superseded: tuple[str, ...] = ()

    @property
    def base_is_rival(self) -> bool:
        """Whether systems stand side by side along x, so that a line is held against ZeRO-3 at its place."""
        return self.hue == "system"


@cache
def listed(path: Path = PATH) -> dict[str, Study]:
    """The studies of the file by name. Raises ValueError, one line, for an entry that is none."""
    found = {}
    for name, entry in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).items():
        known = {item for item in Study.__dataclass_fields__ if item != "name"}
        unknown = sorted(set(entry) - known)
        if unknown:
            raise ValueError(
                f"{path.name}: {name}.{unknown[0]}: got an unknown key, allowed {', '.join(sorted(known))}; leave it out"
            )
        if entry.get("figure", "comparison") not in FIGURES:
            raise ValueError(f"{path.name}: {name}.figure: got {entry['figure']!r}, allowed {', '.join(FIGURES)}; choose one")
        several = {key: tuple(entry.get(key, ())) for key in ("experiments", "superseded")}
        several["experiments"] = several["experiments"] or (name,)
        found[name] = Study(name=name, **entry | several)
    return found


def all_studies() -> list[Study]:
    """Those of studies.yaml, in its order."""
    return list(listed().values())


def study_of(experiment: str) -> str:
    """The study that an experiment's rows belong to: itself, where no other names it."""
    return next((study.name for study in all_studies() if experiment in study.experiments), experiment)


def assigned(found: pd.DataFrame) -> pd.DataFrame:
    """The frame with the `study` of every row."""
    return found.assign(study=found["experiment"].map(study_of))


def of_rows(name: str, found: pd.DataFrame, *, x: str | None = None, hue: str | None = None) -> Study:
    """The study `name`, or one inferred from its rows: the first thing they differ in is x, the second hue.

    x, hue: what the caller wants instead. Raises ValueError, one line, for a path that no row has.
    """
    known = listed().get(name)
    varied = differing(found)
    for option, path in (("--x", x), ("--hue", hue)):
        if path and path not in varied and path not in (*COLUMNS, "system") and path not in rows.settings(found).columns:
            raise ValueError(
                f"{option}: got {path!r}, allowed {', '.join(varied) or 'nothing, for the rows differ in nothing'}; choose one"
            )
    if known and not x and not hue:
        return known
    if x is None and (len(found["family"].unique()) > 1 and not varied):
        return known or Study(name=name, title=name.replace("_", " "), figure="comparison")
    several = len(found["family"].unique()) > 1
    first = x or next(iter(varied), None)
    second = hue or ("system" if several else next((path for path in varied if path != first), None))
    axes = [first, second if second != first else None]
    if axes[0] is None:
        return known or Study(name=name, title=name.replace("_", " "), figure="comparison")
    numbers = pd.to_numeric(column(found, axes[0]), errors="coerce").notna().all()
    figure = "lines" if numbers and len(column(found, axes[0]).unique()) > 2 else "bars"
    title = known.title if known else name.replace("_", " ")
    return Study(name=name, title=title, x=axes[0], hue=axes[1], figure=figure, command=known.command if known else "")


def differing(found: pd.DataFrame) -> list[str]:
    """Config paths in which rows of one family differ, and columns in which any do: what a study varied, in order."""
    shapes = [name for name in COLUMNS[:3] if found[name].nunique(dropna=False) > 1]
    paths = rows.settings(found)
    mine = [str(path) for path in paths if str(path).startswith(CHOSEN) or path == "machine.device_bytes"]
    told = [path for path in mine if path not in ("system.name", "system.preset", "process.timeout_s", "recipe.total_steps")]
    inner = [path for path in told if (paths[path].map(repr).groupby(found["family"]).nunique() > 1).any()]
    if found["model"].nunique() > 1:
        return [*inner, *shapes]
    sizes = [str(path) for path in paths if str(path).startswith("model.config.")]
    sizes = [path for path in sizes if paths[path].map(repr).nunique() > 1]  # one shape, of which a part is varied
    return [*inner, *sizes, *(shape for shape in shapes if shape != "num_params" or not sizes)]


def column(found: pd.DataFrame, path: str) -> pd.Series:
    """The values of a column, a config path, or `system`, which is the family with its mode."""
    if path == "system":
        return (found["family"] + " " + found["mode"]).str.strip()
    return found[path] if path in found else rows.settings(found, path)[path]
