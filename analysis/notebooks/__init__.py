"""Thin notebooks: the committed .ipynb is source and outputs in one.

python -m analysis notebooks          # execute all of them again
"""

import pandas as pd
from IPython.display import Image, Markdown, display

from analysis import answers, figures, record, studies, tables
from analysis.figures import style

LINES = record.lines()
"""One line a configuration and run of the committed record. Rows of your own, or of W&B:
`speeds.lines(studies.assigned(rows.frame(SOURCE)))`."""
PICTURES = dict(figures.all_figures(LINES, record.RESULTS))


def picture(name: str) -> Image:
    """One of the record's figures."""
    return Image(style.drawn(PICTURES[name], dpi=90))


def table(shown: pd.DataFrame) -> None:
    """A table of text."""
    display(Markdown(tables.markdown(shown)))


def tell(*, comparisons: bool) -> None:
    """Question, answer and leading table: of the comparisons with rivals, or the others."""
    for study, mine in studies.shown(LINES):
        if study.compares == comparisons:
            answer = answers.answer(study, mine)
            display(Markdown(f"## {study.title}\n\n{study.question}\n\n{answer}"))
            table(tables.of(study, studies.leading(study, mine)))
