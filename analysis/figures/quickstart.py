"""The quickstart figure: throughput, peak memory and loss curves of every system in one group of rows.

Invariant: a pure function of the frame. A cell that did not run keeps its place and carries its status; a plan is drawn as a
thin marker beside what was observed and never as a bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from analysis import machines, style
from analysis.compare import Comparison, compare
from analysis.figures import layout
from analysis.scales import params_text
from analysis.standing import Standing
from analysis.stats import Estimate
from analysis.style import look
from sweeps.result import LOSS_TOLERANCE

CURVE_IN = 0.12
"""Height that each curve after the third adds to a figure that has two panels of losses: room for the legend."""
BAR = 0.62
"""Height of a bar, in rows."""
LONG = 18
"""Most characters of the base of ratios that fit behind the words before it; a longer one has a line of its own."""


def figure(frame: pd.DataFrame) -> Figure:
    """Three panels from the rows of one group (`load.groups`): throughput, peak memory, losses with their difference."""
    comparison = compare(frame)
    with style.context():
        rows, curves = len(comparison.standings), len([one for one in comparison.standings if one.losses])
        beside = CURVE_IN * max(0, curves - 3) if comparison.reference is not None else 0.0
        drawn = style.new_figure(style.PAGE_IN, max(2.5, 1.1 + layout.row_in(comparison.standings, 0.3) * rows) + beside)
        grid = drawn.add_gridspec(2, 3, width_ratios=[1.12, 1.0, 1.18], height_ratios=[2.1, 1.0])
        speed = drawn.add_subplot(grid[:, 0])
        memory = drawn.add_subplot(grid[:, 1], sharey=speed)
        throughput_panel(speed, comparison)
        memory_panel(memory, comparison)
        loss = drawn.add_subplot(grid[:, 2] if comparison.reference is None else grid[0, 2])
        loss_panel(loss, comparison)
        if comparison.reference is not None:
            difference_panel(drawn.add_subplot(grid[1, 2], sharex=loss), comparison, comparison.reference)
            loss.tick_params(labelbottom=False)
            loss.set_xlabel("")
        drawn.suptitle(f"{heading(frame)}, {frame.iloc[0]['machine_name']}", x=0.005, ha="left", fontsize=7, color=style.MUTED)
        layout.noted(drawn, machines.notes(frame))
        place_legend(loss)
    return drawn


def place_legend(axes: Axes) -> None:
    """Move the legend to the first corner where it covers neither a curve nor a word; where there is none, make room first.

    Room is a taller value axis, as little of it as clears a corner: above the curves, or below them down to zero.
    """
    legend, drawn_on = axes.get_legend(), axes.get_figure(root=True)
    if legend is None:
        return
    assert drawn_on is not None
    low, high = axes.get_ylim()
    drawn_on.draw_without_rendering()  # lays the panels out: only then is it known where a corner is
    for growth in (0.1 * tenth for tenth in range(31)):
        room = growth * (high - low)
        above, below = (low, high + room), (max(low - room, min(low, 0.0)), high)
        corners: dict[Any, tuple[float, float]] = {
            "upper right": above,
            "lower left": below,
            "upper left": above,
            "lower right": below,
        }
        for corner, limits in corners.items():
            axes.set_ylim(limits)
            legend.set_loc(corner)
            if covered(axes):
                continue
            drawn_on.draw_without_rendering()  # other ticks may have moved the panel
            if not covered(axes):
                return
    axes.set_ylim(low, high)
    legend.set_loc("best")


def covered(axes: Axes) -> bool:
    """Whether the legend, with a little air around it, lies over a line, a marker or a word of these (laid out) axes."""
    legend, drawn_on = axes.get_legend(), axes.get_figure(root=True)
    assert legend is not None
    assert drawn_on is not None
    air = 2.5 / 72 * drawn_on.dpi
    box = legend.get_window_extent().padded(air)
    words = [text.get_window_extent() for text in axes.texts]
    if any(box.overlaps(word) for word in words):
        return True
    along = np.linspace(0.0, 1.0, 50)[:, None, None]
    for line in axes.lines:
        points = axes.transData.transform(np.asarray(line.get_xydata(), dtype=np.float64))
        dense = np.concatenate([points, (points[:-1] + along * (points[1:] - points[:-1])).reshape(-1, 2)])
        if bool(((dense > box.min) & (dense < box.max)).all(axis=1).any()):  # a NaN is never inside
            return True
    return False


def heading(frame: pd.DataFrame) -> str:
    """Model, parameters and batch in one line; of several their range."""
    models, sizes = list(dict.fromkeys(frame["model"])), sorted({int(size) for size in frame["size"].dropna()})
    name = str(models[0]) if len(models) == 1 else f"{len(models)} models"
    told = " to ".join(params_text(size) for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]))
    shape = [
        " to ".join(dict.fromkeys(str(end) for end in (frame[key].min(), frame[key].max()))) for key in ("batch_size", "seq_len")
    ]
    return f"{name}{f' ({told} parameters)' if told else ''}, batch {shape[0]} × {shape[1]} tokens"


def throughput_panel(axes: Axes, comparison: Comparison) -> None:
    """Horizontal bars with the interval of the windows; the ratio to ZeRO-3 at the end of each bar."""
    standings = comparison.standings
    _rows(axes, standings)
    top = max((one.speed.hi or one.speed.value for one in standings if one.measured and one.speed), default=1.0)
    axes.set_xlim(0, top * (1.5 if any(one.differs for one in standings) else 1.32))
    for position, one in enumerate(standings):
        if not one.measured or one.speed is None:
            _status(axes, position, one.status_label)
            continue
        axes.barh(position, one.speed.value, height=BAR, label=one.label, **style.bar(one.system, one.variant))
        if one.speed.lo is not None and one.speed.hi is not None:
            ends = [[one.speed.value - one.speed.lo], [one.speed.hi - one.speed.value]]
            for color, width in (("white", 1.8), (style.INK, 0.8)):  # a white halo first: the interval stays visible on dark bars
                whisker: Any = {"elinewidth": width, "capthick": width, "capsize": 1.2 + width}
                axes.errorbar(one.speed.value, position, xerr=ends, color=color, **whisker)
        weight = "bold" if one.best else "normal"
        end = (one.speed.hi or one.speed.value, position)
        text = _ratio_text(one.ratio, one.speed)
        axes.annotate(text, end, (4, 4 if one.differs else 0), textcoords="offset points", va="center", weight=weight)
        if one.differs:
            axes.annotate("numerics differ", end, (4, -4), textcoords="offset points", va="center", fontsize=6, color=style.ALARM)
    axes.set_title("Throughput")
    unit = layout.speed_axis(standings)
    base = "" if comparison.baseline is None else f"× {layout.name(comparison.baseline.label)}"
    apart = "\n" if len(base) > LONG else " "  # or the words would reach below the next panel
    axes.set_xlabel(f"{unit}\nat the bars:{apart}{base}" if base else unit)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if top > 5 else f"{value:g}"))
    style.value_grid(axes, "x")


def memory_panel(axes: Axes, comparison: Comparison) -> None:
    """Observed peaks, device above host, in decimal GB; the plan as a thin line beside each."""
    standings = comparison.standings
    drawn_on = axes.get_figure(root=True)
    assert drawn_on is not None
    with_device = comparison.on_gpu or any(one.device_bytes for one in standings)
    if not comparison.on_gpu:  # a small model's plan is lost in what torch itself takes, and would look like a bad forecast
        standings = [replace(one, plan_host_bytes=None) if one.measured else one for one in standings]
    _rows(axes, standings)
    axes.tick_params(labelleft=False)
    height = BAR / 2 if with_device else BAR
    for position, one in enumerate(standings):
        if with_device:
            _memory_bar(axes, position - height / 2, height, one, one.device_bytes, one.plan_device_bytes, device=True)
        _memory_bar(axes, position + (height / 2 if with_device else 0), height, one, one.host_bytes, one.plan_host_bytes)
        if one.device_bytes is None and one.host_bytes is None:
            planned = one.plan_device_bytes is not None or one.plan_host_bytes is not None
            _status(axes, position, "" if planned else "not measured" if one.measured else one.status_label)
    peaks = [count for one in standings for count in _all_bytes(one, with_device)]
    axes.set_xlim(0, 1.12 * max(peaks, default=10**9) / 1e9)
    axes.set_title("Peak memory" if with_device else "Peak host memory")
    axes.set_xlabel("GB (10⁹ bytes)")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    style.value_grid(axes, "x")
    handles: list[Patch | Line2D] = [Patch(facecolor="#d0d0d0", label="host")]
    if with_device:
        handles.insert(0, Patch(facecolor="#555555", label="device"))
    if any(one.plan_device_bytes is not None or one.plan_host_bytes is not None for one in standings):
        handles.append(Line2D([], [], color=style.ALARM, marker="|", linestyle="", markersize=6, label="plan"))
    below = axes.transAxes + ScaledTranslation(0, -29 / 72, drawn_on.dpi_scale_trans)
    place: Any = {"loc": "upper left", "bbox_to_anchor": (-0.02, 0), "bbox_transform": below, "borderaxespad": 0}
    axes.legend(handles=handles, ncols=3, columnspacing=1.0, handlelength=1.4, **place)


def loss_panel(axes: Axes, comparison: Comparison) -> None:
    """Loss of every step, warm-up included, every system on one axis; earlier lines are wider so that all stay visible."""
    drawn = [one for one in comparison.standings if one.losses]
    for order, one in enumerate(drawn):
        steps = range(1, len(one.losses) + 1)
        width = 2.2 - 1.4 * order / max(len(drawn) - 1, 1)
        axes.plot(steps, one.losses, label=layout.name(one.label, layout.CURVE), linewidth=width, **_curve(one, order))
        finite = [step for step, loss in zip(steps, one.losses, strict=True) if math.isfinite(loss)]
        if not one.measured and finite:
            _stopped(axes, finite[-1], one)
    axes.set_title("Training loss")
    axes.set_ylabel("nats / token")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    style.value_grid(axes, "y")
    if drawn:
        legend = axes.legend(
            loc="upper right", fontsize=6, handlelength=1.7, labelspacing=0.05, borderpad=0.1, borderaxespad=0.3, handletextpad=0.4
        )
        legend.set_frame_on(True)
        legend.get_frame().set(facecolor="white", alpha=0.85, linewidth=0)
        for line in legend.get_lines():
            line.set_linewidth(1.2)


def difference_panel(axes: Axes, comparison: Comparison, reference: Standing) -> None:
    """Loss minus the reference's, the tolerance as a band; logarithmic beyond the band where a system leaves it far behind."""
    largest, lowest = 0.0, 0.0
    for order, one in enumerate(comparison.standings):
        if not one.losses or one is reference:
            continue
        shared = min(len(one.losses), len(reference.losses))
        gap = np.asarray(one.losses[:shared]) - np.asarray(reference.losses[:shared])
        finite = gap[np.isfinite(gap)].tolist()
        largest, lowest = max([largest, *map(abs, finite)]), min([lowest, *finite])
        axes.plot(range(1, shared + 1), gap, label=one.label, linewidth=1.0, **_curve(one, order))
    axes.axhspan(-LOSS_TOLERANCE, LOSS_TOLERANCE, color="#eeeeee", zorder=0, linewidth=0)
    axes.axhline(0, color=style.INK, linewidth=0.6, zorder=1)
    if largest > 3 * LOSS_TOLERANCE:
        top = 10 ** math.ceil(math.log10(largest))
        low = -top if lowest < -3 * LOSS_TOLERANCE else -LOSS_TOLERANCE
        axes.set_yscale("symlog", linthresh=LOSS_TOLERANCE, linscale=1.0)
        axes.set_ylim(1.6 * low, 1.6 * top)
        decades = [10.0**power for power in range(math.ceil(math.log10(2 * LOSS_TOLERANCE)), round(math.log10(top)) + 1)]
        decades = [decade for decade in decades if decade > 10 * LOSS_TOLERANCE] or decades[-1:]  # clear of the band's edge
        decades = decades[:: -math.ceil(len(decades) / (1 if low == -top else 2))]  # the largest, and one between
        axes.set_yticks(
            [tick for tick in (*(-one for one in decades), -LOSS_TOLERANCE, 0, LOSS_TOLERANCE, *decades) if tick >= low]
        )
    else:
        top = max(1.25 * LOSS_TOLERANCE, 1.15 * largest)
        axes.set_ylim(-top, top)
        axes.set_yticks([-LOSS_TOLERANCE, 0, LOSS_TOLERANCE])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(f"loss − ref.\n(log > {LOSS_TOLERANCE:g})" if largest > 3 * LOSS_TOLERANCE else "loss − ref.")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))


def _rows(axes: Axes, standings: Sequence[Standing]) -> None:
    axes.set_yticks(range(len(standings)), [layout.name(one.label) for one in standings])
    axes.set_ylim(len(standings) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)


def _status(axes: Axes, position: float, text: str) -> None:
    """A cross at the axis and the status in words, where the bar would have been; no words where plan markers stand there."""
    axes.plot(0, position, marker="x", color=style.ALARM, markersize=4, clip_on=False, linestyle="", zorder=5)
    backed = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    if text:
        place = (0.0, position)
        axes.annotate(text, place, (6, 0), textcoords="offset points", va="center", color=style.ALARM, bbox=backed, zorder=4)


def _stopped(axes: Axes, step: int, standing: Standing) -> None:
    """A cross at the last finite loss of a run that did not finish, with its status."""
    place = (step, standing.losses[step - 1])
    axes.plot(*place, marker="x", color=style.ALARM, markersize=5, linestyle="", zorder=6)
    axes.annotate(standing.status_label, place, (4, 5), textcoords="offset points", fontsize=6, color=style.ALARM)


def _memory_bar(
    axes: Axes, centre: float, height: float, standing: Standing, observed: int | None, plan: int | None, *, device: bool = False
) -> None:
    looks = style.bar(standing.system, standing.variant)
    if not device:
        looks |= {"hatch": "", "facecolor": style.tint(look(standing.system, standing.variant).color)}
    if observed is not None:
        label = f"{standing.label} {'device' if device else 'host'}"
        axes.barh(centre, observed / 1e9, height=height, label=label, **looks)
    if plan is not None:
        ends = (centre - 0.5 * height, centre + 0.5 * height)
        axes.vlines(plan / 1e9, *ends, color=style.ALARM, linewidth=1.2, zorder=6, label="plan")


def _all_bytes(standing: Standing, with_device: bool) -> list[int]:
    counts = [standing.host_bytes, standing.plan_host_bytes]
    if with_device:
        counts += [standing.device_bytes, standing.plan_device_bytes]
    return [count for count in counts if count is not None]


def _curve(standing: Standing, order: int) -> dict[str, Any]:
    """Marker every so many steps, staggered, so that curves that coincide can still be told apart."""
    every = max(1, len(standing.losses) // 6)
    return style.curve(standing.system, standing.variant) | {"markevery": (order * every // 5 % every, every)}


def _ratio_text(ratio: Estimate | None, speed: Estimate) -> str:
    return f"{ratio.value:.2f}×" if ratio is not None else f"{speed.value:,.0f}"
