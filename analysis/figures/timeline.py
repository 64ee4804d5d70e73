"""The streams over one step: what each lane does when, measured and, below, predicted; several steps on one time axis.

Invariant: a pure function of the timelines. Every interval is drawn where it was; busy seconds and hidden shares come from
`analysis.timeline`, which computes them from the same intervals.

    python -m analysis.figures.timeline outputs/STUDY/traces/CELL-megatrain.timeline.json
    python -m analysis.figures.timeline PAPER FAST --label paper --label fast -o overlap      # overlap.png, overlap.pdf
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import style
from analysis.timeline import LANES, OTHER, SUFFIX, Interval, Step, Timeline, digits, load_all, percent, profile_of, share, study_of
from sweeps.command_line import Parser, mend_streams

BAR = 0.8
"""Height of a bar, in lanes."""
LANE_IN = 0.155
"""Height of a lane, inches."""
TRACK = "#eeeeee"
"""Where a lane is idle."""
COLUMNS_PT = {"busy": 35.0, "of step": 65.0, "hidden": 93.0}
"""What stands beside each lane, and the right edge of each column, points from the axes."""
TITLE_CHARACTERS = 60
"""Longest title that does not reach the columns' names; longer ones are set smaller."""
SPLIT = 1 / 250
"""Share of the time axis from which bars that touch are wide enough for a line between them."""
SMALL = 1 / 500
"""Share of the time axis below which bookkeeping is not drawn, and work that is a side matter of its lane not named."""


def figure(timelines: Sequence[Timeline]) -> Figure:
    """One panel for each measured and predicted step, in the given order, on one axis of seconds."""
    assert timelines, "nothing to draw"
    panels = [panel for one in timelines for panel in panels_of(one)]
    steps = [step for _, step, _ in panels]
    end_s = max(step.step_s for step in steps)
    heights = [len(step.lanes) for step in steps]
    with style.context():
        drawn = style.new_figure(style.PAGE_IN, 0.75 + sum(0.24 + LANE_IN * lanes for lanes in heights))
        column = drawn.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, step, weight) in zip(column, panels, strict=True):
            step_panel(axes, step, end_s)
            axes.set_title(title, fontweight=weight, fontsize=min(8.0, 8.0 * TITLE_CHARACTERS / len(title)))
        for name, right in COLUMNS_PT.items():
            _beside(column[0], 1.0, 7.5, name, right, coordinates="axes fraction", color=style.MUTED)
        meaning = "hidden: share of busy\nwhile compute works"
        _beside(column[-1], 0.0, -17.0, meaning, COLUMNS_PT["hidden"], coordinates="axes fraction", color=style.MUTED)
        column[-1].set_xlabel("seconds since the step's embedding began")
        handles = legend_of(steps, end_s)
        columns = len(handles) if len(handles) < 7 else math.ceil(len(handles) / 2)
        drawn.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2, handletextpad=0.5)
    return drawn


def panels_of(timeline: Timeline) -> list[tuple[str, Step, str]]:
    """(title, step, weight of the title): the measured step and, where there is one, the predicted with its error."""
    measured, predicted, error = timeline.measured, timeline.predicted, timeline.error
    panels = [(f"{timeline.name}, measured: step {digits(measured.step_s, 3)} s", measured, "bold")]
    if predicted is not None and error is not None:
        panels.append((f"{timeline.name}, predicted: step {digits(predicted.step_s, 3)} s ({percent(error)})", predicted, "normal"))
    return panels


def step_panel(axes: Axes, step: Step, end_s: float) -> None:
    """One row of bars a lane; a grey track where it idles; busy seconds and hidden share at the right."""
    for position, lane in enumerate(step.lanes):
        axes.broken_barh([(0, step.step_s)], (position - BAR / 2, BAR), facecolor=TRACK, linewidth=0, label=f"{lane} step")
        mine = [i for i in step.intervals if i.lane == lane and drawn_at_all(i, end_s)]
        for work, fill in style.WORK.items():
            _bars(axes, position, [i for i in mine if i.work == work], fill, label=f"{lane} {work}", end_s=end_s)
        for text, right in zip(told(step, lane), COLUMNS_PT.values(), strict=True):
            _beside(axes, position, 0.0, text, right, coordinates=axes.get_yaxis_transform())
    axes.set_xlim(0, end_s)
    axes.set_ylim(len(step.lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(step.lanes)), [LANES.get(lane, lane) for lane in step.lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))


def told(step: Step, lane: str) -> tuple[str, str, str]:
    """The words beside a lane: busy seconds, their share of the step, the share of them hidden under computation."""
    busy, hidden = step.busy_s(lane), step.hidden_share(lane)
    short = f"{busy:.2f} s" if busy >= 0.0995 else f"{digits(1e3 * busy, 2)} ms"
    return short, share(busy / step.step_s), "—" if hidden is None else share(hidden)


def legend_of(steps: Iterable[Step], end_s: float) -> list[Patch]:
    """One handle for each kind of work that is a lane's main work or can be seen, in the style's order."""
    named: set[str] = set()
    for step in steps:
        for lane in step.lanes:
            seconds: defaultdict[str, float] = defaultdict(float)
            for interval in step.intervals:
                if interval.lane == lane and drawn_at_all(interval, end_s):
                    seconds[interval.work] += interval.end_s - interval.start_s
            named |= {work for work, spent in seconds.items() if spent > SMALL * end_s or spent == max(seconds.values())}
    fills = [fill for work, fill in style.WORK.items() if work in named]
    return [Patch(facecolor=fill.color, edgecolor=fill.ink, hatch=fill.hatch, linewidth=0, label=fill.name) for fill in fills]


def drawn_at_all(interval: Interval, end_s: float) -> bool:
    """Whether it takes time; bookkeeping (clip, check, free, drop): whether it takes enough to be seen."""
    return interval.end_s - interval.start_s > (SMALL * end_s if interval.work == OTHER else 0.0)


def _bars(axes: Axes, position: float, intervals: Sequence[Interval], fill: style.Fill, *, label: str, end_s: float) -> None:
    """One kind of work on one lane; edges of its own colour keep the shortest visible, white lines part what touches."""
    if not intervals:
        return
    spans = [(i.start_s, i.end_s - i.start_s) for i in intervals]
    place = (position - BAR / 2, BAR)
    axes.broken_barh(spans, place, facecolor=fill.color, edgecolor=fill.color, linewidth=0.3, label=label)
    if fill.hatch:
        axes.broken_barh(spans, place, facecolor="none", edgecolor=fill.ink, hatch=fill.hatch, linewidth=0)
    if statistics.median(seconds for _, seconds in spans) > SPLIT * end_s:
        borders = [b.start_s for a, b in itertools.pairwise(intervals) if b.start_s - a.end_s < SPLIT / 4 * end_s]
        axes.vlines(borders, position - BAR / 2, position + BAR / 2, color="white", linewidth=0.4)


def _beside(axes: Axes, height: float, up: float, text: str, right: float, *, coordinates: Any, color: str = style.INK) -> None:
    """A word right of the axes that ends `right` points from them, `up` points above `height`."""
    looks: Any = {"ha": "right", "va": "center_baseline", "fontsize": 6.5, "color": color, "annotation_clip": False}
    axes.annotate(text, (1, height), (right, up), xycoords=coordinates, textcoords="offset points", **looks)


def write(paths: Sequence[Path], folder: Path | None = None) -> list[Path]:
    """Each timeline as NAME.timeline.png and .pdf beside its file, or in `folder`; the paths written.

    Files of one study (STUDY.LABEL.timeline.json, two or more) also make STUDY.timelines, the longest step on top.
    """
    written: list[Path] = []
    for path in paths:
        written += style.save(figure(load_all([path])), (folder or path.parent) / path.stem)
    for study in sorted({study for path in paths if (study := study_of(path))}):
        together = load_all([path for path in paths if study_of(path) == study])
        if len(together) > 1:
            longest_first = sorted(together, key=lambda one: -one.measured.step_s)
            written += style.save(figure(longest_first), (folder or paths[0].parent) / f"{study}.timelines")
    return written


def lines(timeline: Timeline) -> list[str]:
    """The table for the terminal: what each lane is busy, hidden under computation and idle; seconds."""
    given = [("measured", timeline.measured)] + ([("predicted", timeline.predicted)] if timeline.predicted else [])
    told_of = ", ".join(f"{kind} step {step.step_s:.3f} s" for kind, step in given)
    table = [f"{timeline.name}: {told_of}" + (f" ({percent(timeline.error)})" if timeline.error is not None else "")]
    table.append(" " * 17 + "".join(f"{kind:>29}" for kind, _ in given))
    table.append(f"  {'lane':<15}" + "".join(f"{'busy s':>11}{'hidden':>8}{'idle s':>10}" for _ in given))
    for lane in dict.fromkeys(lane for _, step in given for lane in step.lanes):
        cells = []
        for _, step in given:
            hidden = step.hidden_share(lane)
            cells.append(f"{step.busy_s(lane):>11.4f}{'—' if hidden is None else share(hidden):>8}{step.idle_s(lane):>10.4f}")
        table.append(f"  {LANES.get(lane, lane):<15}" + "".join(cells))
    return table


def profile_notes(paths: Sequence[Path]) -> list[str]:
    """One line for each profiler trace that lies beside a timeline."""
    found = [trace for path in paths if (trace := profile_of(path)) != path and trace.exists()]
    return [f"profiler trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)" for trace in found]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m analysis.figures.timeline", description="What each lane does in one step, and what of it is hidden."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help=f"*{SUFFIX} of a cell measured with measure.trace=true")
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help="figure without ending (default: beside the first file)")
    parser.add_argument("--label", action="append", metavar="NAME", help="name of a file in titles; once for each file, in order")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: tables, OUT.png, OUT.pdf; 2 and one line on standard error for bad input."""
    mend_streams()
    options = _parse(arguments)
    files, labels = list(dict.fromkeys(options.files)), options.label or []
    try:
        if labels and len(labels) != len(files):
            raise ValueError(f"--label: got {len(labels)} for {len(files)} files; give one for each, or none")
        timelines = load_all(files, labels)
        default = files[0].with_suffix("") if len(files) == 1 else files[0].with_name("timelines")
        written = style.save(figure(timelines), options.out or default)
        told_lines = [line for one in timelines for line in (*lines(one), "")]
        print(*told_lines, *written, *profile_notes(files), sep="\n", flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
