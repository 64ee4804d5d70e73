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
    """The last row of every committed cell of each file that was measured on a GPU."""
    frame = load.load(RESULTS)
    return load.latest(frame[frame["gpu"].notna()])


def comparisons() -> dict[str, pd.DataFrame]:
    """Comparisons of systems on a GPU, by the file that holds their rows: files of one study are runs of their own."""
    return {name: part.frame for name, part in sections().items() if part.study is None}


def studies() -> dict[str, report.Section]:
    """Studies of one system on a GPU, by the file that holds their rows."""
    return {name: part for name, part in sections().items() if part.study is not None}


def sections() -> dict[str, report.Section]:
    """All that the committed files hold, as `analysis.make` draws it: file by file, counted where one has several parts."""
    found = {}
    for file in sorted(RESULTS.glob("*.jsonl")):
        frame = load.load(file)
        parts = report.parted(frame[frame["gpu"].notna()])
        found |= {f"{file.stem}{f' ({number})' if number > 1 else ''}": part for number, part in enumerate(parts, 1)}
    return found


def show(figure: Figure) -> Image:
    """A figure as the output of a cell: a PNG of under 100 kB."""
    return Image(style.png(figure))
