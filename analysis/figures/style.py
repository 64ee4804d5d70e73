"""What every figure shares: look, bars, intervals, and bytes that never change."""

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

from analysis import names

PAGE_IN = 7.0
"""Width of the text block of a two-column paper."""
INK, MUTED, ALARM = "#222222", "#6f6f6f", "#a4122a"
LOOK = Path(__file__).parents[1] / "house.mplstyle"
UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None},
}


def drawn(draw: Callable[[], Figure], format: str = "png", dpi: float | None = None) -> bytes:
    """The figure's bytes in the house's look: the same rows give the same bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context(), plot_style.context(LOOK):
        draw().savefig(buffer, format=format, metadata=UNDATED.get(format), dpi=dpi)
    return buffer.getvalue()


def whisker(
    axes: Axes, line: Any, at: float, *, horizontal: bool, scale: float = 1.0, color: str = INK
) -> None:
    """The 95% interval of a line (lo, hi) through its value; nothing where there is none."""
    if pd.isna(line["lo"]):
        return
    value = line["tokens_per_s"] if "tokens_per_s" in line else line["value"]
    ends = [[(value - line["lo"]) * scale], [(line["hi"] - value) * scale]]
    place = (value * scale, at) if horizontal else (at, value * scale)
    reach: Any = {"xerr" if horizontal else "yerr": ends}
    axes.errorbar(*place, **reach, color=color, elinewidth=0.9, capsize=2, capthick=0.9, zorder=6)


def bar(axes: Axes, line: pd.Series, at: float, words: str = "", *, hollow: bool = False) -> None:
    """The speed of a line as a bar in its system's colour, with its interval and its words."""
    color, speed = names.color(line["family"]), line["tokens_per_s"]
    fill: Any = {"color": "white", "edgecolor": color} if hollow else {"color": color}
    axes.barh(at, speed, height=0.67, **fill)
    whisker(axes, line, at, horizontal=True)
    end = speed if pd.isna(line["hi"]) else line["hi"]
    beside(axes, f"{speed:,.0f}{words}", end, at, fontsize=7.5)


def beside(axes: Axes, words: str, x: float, y: float, fontsize: float = 7.0) -> None:
    """Words to the right of a point."""
    axes.annotate(
        words, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=fontsize
    )


def tokens_per_s(axes: Axes, which: str = "x") -> None:
    """Label the axis of speeds."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_label_text("tokens/s")


def titled(
    figure: Figure, title: str, about: str, *, legend: list[Any] | None = None, columns: int = 5
) -> None:
    """The finding in bold above; below, in grey, what was measured and where, then the legend."""
    width = figure.get_figwidth()
    title = fill(title, int(12 * width))
    figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold", color=INK)
    about = fill(about, int(19.5 * width))
    if legend is None:
        figure.supxlabel(about, x=0.01, ha="left", fontsize=6.8, color=MUTED)
        return
    place: Any = {"loc": "outside lower left", "ncols": columns, "columnspacing": 1.2}
    drawn = figure.legend(handles=legend, title=about or None, **place)
    drawn.set_alignment("left")
    drawn.get_title().set(fontsize=6.8, color=MUTED)
