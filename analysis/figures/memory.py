"""Memory by kind: what was observed above what was planned, device beside host, for every system of a group.

Invariant: a pure function of the frame. Observed peaks are one bar in the system's colour (no observer can tell kinds apart);
planned bytes are stacked by kind, and are drawn of cells that were refused too, with the machine's own limit as a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import style
from analysis.compare import compare
from analysis.figures import layout
from analysis.figures.quickstart import heading
from analysis.standing import Standing

OBSERVED, PLANNED = 0.26, 0.4
"""Heights of the two bars of a system, in rows."""
PLACES = ("device", "host")


def figure(frame: pd.DataFrame) -> Figure:
    """Device (on a GPU) and host panel from the rows of one group (`load.groups`); GB are decimal."""
    comparison = compare(frame)
    plans = [_plan_of(one, comparison.on_gpu) for one in comparison.standings]
    places = PLACES if comparison.on_gpu else PLACES[1:]
    with style.context():
        standings = comparison.standings
        height_in = 1.25 + layout.row_in(standings, 0.36) * len(standings)
        drawn = style.new_figure(style.PAGE_IN if comparison.on_gpu else style.COLUMN_IN, height_in)
        panels = drawn.subplots(1, len(places), sharey=True, squeeze=False)[0]
        for axes, place in zip(panels, places, strict=True):
            panel(axes, standings, [plan.get(place, {}) for plan in plans], place, _limit(frame, place))
        panels[0].set_yticks(range(len(standings)), [layout.name(one.label) for one in standings])
        panels[0].set_ylim(len(standings) - 0.45, -0.6)
        if any(any(plan.values()) for plan in plans):
            drawn.legend(handles=_legend(plans), loc="outside lower center", ncols=6 if comparison.on_gpu else 3, columnspacing=1.2)
        title = heading(frame) if comparison.on_gpu else str(frame.iloc[0]["model"])
        drawn.suptitle(f"{title}, {frame.iloc[0]['machine_name']}" if comparison.on_gpu else title, **SUBTITLE)
    return drawn


SUBTITLE: Any = {"x": 0.005, "ha": "left", "fontsize": 7, "color": style.MUTED}


def panel(axes: Axes, standings: Sequence[Standing], plans: Sequence[dict[str, int]], place: str, limit: int | None) -> None:
    """One place: observed peak, plan by kind, status of what was not measured, the machine's limit where anything comes near it."""
    ends = [0.0]
    for position, (one, plan) in enumerate(zip(standings, plans, strict=True)):
        seen = (one.device_bytes if place == "device" else one.host_bytes) if one.measured else None
        if seen is not None:
            looks = style.bar(one.system, one.variant)
            axes.barh(position - PLANNED / 2, seen / 1e9, height=OBSERVED, label=f"{one.label} observed", **looks)
            axes.annotate(f"{seen / 1e9:.1f}", (seen / 1e9, position - PLANNED / 2), (3, 0), **BESIDE)
        _stack(axes, position + OBSERVED / 2, plan, one.label)
        planned = sum(plan.values()) / 1e9
        if not one.measured:
            style.cross(axes, 0, position - PLANNED / 2)
            axes.annotate(one.status_label, (0, position - PLANNED / 2), (6, 0), **(BESIDE | {"color": style.ALARM}))
        if plan:
            axes.annotate(f"{planned:.1f}", (planned, position + OBSERVED / 2), (3, 0), **(BESIDE | {"color": style.MUTED}))
        ends += [planned, (seen or 0) / 1e9]
    if limit is not None and limit / 1e9 < 2 * max(ends):
        axes.axvline(limit / 1e9, color=style.INK, linewidth=0.8, linestyle=(0, (4, 2)), label="limit")
        top = axes.get_xaxis_transform()
        axes.text(limit / 1e9, 1.0, f"has {limit / 1e9:.0f}", transform=top, ha="center", va="bottom", fontsize=6)
        ends.append(limit / 1e9)
    axes.set_xlim(0, 1.14 * (max(ends) or 1.0))
    axes.set_title(f"{place.capitalize()}, observed{' above plan' if any(plans) else ''}", pad=11)
    axes.set_xlabel("peak, GB (10⁹ bytes)")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    style.value_grid(axes, "x")


BESIDE: Any = {
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 6,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}
"""A number at the end of a bar, over the limit's line where they meet."""


def kinds(plan: dict[str, int]) -> dict[str, int]:
    """Planned bytes by the kinds of the style, in its order; kinds that it does not name are other; none that is empty."""
    summed = dict.fromkeys(style.KINDS, 0)
    for kind, count in plan.items():
        summed[kind if kind in summed else "other"] += count
    return {kind: count for kind, count in summed.items() if count}


def _stack(axes: Axes, centre: float, plan: dict[str, int], label: str) -> None:
    left = 0.0
    for kind, count in kinds(plan).items():
        fill = style.KINDS[kind]
        looks: Any = {"facecolor": fill.color, "edgecolor": fill.ink, "hatch": fill.hatch, "linewidth": 0}
        axes.barh(centre, count / 1e9, left=left, height=PLANNED, label=f"{label} {kind}", **looks)
        left += count / 1e9


def _plan_of(one: Standing, on_gpu: bool) -> dict[str, dict[str, int]]:
    """{"device": {kind: bytes}, "host": ...}; without a device everything is on the host, and a measured plan is left out: of
    a small model it is lost in what torch itself takes."""
    split = {place: {kind: int(count) for kind, count in (one.plan.get(place) or {}).items()} for place in PLACES}
    if on_gpu:
        return split
    if one.measured:
        return {}
    device, host = split["device"], split["host"]
    return {"host": {kind: device.get(kind, 0) + host.get(kind, 0) for kind in {**device, **host}}}


def _limit(frame: pd.DataFrame, place: str) -> int | None:
    found = [machine.get(f"{place}_bytes") for machine in frame["machine"]]
    return next((int(count) for count in found if count), None)


def _legend(plans: Sequence[dict[str, dict[str, int]]]) -> list[Patch]:
    found = {kind for plan in plans for place in plan.values() for kind in kinds(place)}
    shown = [fill for kind, fill in style.KINDS.items() if kind in found]
    return [Patch(facecolor=fill.color, edgecolor=fill.ink, hatch=fill.hatch, linewidth=0, label=fill.name) for fill in shown]
