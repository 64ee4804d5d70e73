"""The paper's throughput, ablation, context and depth redone: what it says, hollow and dotted, beside what was measured, filled.

Invariant: a pure function of the claims (analysis/paper.csv) and the frame. Hardware differs and is named on both sides; a flagged
claim carries a dagger; what ran out of memory is crossed; a panel without measurements says so.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis import style
from analysis.cells import Cell, percent, variants
from analysis.effects import Change, setting_change
from analysis.paper import ATTENTION, Claim, cells_for, cells_in, claims, tflops
from analysis.studies import Study, studies

SIZES = {"3B": 3.0, "7B": 7.6, "14B": 14.8, "32B": 32.8}
"""Where a size of the paper stands on the axis, 10⁹ parameters."""
MARGIN = 1.35
"""Room beside the first and the last point of a logarithmic axis."""


def figure(frame: pd.DataFrame) -> Figure:
    """Four panels over the page's width."""
    told, cells, groups = claims(), cells_in(frame), studies(frame)
    lines = [one for one in told if one.metric == "tflops"]
    with style.context():
        drawn = style.new_figure(style.PAGE_IN, 5.0)
        panels = drawn.subplots(2, 2)
        headline = [one for one in lines if one.study == "headline" and one.model in SIZES]
        line_panel(panels[0, 0], headline, cells, lambda one: SIZES[one.model], "6P")
        _name(panels[0, 0], "Model size, T = 1024", "parameters (10⁹)", "TFLOPS (6P)")
        ablation_panel(panels[0, 1], [one for one in told if one.study == "ablation" and one.metric == "change"], groups)
        context = [one for one in lines if one.study == "context"]
        line_panel(panels[1, 0], context, cells, lambda one: float(one.seq_len or 0), ATTENTION)
        _name(panels[1, 0], "Context, 7B", "tokens a sequence", f"TFLOPS ({ATTENTION})")
        depth = [one for one in lines if one.study == "depth"]
        line_panel(panels[1, 1], depth, cells, lambda one: float(one.num_layers or 0), "6P")
        _name(panels[1, 1], "Depth, hidden 3584, T = 1024", "layers", "TFLOPS (6P)")
        drawn.legend(handles=_legend(panels.flat), loc="outside lower center", ncols=5, columnspacing=1.0)
        machines = "; ".join(dict.fromkeys(one.machine for one in cells if one.standing.measured)) or "nothing yet"
        lines_told = f"hollow, dotted: the paper, {headline[0].hardware}; filled: measured, {machines}"
        lines_told += (
            "\n† flagged in paper.csv; formulas are those of the measured points, the paper's is not stated or fits in part"
        )
        drawn.suptitle(lines_told, x=0.005, ha="left", fontsize=6.5, color=style.MUTED)
    return drawn


def line_panel(axes: Axes, told: Sequence[Claim], cells: list[Cell], place: Callable[[Claim], float], formula: str) -> None:
    """Claims of each system over `place`, and what was measured for the same places, in TFLOPS under `formula`."""
    mine: dict[tuple[str, str | None], dict[float, Cell]] = {}
    for one in told:
        for cell in cells_for(one, cells):
            mine.setdefault((cell.standing.system, cell.preset), {})[place(one)] = cell
    missing = 0
    for system in dict.fromkeys(one.system for one in told):
        said = [one for one in told if one.system == system]
        _claims(axes, system, said, place, 0.04 + 0.06 * missing)
        missing += any(one.oom for one in said)
    looks = variants(cells)
    for (system, preset), points in mine.items():
        seen = {at: cell for at, cell in points.items() if cell.standing.measured}
        label = f"{style.name_of(system)} {preset or ''}".strip()
        if seen:
            heights = [tflops(cell, formula) for cell in seen.values()]
            axes.plot(list(seen), heights, label=label, **(style.curve(system, looks[system, preset]) | {"markersize": 3.8}))
    places = sorted({place(one) for one in told})
    axes.set_xscale("log", base=2)
    axes.set_xlim(places[0] / MARGIN, places[-1] * MARGIN)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_ticks(places))
    axes.set_ylim(0, 1.15 * axes.dataLim.ymax)
    if not any(cell.standing.measured for points in mine.values() for cell in points.values()):
        place_of_words: Any = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        axes.text(0.98, 0.98, "not measured here yet", fontsize=6.5, color=style.MUTED, **place_of_words)
    style.value_grid(axes, "y")


def _ticks(places: Sequence[float]) -> FuncFormatter:
    """Names of the places, in K where they are multiples of 1024; of places too close together only the last."""
    apart = math.log2(places[-1] / places[0] * MARGIN**2) / 8
    close = {one for one, after in itertools.pairwise(places) if math.log2(after / one) < apart}
    return FuncFormatter(lambda value, _: "" if value in close else f"{value:g}" if value % 1024 else f"{value / 1024:.0f}K")


def _claims(axes: Axes, system: str, said: Sequence[Claim], place: Callable[[Claim], float], crossed_at: float) -> None:
    looks = style.claimed_point(system) | {"markersize": 3.8}
    known = [one for one in said if one.value is not None]
    if known:
        name = f"the paper's {style.name_of(system)}"
        axes.plot([place(one) for one in known], [one.value or 0.0 for one in known], label=name, **looks)
    for one in known:
        if one.flag:
            axes.annotate("†", (place(one), one.value or 0.0), (0, 3), textcoords="offset points", ha="center", fontsize=6.5)
    for one in said:
        if one.oom:
            style.crossed(
                axes, place(one), crossed_at, looks | {"label": f"the paper's {style.name_of(system)}"}, status="oom_device"
            )


def ablation_panel(axes: Axes, told: Sequence[Claim], groups: Sequence[Study]) -> None:
    """Change of throughput when one part is taken away: the paper's above, ours below with its interval."""
    for position, one in enumerate(told):
        assert one.value is not None
        axes.barh(position - 0.2, 100 * one.value, height=0.34, label=f"{one.setting}, paper", **style.claimed_bar("megatrain"))
        flag = "†" if one.flag else ""
        _end(axes, 100 * one.value, position - 0.2, f"{percent(one.value)}{flag}")
        found = setting_change(groups, one.setting)
        _measured_bar(axes, position + 0.2, one.setting, found)
    axes.axvline(0, color=style.INK, linewidth=0.6)
    axes.set_yticks(range(len(told)), ["\n".join(textwrap.wrap(one.setting, 16)) for one in told])
    axes.set_ylim(len(told) - 0.45, -0.55)
    low, high = axes.dataLim.intervalx
    axes.set_xlim(min(1.8 * low, -10), max(2.0, 1.3 * high))
    axes.tick_params(axis="y", length=0)
    axes.set_title("Ablation (the paper's: 14B)")
    axes.set_xlabel("change of throughput, %")
    style.value_grid(axes, "x")


def _measured_bar(axes: Axes, position: float, setting: str, found: Change | None) -> None:
    if found is None:
        _end(axes, 0.0, position, "not measured here", color=style.MUTED)
        return
    gap = found.estimate
    axes.barh(position, 100 * gap.value, height=0.34, label=f"{setting}, {found.cell.model}", **style.bar("megatrain"))
    if gap.lo is not None and gap.hi is not None:
        style.whisker(axes, 100 * gap.value, position, xerr=[[100 * (gap.value - gap.lo)], [100 * (gap.hi - gap.value)]])
    _end(axes, 100 * min(gap.value, gap.lo or 0.0), position, f"{found.cell.model} {percent(gap.value)}")


def _end(axes: Axes, x: float, y: float, text: str, color: str = style.INK) -> None:
    place: Any = {"textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(text, (min(x, 0.0), y), (-4, 0), fontsize=6, color=color, **place)


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _legend(panels: Sequence[Axes]) -> list[Line2D]:
    """One handle for each line, and one for what ran out of memory."""
    found: dict[str, Line2D] = {}
    for axes in panels:
        for line in axes.get_lines():
            label = str(line.get_label())
            if not label.startswith("_"):
                found.setdefault(label, line)
    crossed = Line2D([], [], color=style.ALARM, marker="x", markersize=4, linestyle="", label="OOM in the paper")
    return [*found.values(), crossed]
