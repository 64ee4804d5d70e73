"""Thin notebooks: each .py here is a percent script that loads, calls and comments; the .ipynb beside it is that script executed.

python -m analysis.notebooks          # execute all of them again
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from IPython.display import Image, Markdown, display

from analysis import figures, record, tables
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
    say(tables.markdown(shown))


def say(text: Any) -> None:
    """Markdown."""
    display(Markdown(str(text)))
