"""What must fit a page: words over a figure, notes below its heading, names of axes and at the ticks of a logarithmic one.

Invariant: widths are counted from characters, so the same words give the same figure.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.standing import Standing

SMALL_PER_IN = 20
"""Characters of 6.5 points that an inch holds."""
LINE_IN = 0.11
"""Height of a line of them."""
TICK_PT = 4.5
"""Width of a digit at a tick."""
NAME = 26
"""Most characters of a line of a system's name."""
CURVE = 34
"""The same in the legend of the losses."""
ENTRY = 24
"""The same in a legend below the panels: two columns of a figure of one column hold it."""
ENTRY_LINE_IN, ENTRY_IN = 0.128, 0.012
"""Height of a line of such a legend, and what an entry has between it and the next."""
LEGEND_IN = 0.5
"""Height of such a legend that a figure has room for as it is."""
NAME_IN = 0.13
"""Height of such a line."""


def log2_axis(axes: Axes, places: Sequence[float], name: Callable[[float], str], width_in: float, margin: float) -> None:
    """A logarithmic x axis with a tick at every place, as many of them named as an axis of this width holds, the ends first.

    places: in order. margin: the factor of room beside the ends.
    """
    octave_pt = 72 * width_in / math.log2(places[-1] / places[0] * margin**2)
    named: dict[float, float] = {}  # place -> half the width of its name, points
    for place in dict.fromkeys([places[-1], places[0], *reversed(places)]):
        half = TICK_PT * (len(name(place)) + 1) / 2
        if all(octave_pt * abs(math.log2(place / other)) >= half + taken for other, taken in named.items()):
            named[place] = half
    axes.set_xscale("log", base=2)
    axes.set_xlim(places[0] / margin, places[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: name(value) if value in named else ""))


def wrapped(text: str, width_in: float) -> str:
    """Small words (6.5 points) in as many lines as a page of this width needs."""
    return textwrap.fill(text, int(SMALL_PER_IN * width_in))


def name(label: str, width: int = NAME) -> str:
    """What a row of bars, or a curve, is called, in as many lines of so many characters as it takes."""
    return textwrap.fill(label, width, break_on_hyphens=False)


def row_in(standings: Iterable[Standing], least: float) -> float:
    """Height of a row of bars in inches: what the longest name needs, at least `least`."""
    return max(least, NAME_IN * max(name(one.label).count("\n") + 1 for one in standings))


def legend_below(figure: Figure, handles: Sequence[Line2D], columns: int) -> Legend:
    """One legend for all panels, below them: names in as many lines as it takes, the figure taller by what the legend does."""
    for handle in handles:
        handle.set_label(name(str(handle.get_label()), ENTRY))
    heights = [ENTRY_IN + ENTRY_LINE_IN * (str(handle.get_label()).count("\n") + 1) for handle in handles]
    tallest = max(sum(column) for column in np.array_split(heights, columns))  # as the legend divides them
    width_in, height_in = figure.get_size_inches()
    figure.set_size_inches(width_in, height_in + max(0.0, tallest - LEGEND_IN))
    return figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.0)


def noted(figure: Figure, notes: Sequence[str]) -> Figure:
    """The figure, taller by the notes, which follow its heading."""
    for note in notes:
        width_in, height_in = figure.get_size_inches()
        lines = wrapped(note, width_in)
        heading = next(text for text in figure.texts if text.get_text() == figure.get_suptitle())
        heading.set_text(f"{heading.get_text()}\n{lines}")
        figure.set_size_inches(width_in, height_in + LINE_IN * (lines.count("\n") + 1))
    return figure


def speed_axis(standings: Iterable[Standing]) -> str:
    """Title of an axis of speeds, with what its intervals are of: windows of one run, or repeats of it."""
    samples = [
        (one.speed.num_samples, one.num_repeats > 1) for one in standings if one.speed is not None and one.speed.has_interval
    ]
    if not samples:
        return "tokens / s"
    numbers = sorted({number for number, _ in samples})
    of = " or ".join(sorted({"repeats" if repeated else "windows" for _, repeated in samples}, reverse=True))
    return f"tokens / s\n(95% interval of {' to '.join(dict.fromkeys(map(str, (numbers[0], numbers[-1]))))} {of})"
