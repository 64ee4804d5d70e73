"""Rows -> pictures. One file a figure; this is the list of them.

A figure of a study is named by its `figure` in studies.yaml; one of the whole record is listed in
`all_figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import studies, timeline
from analysis.figures import (
    bars,
    comparison,
    curves,
    losses,
    memory,
    pareto,
    rivals,
    step,
    style,
)
from analysis.studies import Study

STUDIES: dict[str, Callable[[Study, pd.DataFrame], Figure]] = {
    "comparison": comparison.draw,
    "bars": bars.draw,
    "losses": losses.draw,
}
HEADLINE = "vs_zero3_14b"
"""The study whose leading run the memory figure shows."""


def of_study(study: Study, lines: pd.DataFrame, beside: pd.DataFrame | None = None) -> Figure:
    """The figure of a study's lines: of all runs for lines along x, else of the leading one."""
    lead = studies.leading(study, lines)
    if study.figure == "lines":
        return curves.draw(study, pd.concat([lead, lines.drop(lead.index)]), beside)
    return STUDIES[study.figure](study, max(studies.parts(study, lead), key=len))


def drawable(study: Study, lines: pd.DataFrame) -> bool:
    """Whether the study has a figure and anything for it."""
    return study.figure != "none" and bool(
        studies.leading(study, lines)["tokens_per_s"].notna().any()
    )


def all_figures(lines: pd.DataFrame, results: Path) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(name, what draws it) of every picture that the pages show."""
    for study, mine in studies.shown(lines):
        if drawable(study, mine):
            others = _leads(lines, study.beside)
            yield study.name, partial(of_study, study, mine, others)
        if study.name == HEADLINE:
            yield "memory", partial(memory.draw, studies.leading(study, mine))
    current = lines[~lines["superseded"]]
    against = current[current["study"].str.startswith("vs_")]
    if len(against):
        yield "rivals", partial(rivals.draw, against)
        yield "pareto", partial(pareto.draw, against)
    recorded = [timeline.load(path)[0] for path in sorted((results / "timelines").glob("*.json"))]
    if recorded:
        yield "timeline", partial(step.compare, recorded)


def _leads(lines: pd.DataFrame, wanted: tuple[str, ...]) -> pd.DataFrame:
    """The leading runs of these studies."""
    shown = [studies.leading(*one) for one in studies.shown(lines) if one[0].name in wanted]
    return pd.concat([lines[:0], *shown])


def pictures(
    lines: pd.DataFrame, results: Path, format: str = "png"
) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every picture, in the house's look."""
    for name, draw in all_figures(lines, results):
        yield name, style.drawn(draw, format)
