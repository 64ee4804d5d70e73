"""Speed against model size, batch and context: a line for each system and preset, on one machine.

Invariant: a pure function of the frame. A panel varies one thing and holds the others; a line joins points of one study, and a
point that none joins stands beside another on which it would lie, where there is room (a note says so); predictions are hollow
and dashed, and a cell with neither measurement nor prediction stands below the axis, its marker crossed, the cross's meaning in
the legend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import machines, style
from analysis.cells import Cell, Family, cells_of, stands_for, variants
from analysis.figures import layout
from analysis.figures.apart import Line, Taken, below, crossed_box, make_room, set_apart
from analysis.scales import SCALES, Held, Scale
from analysis.studies import study_of, unablated

BESIDE_IN = 0.7
"""What stands beside the axis of a panel: its label and ticks, and the space to the next one."""
REACH = 0.25
"""How much of the way to the next place a point may be moved: beside a line of its own colour, more looks like one more place."""
REACH_OF_POINTS = 0.45
"""The same in a panel without a line."""
SIDE_BY_SIDE = "Points of one place stand side by side where they would overlap."


@dataclass(frozen=True, kw_only=True)
class Series:
    """The points of one system and preset in a panel, by what the panel varies: of one study, or the lone ones of all others."""

    label: str
    system: str
    study: tuple[str, ...]
    """Experiment and file; empty for lone points, which nothing joins."""
    variant: int
    points: dict[int, Cell]


def figure(frame: pd.DataFrame, only: str | None = None) -> Figure:
    """A panel for each thing that varies (`only`: that one, in one column), from rows of comparisons and studies of size.

    ValueError where nothing varies, and for rows of several machines.
    """
    kinds = sorted(set(frame["machine_name"]))
    if len(kinds) != 1:
        raise ValueError(f"rows of {len(kinds)} machines ({'; '.join(kinds)}): a line never spans two; pick one")
    rows = unablated(frame).sort_values("started_at", kind="stable")
    cells = cells_of(rows)
    panels = {name: found for name in ([only] if only else SCALES) if (found := panel_cells(cells, SCALES[name]))}
    if not panels:
        raise ValueError(f"{only or 'model size, batch and context'}: the same in all rows; measure a second value first")
    with style.context():
        width = style.COLUMN_IN if len(panels) == 1 else style.PAGE_IN
        drawn = style.new_figure(width, 3.0)
        aside = _panels(drawn, [(SCALES[name], mine) for name, mine in panels.items()], variants(cells))
        told = f"{kinds[0]} (the fastest row of each system at a place; lines join one study)"
        drawn.suptitle(layout.wrapped(told, width), x=0.01, ha="left", fontsize=6.5, color=style.MUTED)
    return layout.noted(drawn, [*aside, *machines.notes(rows)])


def study_figure(frame: pd.DataFrame) -> Figure:
    """The panel of a study of scale, in one column: every cell of it. ValueError for rows that are none."""
    study = study_of(frame)
    if study.scale is None:
        raise ValueError(
            f"{study.name}: a {study.kind}, no study of scale: its rows differ in more than a size; draw it as what it is"
        )
    with style.context():
        drawn = style.new_figure(style.COLUMN_IN, 3.0)
        aside = _panels(drawn, [(study.scale, study.cells)], variants(study.cells))
        told = "\n".join(part for part in (study.subject, study.machine) if part)
        drawn.suptitle(told, x=0.01, ha="left", fontsize=6.5, color=style.MUTED)
    return layout.noted(drawn, [*aside, *machines.notes(frame)])


def _panels(drawn: Figure, panels: list[tuple[Scale, list[Cell]]], looks: dict[Family, int]) -> list[str]:
    """The panels side by side, one legend below them all; the note that points were moved, if some were."""
    handles: dict[str, Line2D] = {}
    notes: list[str] = []
    for axes, (scale, mine) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        found, moved = panel(axes, mine, scale, looks, drawn.get_figwidth() / len(panels) - BESIDE_IN)
        notes = [SIDE_BY_SIDE] if moved else notes
        for handle in found:
            handles.setdefault(str(handle.get_label()), handle)
    series_first = sorted(handles.values(), key=lambda handle: handle.get_color() in (style.ALARM, style.MUTED))
    differing = _differing(panels, looks)
    for handle in series_first:
        handle.set_label(f"{handle.get_label()}{differing.get(str(handle.get_label()), '')}")
    layout.legend_below(drawn, series_first, 2 if len(panels) == 1 else 5)
    return notes


def _differing(panels: list[tuple[Scale, list[Cell]]], looks: dict[Family, int]) -> dict[str, str]:
    """What the legend says of systems some of whose points have losses that left the reference's."""
    found: dict[str, list[bool]] = {}
    for scale, mine in panels:
        for one in series_of(mine, scale, looks):
            found.setdefault(one.label, []).extend(cell.standing.differs for cell in one.points.values() if cell.standing.measured)
    return {
        label: " (numerics differ)" if all(each) else " (numerics differ in part)" for label, each in found.items() if any(each)
    }


def varies(frame: pd.DataFrame) -> bool:
    """Whether there is anything to draw: a size, batch or length with more than one value."""
    cells = cells_of(unablated(frame))
    return any(panel_cells(cells, scale) for scale in SCALES.values())


def panel_cells(cells: list[Cell], scale: Scale) -> list[Cell]:
    """The cells of a panel: those that agree in what it holds, where most values of its scale are; none if that is one value."""
    found: list[tuple[tuple[int, int, int], list[Cell]]] = []
    for order, held in enumerate(scale.held):
        families: dict[Held, list[Cell]] = {}
        for one in cells:
            if scale.value(one) is not None:
                families.setdefault(held(one), []).append(one)
        for family in families.values():
            found.append(((len({scale.value(one) for one in family if one.drawn}), -order, len(family)), family))
    (values, _, _), kept = max(found, key=lambda pair: pair[0], default=((0, 0, 0), []))
    return kept if values > 1 else []


def series_of(cells: list[Cell], scale: Scale, looks: dict[Family, int]) -> list[Series]:
    """Lines in the order of the style; where one was measured more than once at a place, the fastest measurement counts.

    A study that has one place alone is no line: its points stand with those of the other such studies.
    """
    places: dict[tuple[Family, tuple[str, str]], set[int | None]] = {}
    for one in cells:
        places.setdefault((one.family, one.study), set()).add(scale.value(one))
    found: dict[tuple[Family, tuple[str, ...]], Series] = {}
    for one in cells:
        value = scale.value(one)
        assert value is not None
        study: tuple[str, ...] = one.study if len(places[one.family, one.study]) > 1 else ()
        new = Series(label=one.family_name, system=one.standing.system, study=study, variant=looks[one.family], points={})
        mine = found.setdefault((one.family, study), new)
        if stands_for(one, mine.points.get(value)):
            mine.points[value] = one
    order = list(style.SYSTEMS)
    ordered = sorted(found.values(), key=lambda one: (order.index(one.system) if one.system in order else len(order), one.variant))
    return [replace(one, points=dict(sorted(one.points.items()))) for one in ordered]


def height(cell: Cell, scale: Scale) -> tuple[float, float | None, float | None] | None:
    """What is drawn of a cell, in the panel's unit: value and interval; None where there is nothing."""
    drawn = cell.drawn
    if drawn is None:
        return None
    unit = 6 * (cell.num_params or 0) / 1e12 if scale.sizes_differ else 1.0
    ends = [None if end is None else unit * end for end in (drawn.lo, drawn.hi)]
    return unit * drawn.value, ends[0], ends[1]


def panel(axes: Axes, cells: list[Cell], scale: Scale, looks: dict[Family, int], width_in: float) -> tuple[list[Line2D], bool]:
    """Draw one panel whose axis is about this wide; the legend's handles, and whether a point was moved beside another."""
    lines = [part for one in series_of(cells, scale, looks) for part in _parts(one)]
    top = max((max(found[2] or 0, found[0]) for one in cells if (found := height(one, scale))), default=1.0)
    crossed = dict.fromkeys(one.label for one in lines if any(cell.drawn is None for cell in one.points.values()))
    rows = {label: below(row) for row, label in enumerate(crossed)}
    values = sorted({value for one in lines for value in one.points})
    layout.log2_axis(axes, values, lambda value: scale.tick(round(value)), width_in, 1.25)
    axes.set_ylim(0, 1.18 * top)
    if rows:
        make_room(axes, len(rows))
    taken = Taken(axes, width_in, values, REACH if any(one.study for one in lines) else REACH_OF_POINTS)
    drawn = [line for one in lines if (line := _series(axes, one, scale, rows.get(one.label, 0.0), taken))]
    moved = set_apart(axes, (), drawn, taken)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if top > 5 else f"{value:g}"))
    axes.set_xlabel(f"{scale.name}\n({scale.told(cells)})")
    axes.set_ylabel("TFLOPS (6P)" if scale.sizes_differ else "tokens / s")
    axes.set_title(scale.title)
    style.value_grid(axes, "y")
    return [*(Line2D([], [], **(_looks(one) | {"label": one.label})) for one in lines), *_meanings(cells)], moved


def _parts(series: Series) -> list[Series]:
    """A line as it is; lone points one by one."""
    return [series] if series.study else [replace(series, points={value: cell}) for value, cell in series.points.items()]


def _meanings(cells: list[Cell]) -> list[Line2D]:
    """Legend handles of what is no measurement."""
    looks: Any = {"color": style.MUTED, "marker": "o", "markerfacecolor": "white", "linestyle": (0, (2, 2)), "linewidth": 0.7}
    guessed = any(one.predicted is not None for one in cells)
    missing = {one.standing.status: one.standing.status_label for one in cells if one.drawn is None}
    crosses = [
        Line2D([], [], color=style.ALARM, marker=style.CROSSES.get(status, "1"), markersize=4, linestyle="", label=label)
        for status, label in missing.items()
    ]
    return [*([Line2D([], [], label="predicted, not run", **looks)] if guessed else []), *crosses]


def _looks(series: Series) -> dict[str, Any]:
    """Variants below and a little larger: two that coincide are both seen."""
    larger = {"markersize": 5.2, "zorder": 2} if series.variant else {"markersize": 3.8, "zorder": 2.5}
    return style.curve(series.system, series.variant) | larger


def _series(axes: Axes, series: Series, scale: Scale, crossed_at: float, taken: Taken) -> Line | None:
    """One line: measured points joined, predictions joined to the measured point before them, crosses below the axis (`taken`).

    What was drawn at its height; None where nothing was.
    """
    told = [(value, one, found) for value, one in series.points.items() if (found := height(one, scale))]
    measured = [(value, found) for value, one, found in told if one.standing.measured]
    guessed = [(value, found[0]) for value, one, found in told if not one.standing.measured]
    looks = _looks(series)
    lone = {} if series.study else {"linestyle": ""}
    artists: list[Artist] = []
    if measured:
        xs, ys = [value for value, _ in measured], [found[0] for _, found in measured]
        artists += axes.plot(xs, ys, label=series.label, **(looks | lone))
    for value, (middle, lo, hi) in measured:
        if lo is not None and hi is not None:
            ends = [[middle - lo], [hi - middle]]
            whisker = axes.errorbar(
                value, middle, yerr=ends, color=style.INK, elinewidth=0.7, capthick=0.7, capsize=2.6, zorder=1.5
            )
            artists += whisker.get_children()
    if guessed:
        before = [(value, found[0]) for value, found in measured if value < guessed[0][0]][-1:] if series.study else []
        predicted = style.predicted_point(series.system, series.variant) | lone
        xs, ys = zip(*before, *guessed, strict=True)
        artists += axes.plot(xs, ys, label=f"{series.label} predicted", markevery=slice(len(before), None), **predicted)
    for value, one in series.points.items():
        if one.drawn is None:
            label = f"{series.label} {one.standing.status}"
            style.crossed(axes, value, crossed_at, looks | {"label": label}, status=one.standing.status)
            taken.add(value, *crossed_box(crossed_at))
    if not told:
        return None
    heights = {value: found[0] for value, _, found in told}
    reach = {value: (middle if lo is None else lo, middle if hi is None else hi) for value, _, (middle, lo, hi) in told}
    return Line(artists=artists, heights=heights, ends=reach, mark="", half_pt=looks["markersize"] / 2 + 0.5)
