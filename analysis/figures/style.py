"""What every figure shares: look, bars, intervals, and bytes that never change."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib import style as plot_style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from analysis import names

PAGE_IN = 7.0
"""Width of the text block of a two-column paper."""
INK, MUTED, ALARM = "#222222", "#6f6f6f", "#a4122a"
SPEED = ["tokens_per_s", "lo", "hi"]
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
    axes: Axes, at: float, ends: Iterable[float], *, horizontal: bool = False, color: str = INK
) -> None:
    """The 95% interval of a value; nothing where there is none. ends: value, lo, hi."""
    value, lo, hi = ends
    if pd.isna(lo):
        return
    place = (value, at) if horizontal else (at, value)
    reach: Any = {"xerr" if horizontal else "yerr": [[value - lo], [hi - value]]}
    axes.errorbar(*place, **reach, color=color, elinewidth=0.9, capsize=2, capthick=0.9, zorder=6)


def bars(axes: Axes, shown: pd.DataFrame, words: pd.Series, hollow: Any = None) -> None:
    """The speed of each line as a bar in its system's colour, with its interval and its words."""
    bare = [False] * len(shown) if hollow is None else hollow
    for at, ((_, line), word, white) in enumerate(zip(shown.iterrows(), words, bare, strict=True)):
        color, speed = names.color(line["family"]), line["tokens_per_s"]
        fill: Any = {"color": "white", "edgecolor": color} if white else {"color": color}
        axes.barh(at, speed, height=0.67, **fill)
        whisker(axes, at, line[SPEED], horizontal=True)
        end = speed if pd.isna(line["hi"]) else line["hi"]
        beside(axes, f"{speed:,.0f}" if pd.isna(word) else f"{speed:,.0f}  {word}", end, at, 7.5)
    tokens_per_s(axes.xaxis)
    axes.grid(axis="y", visible=False)


def beside(axes: Axes, words: str, x: float, y: float, fontsize: float = 7.0) -> None:
    """Words to the right of a point."""
    axes.annotate(
        words, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=fontsize
    )


def tokens_per_s(axis: Axis) -> None:
    """Label the axis of speeds."""
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
