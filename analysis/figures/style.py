"""What every figure shares: look, bars, intervals, and bytes that never change."""

import io
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import style as plot_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import names, speeds

PAGE_IN = 7.0
"""Width of the text block of a two-column paper."""
INK, MUTED, ALARM = "#222222", "#6f6f6f", "#a4122a"
WHISKER: dict[str, Any] = {"elinewidth": 0.9, "capthick": 0.9}
"""The look of an interval."""
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


def reach(lines: pd.DataFrame, value: str = "tokens_per_s") -> Any:
    """How far each 95% interval reaches below and above the value; NaN, not drawn, without one."""
    return np.array([lines[value] - lines["lo"], lines["hi"] - lines[value]], float)


def intervals(lines: pd.DataFrame) -> str:
    """What stands below a figure of these lines about their intervals."""
    known = lines["lo"].notna().any()
    return "bars: 95% intervals" if known else "too few windows for intervals"


def bars(axes: Axes, lines: pd.DataFrame, value: str, form: str) -> None:
    """The value of each line as a bar in its system's colour, hollow where it is not ranked, the
    first above: its label to the left, its interval, and to the right the value and its words."""
    colors = lines["family"].map(lambda family: names.look(family)["color"])
    filled, places = colors.where(speeds.comparable(lines), "white"), range(len(lines))
    axes.barh(places, lines[value], height=0.67, color=filled, edgecolor=colors)
    axes.errorbar(lines[value], places, xerr=reach(lines, value), fmt="none", ecolor=INK, **WHISKER)
    told = lines[value].map(f"{{:{form}}}".format) + ("  " + lines["words"]).fillna("")
    farthest = 1.6 * lines[value].max()
    ends = lines["hi"].fillna(lines[value])
    inside = ends.where(ends < farthest, lines[value])  # an end out of sight is cut off
    most = max(1.36 * lines[value].max(), 1.3 * inside.max())  # with room for the words
    for at, (end, word, cut) in enumerate(zip(inside, told, ends >= farthest, strict=True)):
        box: Any = {"facecolor": "white", "edgecolor": "none", "pad": 0} if cut else None
        axes.text(end, at, f"  {word}", va="center", fontsize=7.5, bbox=box)
    axes.set(xlabel=names.setting(value), xlim=(0, most))
    axes.set_yticks(places, lines["label"].str.replace(", ", ",\n", n=1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def titled(figure: Figure, title: str, about: str, legend: Any = (), columns: int = 5) -> None:
    """The finding in bold above, for which the figure grows; below, in grey, what was measured and
    where, then the legend."""
    width = figure.get_figwidth()
    title, about = fill(title, int(12 * width)), fill(about, int(19.5 * width))
    figure.set_figheight(figure.get_figheight() + 0.16 * title.count("\n"))
    figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold", color=INK)
    place: Any = {"loc": "outside lower left", "ncols": columns, "columnspacing": 1.2}
    drawn = figure.legend(handles=legend, title=about, alignment="left", **place)
    drawn.get_title().set(fontsize=6.8, color=MUTED)
