"""Rows -> pictures. One file a figure.

A figure of a study is named by its `figure` in studies.yaml. A figure of the whole record is any
file here with a TITLE and a `draw(lines)`: it is drawn and shown because it is here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pandas as pd
from matplotlib.figure import Figure

from analysis import studies
from analysis.figures import bars, curves, memory, quality, step
from analysis.studies import Study

STUDIES: dict[str, Callable[[Study, pd.DataFrame], Figure]] = {
    "comparison": bars.systems,
    "bars": bars.settings,
    "losses": bars.losses,
    "quality": quality.draw,
}


def of_study(study: Study, lines: pd.DataFrame, beside: pd.DataFrame | None = None) -> Figure:
    """The figure of a study's lines: of all runs for lines along x, else of the leading one."""
    lead = studies.leading(study, lines)
    if study.figure == "lines":
        return curves.draw(study, pd.concat([lead, lines.drop(lead.index)]), beside)
    return STUDIES[study.figure](study, max(studies.parts(study, lead), key=len))


def drawable(study: Study, lines: pd.DataFrame) -> bool:
    """Whether the study has a figure and anything for it."""
    measured = studies.leading(study, lines)["tokens_per_s"].notna()
    return study.figure != "none" and bool(measured.any())


def overviews() -> dict[str, ModuleType]:
    """The figures of the whole record by name."""
    found = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    return {one.__name__.rpartition(".")[2]: one for one in found if hasattr(one, "TITLE")}


def all_figures(lines: pd.DataFrame, results: Path) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(name, what draws it) of every picture that the pages show."""
    told = list(studies.shown(lines))
    for study, mine in told:
        if drawable(study, mine):
            beside = [studies.leading(*one) for one in told if one[0].name in study.beside]
            yield study.name, partial(of_study, study, mine, pd.concat([lines[:0], *beside]))
    current = lines[~lines["superseded"]]
    if (current["study"] == memory.HEADLINE).any():
        for name, module in overviews().items():
            yield name, partial(module.draw, current)
    recorded = [step.load(path)[0] for path in sorted((results / "timelines").glob("*.json"))]
    if recorded:
        yield "timeline", partial(step.compare, recorded)
