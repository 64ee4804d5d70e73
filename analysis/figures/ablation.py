"""What one part of the engine is worth: a heat map of two factors, bars of any others, and the ladder from paper to fast.

Invariant: pure functions of a study's cells. Every cell is drawn: with its speed, hollow and dashed where it is only predicted,
crossed out with its status where it is neither; losses are against the fastest cell whose numerics agree.
"""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import machines, style
from analysis.cells import Cell, change, named, percent, variants, worded
from analysis.figures import layout
from analysis.studies import Study, rung_name, study_of

HEAT = LinearSegmentedColormap.from_list("loss", ["#f2f6fb", "#8cb4e0", "#1f5fa8", "#12305a"])
DEEP = 0.42
"""Share of the colour scale from which words on it are white."""
LINE = 66
"""Characters of a heading that fit a column."""
BAR = 0.62
"""Height of a bar, in rows."""


def figure(frame: pd.DataFrame) -> Figure:
    """The figure that suits what differs among the rows of one study (experiment and machine); ValueError where nothing does."""
    study = study_of(frame)
    drawings = {"grid": heat_map, "ladder": ladder, "factor": bars}
    if study.kind not in drawings:
        raise ValueError(f"{study.name}: a {study.kind}, no ablation: nothing differs but systems or sizes; vary a field of system")
    return layout.noted(drawings[study.kind](study), machines.notes(frame))


def heat_map(study: Study) -> Figure:
    """Two numeric factors: throughput lost against the fastest cell, % of its tokens/s; white words on deep colours."""
    rows, columns = study.factors
    tall, wide = study.factors[rows], study.factors[columns]
    losses = {id(one): -gap.value for one in study.cells if study.best and (gap := change(one, study.best))}
    top = max([0.01, *losses.values()])
    with style.context():
        drawn = style.new_figure(style.COLUMN_IN, 1.05 + 0.33 * len(tall))
        axes = drawn.subplots()
        for one in study.cells:
            place = wide.index(one.factors[columns]), tall.index(one.factors[rows])
            _square(axes, *place, one, study, losses.get(id(one)), top)
        _value_ticks(axes, study)
        told = any(gap.has_interval for one in study.cells if study.best and (gap := change(one, study.best)))
        spread = "% ± half the 95% interval" if told else "% (too few windows for an interval)"
        heading(drawn, study, f"upper: tokens/s against the fastest, {spread}; lower: tokens/s")
    return drawn


def _square(axes: Axes, x: int, y: int, cell: Cell, study: Study, lost: float | None, top: float) -> None:
    depth = 0.0 if lost is None else lost / top
    looks: Any = {"facecolor": HEAT(depth), "edgecolor": "white", "linewidth": 1}
    if lost is None:
        guess = cell.predicted is not None
        dashed, hatched = {"edgecolor": style.MUTED, "linestyle": "--", "linewidth": 0.8}, {"edgecolor": "#cccccc", "hatch": "////"}
        looks = {"facecolor": "white", **(dashed if guess else hatched)}
    inset = 0.46 if lost is None else 0.5
    axes.add_patch(Rectangle((x - inset, y - inset), 2 * inset, 2 * inset, label=cell.label, **looks))
    color = style.ALARM if lost is None and cell.predicted is None else "white" if depth > DEEP else style.INK
    backed: Any = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6}} if color == style.ALARM else {}
    axes.text(x, y, "\n".join(_words(cell, study)), ha="center", va="center", fontsize=6, linespacing=1.1, color=color, **backed)


def _words(cell: Cell, study: Study) -> list[str]:
    """What stands in a cell: the loss with half its interval, the speed; or what happened instead."""
    one = cell.standing
    if one.differs:
        return ["numerics", "differ"]
    if cell.predicted is not None:
        return [f"{cell.predicted.value:,.0f}", "predicted"]
    if not one.measured or study.best is None or one.speed is None:
        return one.status_label.split(" ", 1)
    speed = f"{one.speed.value:,.0f}" if one.speed.value >= 100 else f"{one.speed.value:.3g}"
    if cell is study.best:
        return ["fastest", speed]
    gap = change(cell, study.best)
    assert gap is not None
    half = f" ±{50 * (gap.hi - gap.lo):.1f}" if gap.lo is not None and gap.hi is not None else ""
    return [f"{percent(gap.value)}{half}", speed]


def _value_ticks(axes: Axes, study: Study) -> None:
    rows, columns = study.factors
    axes.set_xticks(range(len(study.factors[columns])), [worded(columns, value) for value in study.factors[columns]])
    axes.set_yticks(range(len(study.factors[rows])), [worded(rows, value) for value in study.factors[rows]])
    axes.set_xlim(-0.5, len(study.factors[columns]) - 0.5)
    axes.set_ylim(len(study.factors[rows]) - 0.5, -0.5)
    axes.set_xlabel(AXES.get(columns, named(columns)))
    axes.set_ylabel(AXES.get(rows, named(rows)))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


AXES = {"system.depth": "depth (slots)", "system.streams": "streams"}
"""What an axis says where the field's name is not enough."""


def bars(study: Study) -> Figure:
    """Any factors: tokens/s of every cell with its interval, and the change from the fastest at the end of the bar."""
    labels = [" / ".join(worded(key, value) for key, value in one.factors.items()) for one in study.cells]
    meaning = f"rows: {' / '.join(map(named, study.factors))}; at the bars: change from the fastest"
    return _bars(study, labels, [_gap_to_best(one, study) for one in study.cells], meaning)


def ladder(study: Study) -> Figure:
    """Each rung on top of the last: tokens/s with its interval; times the first rung, and the change from the rung above."""
    labels = [f"{'+ ' if number else ''}{rung_name(one.preset or '')}" for number, one in enumerate(study.cells)]
    first = study.cells[0]
    told = [_step(one, before, first) for before, one in itertools.pairwise([first, *study.cells])]
    return _bars(study, labels, told, "each row adds a switch; at the bars: × the first row (change from the row above)")


def _step(cell: Cell, before: Cell, first: Cell) -> str:
    whole, step = change(cell, first), change(cell, before)
    if cell is first or whole is None:
        return "1.00×" if cell is first and cell.standing.measured else ""
    return f"{1 + whole.value:.2f}×" + (f" ({percent(step.value)})" if step is not None else "")


def _gap_to_best(cell: Cell, study: Study) -> str:
    gap = None if study.best is None else change(cell, study.best)
    return "" if gap is None else "fastest" if cell is study.best else percent(gap.value)


def _bars(study: Study, labels: list[str], told: list[str], meaning: str) -> Figure:
    top = max([drawn.hi or drawn.value for one in study.cells if (drawn := one.drawn)], default=1.0)
    looks = {} if study.kind == "ladder" else variants(study.cells)  # rungs are one system on its way
    with style.context():
        figure = style.new_figure(style.COLUMN_IN, 1.05 + 0.2 * len(labels))
        axes = figure.subplots()
        for position, (one, text) in enumerate(zip(study.cells, told, strict=True)):
            _bar(axes, position, one, text, looks.get(one.family, 0))
        axes.set_yticks(range(len(labels)), labels, fontsize=6.5)
        axes.set_ylim(len(labels) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.42 * top)
        axes.set_xlabel(layout.speed_axis(one.standing for one in study.cells))
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if top > 5 else f"{value:g}"))
        heading(figure, study, meaning)
        style.value_grid(axes, "x")
    return figure


def _bar(axes: Axes, position: int, cell: Cell, text: str, variant: int) -> None:
    one, drawn = cell.standing, cell.drawn
    if drawn is None:
        style.cross(axes, 0, position)
        axes.annotate(one.status_label, (0, position), (6, 0), textcoords="offset points", va="center", color=style.ALARM)
        return
    looks = style.bar(one.system, variant) if one.measured else style.predicted_bar(one.system, variant)
    axes.barh(position, drawn.value, height=BAR, label=cell.label, **looks)
    if drawn.lo is not None and drawn.hi is not None:
        style.whisker(axes, drawn.value, position, xerr=[[drawn.value - drawn.lo], [drawn.hi - drawn.value]])
    words = "predicted" if not one.measured else "numerics differ" if one.differs else text
    color = style.ALARM if one.differs else style.INK
    end = (drawn.hi or drawn.value, position)
    axes.annotate(words, end, (4, 0), textcoords="offset points", va="center", fontsize=6.5, color=color)


def heading(figure: Figure, study: Study, meaning: str) -> None:
    """What was run, where, and what the words in the figure say, over the whole width."""
    lines = [study.subject, study.machine, *textwrap.wrap(meaning, LINE)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=6.5, color=style.MUTED)
