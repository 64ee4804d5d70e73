"""The paper's throughput, ablation, context and depth redone: what it says, hollow and dotted, beside what was measured, filled.

Invariant: a pure function of the claims (analysis/paper.csv) and the frame. Hardware differs and is named on both sides; a flagged
claim carries a dagger; what ran out of memory is crossed; a line never spans two machines; a panel without measurements says so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import load, style
from analysis.cells import Cell, percent, speed_of, variants
from analysis.effects import Change, setting_changes
from analysis.figures import layout
from analysis.figures.apart import Crosses, Line, Taken, keep_clear, set_apart
from analysis.paper import ATTENTION, Claim, cells_for, cells_in, claims, place_of, tflops

SIZES = {"3B": 3.0, "7B": 7.6, "14B": 14.8, "32B": 32.8}
"""Where a size of the paper stands on the axis, 10⁹ parameters."""
MARGIN = 1.35
"""Room beside the first and the last point of a logarithmic axis."""
Key = tuple[str, str | None, str, tuple[str, str]]
"""A line: system, preset, machine, study."""


def figure(frame: pd.DataFrame) -> Figure:
    """Four panels over the page's width."""
    told, cells = claims(), cells_in(load.latest(frame))
    lines = [one for one in told if one.metric == "tflops"]
    headline, context, depth = ([one for one in lines if one.study == study] for study in ("headline", "context", "depth"))
    headline = [one for one in headline if one.model in SIZES]
    machines = dict.fromkeys(cell.machine for one in (*headline, *context, *depth) for cell in cells_for(one, cells))
    marks = {machine: chr(ord("a") + number) if len(machines) > 1 else "" for number, machine in enumerate(machines)}
    with style.context():
        drawn = style.new_figure(style.PAGE_IN, 5.7)
        panels = drawn.subplots(2, 2)
        line_panel(panels[0, 0], headline, cells, lambda one: SIZES[one.model], "6P", marks)
        _name(panels[0, 0], "Model size, T = 1024", "parameters (10⁹)", "TFLOPS (6P)")
        ablation_panel(panels[0, 1], [one for one in told if one.study == "ablation" and one.metric == "change"], frame)
        line_panel(panels[1, 0], context, cells, lambda one: float(one.seq_len or 0), ATTENTION, marks)
        _name(panels[1, 0], "Context, 7B", "tokens a sequence", f"TFLOPS ({ATTENTION})")
        line_panel(panels[1, 1], depth, cells, lambda one: float(one.num_layers or 0), "6P", marks)
        _name(panels[1, 1], "Depth, hidden 3584, T = 1024", "layers", "TFLOPS (6P)")
        drawn.legend(handles=_legend(panels.flat), loc="outside lower center", ncols=4, columnspacing=1.0)
        here = "; ".join(f"({mark}) {machine}" if mark else machine for machine, mark in marks.items())
        lines_told = [
            f"hollow, dotted: the paper, {headline[0].hardware}; filled: measured, with 95% intervals, a rival's fastest "
            "configuration on each machine; points of one place stand side by side where they would overlap",
            f"here: {here}" if here else "nothing measured yet",
            "† flagged in paper.csv; formulas are those of the measured points, the paper's is not stated or fits in part",
        ]
        wrapped = "\n".join(layout.wrapped(line, style.PAGE_IN) for line in lines_told)
        drawn.suptitle(wrapped, x=0.005, ha="left", fontsize=6.5, color=style.MUTED)
    return drawn


def line_panel(
    axes: Axes,
    told: Sequence[Claim],
    cells: list[Cell],
    place: Callable[[Claim], float],
    formula: str,
    marks: dict[str, str],
) -> None:
    """Claims of each system over `place`, and what was measured for the same places, in TFLOPS under `formula`.

    A line is one system and preset of one study on one machine; its last point and what had no room carry the machine's mark. Of
    what a rival reached at a place on a machine the fastest is drawn. A point by itself that would lie on another stands beside it.
    """
    mine: dict[Key, dict[float, Cell]] = {}
    for one in told:
        for cell in cells_for(one, cells):
            mine.setdefault((cell.standing.system, cell.preset, cell.machine, cell.study), {})[place(one)] = cell
    refused: dict[tuple[str, str | None, float, str], tuple[str, list[str]]] = {}
    for (system, preset, machine, _), points in mine.items():
        for at, cell in points.items():
            if not cell.standing.measured:
                what = cell.standing.status_label
                refused.setdefault((system, preset, at, what), (cell.standing.status, []))[1].append(marks[machine])
    places, width_in = sorted({place(one) for one in told}), style.PAGE_IN / 2 - 0.8
    layout.log2_axis(axes, places, _tick, width_in, MARGIN)
    taken, lines, flagged = Taken(axes, width_in, places), list[Line](), list[tuple[float, float]]()
    crosses = Crosses(axes, taken)
    for system in dict.fromkeys(one.system for one in told):
        flagged += _claims(axes, system, [one for one in told if one.system == system], place, crosses)
    looks = variants(cells)

    def look(system: str, preset: str | None) -> dict[str, Any]:
        label = f"{style.name_of(system)} {preset or ''}".strip()
        return style.curve(system, looks[system, preset]) | {"markersize": 3.8, "label": label}

    best = _best(mine)
    for (system, preset, machine, _), points in mine.items():
        shown = {at: cell for at, cell in points.items() if system == "megatrain" or cell is best[system, machine, at]}
        measured = {at: cell for at, cell in shown.items() if cell.standing.measured}
        lines += [_measured(axes, measured, formula, look(system, preset), marks[machine])] if measured else []
    axes.set_ylim(0, 1.15 * axes.dataLim.ymax)
    keep_clear(axes, [(place(one), one.value) for one in told if one.value is not None], taken)
    for (system, preset, at, told_as), (status, where) in refused.items():  # one cross for all machines
        marker = look(system, preset)
        crosses.add(marker["label"], at, marker, status, f"{told_as} here", ", ".join(filter(None, where)))
    set_apart(axes, flagged, lines, taken)
    if not lines:
        place_of_words: Any = {"transform": axes.transAxes, "ha": "left", "va": "top"}
        axes.text(0.02, 0.98, "not measured here yet", fontsize=6.5, color=style.MUTED, **place_of_words)
    style.value_grid(axes, "y")


def _best(lines: Mapping[Key, Mapping[float, Cell]]) -> dict[tuple[str, str, float], Cell]:
    """(system, machine, place) -> the fastest cell there."""
    best: dict[tuple[str, str, float], Cell] = {}
    for (system, _, machine, _), points in lines.items():
        for at, cell in points.items():
            best[system, machine, at] = max(best.get((system, machine, at), cell), cell, key=speed_of)
    return best


def _tick(value: float) -> str:
    """A place's name, in K where it is a multiple of 1024."""
    return f"{value:g}" if value % 1024 else f"{value / 1024:.0f}K"


def _measured(axes: Axes, points: dict[float, Cell], formula: str, look: dict[str, Any], mark: str) -> Line:
    """One line through measured points, with their intervals."""
    heights = {at: tflops(cell, formula) for at, cell in points.items()}
    artists: list[Artist] = [*axes.plot(list(heights), list(heights.values()), **look)]
    ends = {at: (height, height) for at, height in heights.items()}
    for at, cell in points.items():
        speed = cell.standing.speed
        if speed is not None and speed.lo is not None and speed.hi is not None:
            unit = heights[at] / speed.value
            ends[at] = unit * speed.lo, unit * speed.hi
            reach = [[heights[at] - ends[at][0]], [ends[at][1] - heights[at]]]
            whisker = axes.errorbar(
                at, heights[at], yerr=reach, color=style.INK, elinewidth=0.7, capthick=0.7, capsize=2.6, zorder=1.5
            )
            artists += whisker.get_children()
    return Line(artists=artists, heights=heights, ends=ends, mark=mark)


def _claims(
    axes: Axes, system: str, said: Sequence[Claim], place: Callable[[Claim], float], crosses: Crosses
) -> list[tuple[float, float]]:
    """One dotted line through what the paper says of a system; (place, height) of what is flagged."""
    look = style.claimed_point(system) | {"markersize": 3.8, "label": f"the paper's {style.name_of(system)}"}
    known = [(place(one), one.value, one.flag) for one in said if one.value is not None]
    if known:
        axes.plot([at for at, _, _ in known], [value for _, value, _ in known], **look)
    for one in said:
        if one.oom:
            crosses.add(style.name_of(system), place(one), look, "oom_device", "OOM in the paper")
    return [(at, value) for at, value, flag in known if flag]


def ablation_panel(axes: Axes, told: Sequence[Claim], frame: pd.DataFrame) -> None:
    """Change of throughput when one part is taken away: the paper's above, ours below with its interval."""
    for position, one in enumerate(told):
        assert one.value is not None
        axes.barh(position - 0.2, 100 * one.value, height=0.34, label=f"{one.setting}, paper", **style.claimed_bar("megatrain"))
        flag = "†" if one.flag else ""
        _end(axes, 100 * one.value, position - 0.2, f"{percent(one.value)}{flag}")
        _measured_bar(axes, position + 0.2, one, setting_changes(frame, one.setting)[:1])
    axes.axvline(0, color=style.INK, linewidth=0.6)
    axes.set_yticks(range(len(told)), ["\n".join(textwrap.wrap(one.setting, 16)) for one in told])
    axes.set_ylim(len(told) - 0.45, -0.55)
    low, high = axes.dataLim.intervalx
    axes.set_xlim(min(2.4 * low, -10), max(2.0, 1.3 * high))  # beside the longest bar stands what was measured where
    axes.tick_params(axis="y", length=0)
    axes.set_title("Ablation (the paper's: 14B)")
    axes.set_xlabel("change of throughput, %")
    style.value_grid(axes, "x")


def _measured_bar(axes: Axes, position: float, one: Claim, found: Sequence[Change]) -> None:
    if not found:
        words = "no counterpart here" if "no counterpart" in one.flag else "no pair from one machine here"
        _end(axes, 0.0, position, words, color=style.MUTED)
        return
    gap, cell = found[0].estimate, found[0].cell
    axes.barh(position, 100 * gap.value, height=0.34, label=f"{one.setting}, {cell.model}", **style.bar("megatrain"))
    if gap.lo is not None and gap.hi is not None:
        style.whisker(axes, 100 * gap.value, position, xerr=[[100 * (gap.value - gap.lo)], [100 * (gap.hi - gap.value)]])
    _end(axes, 100 * min(gap.value, gap.lo or 0.0), position, f"{place_of(cell)}: {percent(gap.value)}")


def _end(axes: Axes, x: float, y: float, text: str, color: str = style.INK) -> None:
    place: Any = {"textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(text, (min(x, 0.0), y), (-4, 0), fontsize=6, color=color, **place)


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _legend(panels: Sequence[Axes]) -> list[Line2D]:
    """One handle for each line, and one for each way to have no number."""
    found: dict[str, Line2D] = {}
    seen = [line for axes in panels for line in axes.get_lines()]
    for line in sorted(seen, key=lambda line: line.get_linestyle() == "None"):  # a line before a lone marker of its name
        label = str(line.get_label())
        if not label.startswith("_"):
            found.setdefault(label, line)
    order = {str(line.get_label()): place for place, line in reversed(list(enumerate(seen)))}
    return sorted(found.values(), key=lambda line: (line.get_color() == style.ALARM, order[str(line.get_label())]))
