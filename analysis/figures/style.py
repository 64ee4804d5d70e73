"""What every figure shares: the look, an interval's whisker, and bytes that are the same whenever they are made again."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib import style as plot_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 3.4, 7.0
"""Width of one column, and of the text block, of a two-column paper."""
INK, MUTED, ALARM = "#222222", "#6f6f6f", "#a4122a"
LOOK = Path(__file__).parents[1] / "house.mplstyle"
UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None},
}


def drawn(draw: Callable[[], Figure], format: str = "png", dpi: float | str = "figure") -> bytes:
    """The figure's bytes in the house's look: the same rows give the same bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context(), plot_style.context(LOOK):
        options: Any = {} if dpi == "figure" else {"dpi": dpi}
        draw().savefig(buffer, format=format, metadata=UNDATED.get(format), **options)
    return buffer.getvalue()


def whisker(axes: Axes, line: Any, at: float, *, horizontal: bool, scale: float = 1.0, color: str = INK) -> None:
    """The 95% interval of a line (lo, hi) through its value; nothing where there is none."""
    if pd.isna(line["lo"]):
        return
    value = line["tokens_per_s"] if "tokens_per_s" in line else line["value"]
    ends = [[(value - line["lo"]) * scale], [(line["hi"] - value) * scale]]
    place = (value * scale, at) if horizontal else (at, value * scale)
    look: Any = {"xerr" if horizontal else "yerr": ends, "color": color, "elinewidth": 0.9, "capsize": 2, "capthick": 0.9}
    axes.errorbar(*place, zorder=6, **look)


def titled(figure: Figure, title: str, about: str, *, legend: list[Any] | None = None, columns: int = 5) -> None:
    """The finding in bold above; below, in grey, what was measured and where, and under it the legend of the whole figure."""
    width = figure.get_figwidth()
    figure.suptitle(fill(title, int(13 * width)), x=0.01, ha="left", fontsize=9.5, fontweight="bold", color=INK)
    about = fill(about, int(19.5 * width))
    if legend is None:
        figure.supxlabel(about, x=0.01, ha="left", fontsize=6.8, color=MUTED)
        return
    drawn = figure.legend(handles=legend, loc="outside lower left", ncols=columns, title=about or None, columnspacing=1.2)
    drawn.set_alignment("left")
    drawn.get_title().set(fontsize=6.8, color=MUTED)
