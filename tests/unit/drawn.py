"""What a test reads off a figure: lines, bars, legend entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from analysis import load
from sweeps.result import Row


def figure_of(module: Any, rows: list[Row], *more: Any) -> Figure:
    drawn: Figure = module.figure(load.from_rows(rows), *more)
    return drawn


def lines(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def patches(axes: Axes) -> dict[str, Rectangle]:
    bars = {str(box.get_label()): box.patches[0] for box in axes.containers if hasattr(box, "patches")}
    return bars | {str(one.get_label()): one for one in axes.patches if isinstance(one, Rectangle)}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]
