"""The lanes over a recorded step: what each does when; several steps share one axis.

A step comes from a file that `measure.trace=true` leaves, NAME.timeline.json:

    {"measured": {"step_s": 2.53, "intervals": [["compute", "compute forward 3", 0.1, 0.2]]}}

and maybe the same under "predicted". Invariant: what is busy or hidden follows from the intervals
alone, so a measured and a predicted step go through the same lines.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import names
from analysis.figures import style

SUFFIX = ".timeline.json"
LANES: dict[str, str] = names.WORDS["lanes"]
WORK: dict[str, str] = names.WORDS["work"]
FILLS: dict[str, tuple[str, str, str]] = names.WORDS["fills"]
COPIES = ("load weights", "store gradients", "move activations")
BAR = 0.8


@dataclass(frozen=True, kw_only=True)
class Step:
    """One steady step. intervals: lane, work, start_s, end_s."""

    name: str
    step_s: float
    intervals: pd.DataFrame
    predicted: bool = False

    @property
    def lanes(self) -> list[str]:
        """Those that do anything, in the order in which they are drawn."""
        return [lane for lane in LANES if lane in set(self.intervals["lane"])]

    def busy_s(self, lane: str) -> float:
        """Seconds that a lane works."""
        return _united_s(self.intervals[self.intervals["lane"] == lane])

    def hidden_share(self, lane: str) -> float | None:
        """Share of a lane's work during which the device computes; None for the compute lane."""
        lanes, busy_s = self.intervals["lane"], self.busy_s(lane)
        if lane == "compute" or not busy_s:
            return None
        computes = (lanes == "compute") & ~self.intervals["work"].isin(COPIES)
        either_s = _united_s(self.intervals[computes | (lanes == lane)])
        return (busy_s + _united_s(self.intervals[computes]) - either_s) / busy_s


def _united_s(pieces: pd.DataFrame) -> float:
    """Seconds that the union of some intervals lasts."""
    pieces = pieces.sort_values("start_s")
    ended_s = pieces["end_s"].cummax().shift(fill_value=0.0)
    return float((pieces["end_s"] - pieces["start_s"].clip(lower=ended_s)).clip(lower=0.0).sum())


def load(path: Path) -> list[Step]:
    """The measured step of a file and maybe the predicted. Raises ValueError, one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = {"measured": content["measured"], "predicted": content.get("predicted")}
        return [_step(path, kind, plain) for kind, plain in steps.items() if plain is not None]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        remedy = "write one with python -m sweeps.run system=megatrain measure.trace=true"
        raise ValueError(f"{path}: not a timeline ({why}); {remedy}") from None


def _step(path: Path, kind: str, plain: dict[str, Any]) -> Step:
    found = pd.DataFrame(plain["intervals"], columns=["lane", "label", "start_s", "end_s"])
    found = found.astype({"start_s": float, "end_s": float})
    step_s, start_s, end_s = float(plain["step_s"]), found["start_s"], found["end_s"]
    good = (start_s >= 0) & (start_s <= end_s) & (end_s <= step_s * (1 + 1e-6))
    if not len(found) or not good.all() or not step_s > 0:
        raise ValueError(f"{kind}: intervals must lie within the step's {step_s} s")
    work = found["label"].str.rpartition(" ")[0].map(WORK).fillna("bookkeeping")
    name, known = path.name.removesuffix(SUFFIX), found.assign(work=work)
    return Step(name=name, step_s=step_s, intervals=known, predicted=kind == "predicted")


def draw(steps: Sequence[Step]) -> Figure:
    """One panel a step, the longest first: how long each lane works, and how much is hidden."""
    ordered = sorted(steps, key=lambda step: -step.step_s)
    long, short = ordered[0], ordered[-1]
    other = f" and one of {short.name}" if long.name != short.name else ""
    title = f"A recorded step of {long.name}{other}"
    heights = [len(step.lanes) for step in ordered]
    figure = Figure(figsize=(style.PAGE_IN, 1.1 + sum(0.3 + 0.17 * lanes for lanes in heights)))
    panels = figure.subplots(len(ordered), height_ratios=heights, sharex=True, squeeze=False).flat
    for axes, step in zip(panels, ordered, strict=True):
        _panel(axes, step)
    panels[-1].set_xlabel("seconds since the step's embedding began")
    panels[-1].set_xlim(0, 1.2 * ordered[0].step_s)
    shown = {work for step in steps for work in step.intervals["work"]}
    handles = [
        Patch(facecolor=color, edgecolor=ink, hatch=hatch, linewidth=0, label=work)
        for work, (color, hatch, ink) in FILLS.items()
        if work in shown
    ]
    about = "hidden: share of a lane's work during which the device computes"
    style.titled(figure, title, about, legend=handles)
    return figure


def _panel(axes: Axes, step: Step) -> None:
    for at, lane in enumerate(step.lanes):
        place = (at - BAR / 2, BAR)
        axes.broken_barh([(0, step.step_s)], place, facecolor="#eeeeee", linewidth=0)
        here = step.intervals[step.intervals["lane"] == lane]
        for work, (color, hatch, ink) in FILLS.items():
            mine = here[here["work"] == work]
            spans = list(zip(mine["start_s"], mine["end_s"] - mine["start_s"], strict=True))
            look: Any = {"facecolor": color, "edgecolor": ink, "hatch": hatch, "linewidth": 0}
            axes.broken_barh(spans, place, **look)
        hidden = step.hidden_share(lane)
        words = "" if hidden is None else f", {hidden:.0%} hidden"
        words = f"  {step.busy_s(lane):.2f} s{words}"
        axes.text(step.step_s, at, words, va="center", fontsize=6.5)
    kind = "predicted" if step.predicted else "recorded"
    axes.set_title(f"{step.name}, {kind}: {step.step_s:.2f} s a step", fontsize=8)
    axes.set_yticks(range(len(step.lanes)), [LANES[lane] for lane in step.lanes])
    axes.set_ylim(len(step.lanes) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
