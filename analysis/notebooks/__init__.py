"""Thin notebooks: each .py here is a percent script that loads rows, calls figures and comments; the .ipynb beside it is that
script executed, outputs and all.

    python -m analysis.notebooks          # execute all of them again
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from IPython.display import Image
from matplotlib.figure import Figure

from analysis import load, report, style

RESULTS = Path(__file__).parents[1] / "results"


def rows() -> pd.DataFrame:
    """The last row of every committed cell that was measured on a GPU."""
    frame = load.latest(load.load(RESULTS))
    return load.latest(frame[frame["gpu"].notna()])


def comparisons() -> dict[str, pd.DataFrame]:
    """Comparisons of systems on a GPU, by the file that holds their rows: files of one study are runs of their own."""
    found = {}
    for file in sorted(RESULTS.glob("*.jsonl")):
        frame = load.latest(load.load(file))
        parts = [part.frame for part in report.sections(frame[frame["gpu"].notna()]) if part.study is None]
        found |= {f"{file.stem}{f' ({number})' if number > 1 else ''}": part for number, part in enumerate(parts, 1)}
    return found


def show(figure: Figure) -> Image:
    """A figure as the output of a cell: a PNG of under 100 kB."""
    return Image(style.png(figure))
