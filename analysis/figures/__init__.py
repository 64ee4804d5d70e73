"""Rows -> pictures. One file a figure; this is the list of them.

A figure of a study is named by its `figure` in studies.yaml; a figure of the whole record is listed in OVERVIEWS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import numbers, studies, timeline
from analysis.figures import bars, comparison, curves, losses, memory, paper, pareto, rivals, step, style
from analysis.studies import Study

STUDIES: dict[str, Callable[[Study, pd.DataFrame], Figure]] = {
    "comparison": comparison.draw,
    "lines": curves.draw,
    "bars": bars.draw,
    "losses": losses.draw,
}
HEADLINE = "vs_zero3_14b"
"""The study whose leading run the memory figure shows."""


def of_study(study: Study, lines: pd.DataFrame) -> Figure:
    """The figure of one study. lines: of all runs that are to be drawn; what cannot span runs is drawn of the leading one."""
    run = numbers.lead(study, lines)
    if study.figure != "lines":
        return STUDIES[study.figure](study, lines[lines["run"] == run])
    leading = lines["run"] == run
    return STUDIES["lines"](study, pd.concat([lines[leading], lines[~leading]]))


def all_figures(lines: pd.DataFrame, results: Path) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(name, what draws it) of every picture that the pages show."""
    current = lines[~lines["superseded"]]
    for study in studies.all_studies():
        mine = current[current["study"] == study.name]
        if len(mine) and study.figure != "none":
            yield study.name, lambda study=study, mine=mine: of_study(study, mine)  # type: ignore[misc]
    if (current["study"] == HEADLINE).any():
        headline = current[current["study"] == HEADLINE]
        run = numbers.lead(studies.listed()[HEADLINE], headline)
        yield "rivals", lambda: rivals.draw(lines)
        yield "pareto", lambda: pareto.draw(lines)
        yield "memory", lambda: memory.draw(headline[headline["run"] == run])
        yield "paper", lambda: paper.draw(lines)
    recorded = [timeline.load(path)[0] for path in sorted((results / "timelines").glob(f"*{timeline.SUFFIX}"))]
    if recorded:
        longest, shortest = (max(recorded, key=lambda one: one.step_s), min(recorded, key=lambda one: one.step_s))
        title = f"A 7B step of {longest.name} and of {shortest.name}: {longest.step_s / shortest.step_s:.1f}x between them"
        yield "timeline", lambda: step.draw(recorded, title)


def pictures(lines: pd.DataFrame, results: Path, format: str = "png") -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every picture, in the house's look."""
    for name, draw in all_figures(lines, results):
        yield name, style.drawn(draw, format)
