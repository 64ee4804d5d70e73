"""What each study asks and how it is shown: from studies.yaml, or inferred from its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

PATH = Path(__file__).with_name("studies.yaml")
SHAPES = ("num_params", "batch_size", "seq_len")
AXES = (*SHAPES, "system", "seed", "num_ranks")
"""Columns of the frame that x and hue may name beside config paths."""
WORK = ["model_key", "batch_size", "seq_len", "num_ranks", "machine.device_bytes"]
"""What lines share that may be held against each other: model, shape, GPUs and what of their memory
is allowed."""
CHOSEN = r"^(system|process|recipe)\.|^machine\.(device_bytes|host_bytes|drives)$|^seed$"
"""Fields of the config that say how a cell was run."""
PRODUCTS = "system.products"
"""What layers multiply in, which a system's name says too."""
UNTOLD = ("system.name", "system.preset", "process.timeout_s", "recipe.total_steps")
"""Those that tell nothing apart."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One entry of studies.yaml; its head explains the fields."""

    name: str
    title: str
    question: str = ""
    experiments: Sequence[str] = ()
    x: str | None = None
    hue: str | None = None
    rest: Sequence[str] = ()
    value: str = "tokens_per_s"
    figure: str = "comparison"
    effect: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    lead: str | None = None
    beside: Sequence[str] = ()
    paper: str | None = None
    superseded: Sequence[str] = ()
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def axes(self) -> list[str]:
        """What is varied: x, then hue, then the rest, of which no line and no ratio spans two."""
        return [*filter(None, (self.x, self.hue)), *self.rest]

    @property
    def compares(self) -> bool:
        """Whether systems are ranked and nothing is varied."""
        return self.figure == "comparison" or self.x is None


@cache
def listed(path: Path = PATH) -> dict[str, Study]:
    """The studies of the file by name. Raises ValueError, one line, for an entry that is none."""
    found = {}
    for name, entry in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).items():
        try:
            found[name] = Study(name=name, **{"experiments": [name]} | entry)
        except TypeError as error:
            told = f"{path.name}: {name}: {error}; its head says what is allowed"
            raise ValueError(told) from None
    return found


def assigned(found: pd.DataFrame) -> pd.DataFrame:
    """The frame with the `study` of every row: its experiment, where no other names that or the
    row's run of it."""
    owners = {name: one.name for one in listed().values() for name in one.experiments}
    of_run = (found["experiment"] + "@" + found["run"]).map(owners)
    return found.assign(study=of_run.fillna(found["experiment"].replace(owners)))


def shown(lines: pd.DataFrame) -> Iterator[tuple[Study, pd.DataFrame]]:
    """Each study with its lines, less what a later run supersedes; the listed ones first."""
    current = lines[~lines["superseded"]]
    for name in dict.fromkeys([*listed(), *sorted(current["study"].unique())]):
        mine = current[current["study"] == name]
        if len(mine):
            study = of_rows(name, mine)
            yield study, said_once(study, mine)


def said_once(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines, whose systems do not say what layers multiply in where an axis does."""
    if PRODUCTS not in study.axes:
        return lines
    words = lines["mode"].str.split()
    return lines.assign(mode=[" ".join(one for one in mode if one != "float8") for mode in words])


def leading(study: Study, mine: pd.DataFrame) -> pd.DataFrame:
    """Those of a study's lines that are of the run that answers: the one that studies.yaml names,
    else the one that measured most, of equals the last."""
    counts = mine["tokens_per_s"].notna().groupby(mine["run"]).sum()
    best = max(counts.index, key=lambda run: (run == study.lead, counts[run], run))
    return mine[mine["run"] == str(best)]


def parts(study: Study, lines: pd.DataFrame) -> list[pd.DataFrame]:
    """The lines of a run, of one model at a time where it is not what is varied; where systems are
    compared, of one shape and number of GPUs too."""
    if not study.compares and "num_params" not in study.rest:
        return [lines]
    told = lines.reindex(columns=WORK if study.compares else ["num_params"]).map(repr)
    return [part for _, part in lines.groupby(told.agg(" ".join, axis=1), sort=False)]


def main_part(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The part of a run of which most was measured: what an answer, a figure and a number are of,
    for no ratio spans two models or shapes."""
    return max(parts(study, lines), key=lambda part: part["tokens_per_s"].notna().sum())


def same_work(lines: pd.DataFrame, main: pd.DataFrame) -> pd.DataFrame:
    """Those of another run that are of what all of `main` is of."""
    for path in WORK:
        known = {repr(one) for one in main.reindex(columns=[path])[path]}
        if len(known) == 1:
            lines = lines[lines.reindex(columns=[path])[path].map(repr).isin(known)]
    return lines


def of_rows(
    name: str, found: pd.DataFrame, *, x: str | None = None, hue: str | None = None
) -> Study:
    """The study `name`, or one inferred: the first thing its rows differ in is x, the second hue,
    or what the caller wants instead. Raises ValueError, one line, for a path that no row has."""
    known = listed().get(name) or Study(name=name, title=name.replace("_", " ").capitalize())
    ours = {f"{PATH.name}: {name}.x": known.x, f"{PATH.name}: {name}.hue": known.hue}
    varied = differing(found)
    for place, path in ({"--x": x, "--hue": hue} if x or hue else ours).items():
        if path and not (path in found and (path in AXES or "." in path)):
            allowed = ", ".join(varied) or "nothing, for the rows differ in nothing"
            raise ValueError(f"{place}: got {path!r}, allowed {allowed}; choose one")
    if name in listed() and not (x or hue):
        return replace(known, rest=_rest(known, found, varied)) if known.x else known
    x = x or next((path for path in varied if path != hue), None)
    if x is None:
        return known
    rest = ["system"] if found["family"].nunique() > 1 else varied
    hue = hue or next((path for path in rest if path != x), None)
    numeric = pd.to_numeric(found[x], errors="coerce").notna().all()
    figure = "lines" if numeric and found[x].nunique() > 2 else "bars"
    told = replace(known, x=x, hue=hue, figure=figure, effect={}, value="tokens_per_s")
    return replace(told, rest=_rest(told, found, varied))


def _rest(study: Study, found: pd.DataFrame, varied: Sequence[str]) -> list[str]:
    """What x and hue leave open, no more than is needed: the system and the model, where neither is
    of it, and what tells lines of one run and system apart at one place."""
    told = found[["run", "family", "mode", *study.axes, *varied]].map(repr)
    of_model = any(path == "num_params" or path.startswith("model.") for path in study.axes)
    of_system = any(path in ("system", "system.preset") for path in study.axes)
    models = [path for path in varied if path == "num_params" and not of_model]
    systems = ["system"] if found["family"].nunique() > 1 and not of_system else []

    def apart(rest: Sequence[str]) -> bool:
        place = told[["run", "family", "mode", *study.axes, *rest]].agg(" ".join, axis=1)
        return not told[[*varied]].groupby(place).nunique().gt(1).any(axis=None)

    rest = [path for path in varied if path not in study.axes]
    for path in rest:
        fewer = [one for one in rest if one != path]
        if path not in models and apart(fewer):
            rest = fewer
    return [*systems, *rest]


def differing(found: pd.DataFrame) -> list[str]:
    """What a study varied: config paths in which rows of one family differ, then shapes in which
    any do."""
    if len(found) < 2:
        return []
    shapes = [name for name in SHAPES if found[name].nunique(dropna=False) > 1]
    told = found.drop(columns=[*UNTOLD], errors="ignore").filter(regex=CHOSEN).map(repr)
    inner = list(told.columns[told.groupby(found["family"]).nunique().gt(1).any()])
    if found["model"].nunique() > 1:
        return [*inner, *shapes]
    model = found.filter(regex=r"^model\.config\.").map(repr).nunique()
    parts = list(model.index[model > 1])
    return [*inner, *parts, *(one for one in shapes if one != "num_params" or not parts)]
