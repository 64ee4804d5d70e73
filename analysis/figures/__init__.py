"""Lines -> pictures: those of a study in of_study, those of the whole record in of_record, and the
recorded steps in step."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import studies
from analysis.figures import of_record, of_study, step

TITLES = {name: title for name, (title, _) in of_record.DRAWN.items()}
TITLES["timeline"] = "One recorded step"
TITLES["timeline_14b"] = "One recorded step at 14B, and as it was predicted"
TITLES["timeline_14b_recomputed"] = "One at 14B in which every layer is recomputed"
"""What the index page calls the pictures that are of no study."""


def all_figures(lines: pd.DataFrame, results: Path) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(name, what draws it) of every picture that the pages show."""
    told = list(studies.shown(lines))
    for study, mine in told:
        if of_study.drawable(study, mine):
            beside = [studies.leading(*one) for one in told if one[0].name in study.beside]
            yield study.name, partial(of_study.draw, study, mine, beside)
    current = lines[~lines["superseded"]]
    if (current["study"] == of_record.HEADLINE).any():
        for name, (_, draw) in of_record.DRAWN.items():
            yield name, partial(draw, current)
    recorded = [step.load(path)[0] for path in sorted((results / "timelines").glob("*.json"))]
    if recorded:
        yield "timeline", partial(step.draw, recorded)
    for path in sorted((results / "timelines").glob("*/*.json")):
        yield f"timeline_{path.parent.name}", partial(step.draw, step.load(path))
