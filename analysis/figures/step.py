"""The lanes over a recorded step: what each does when; several steps share one axis."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.figures import style
from analysis.timeline import LANES, Step

FILLS: dict[str, tuple[str, str, str]] = {
    "forward": ("#9cc5ea", "", "white"),
    "recomputed forward": ("#9cc5ea", "/////", "#1b4b82"),
    "head and loss": ("#f5dc6b", ".....", "#5d5210"),
    "recompute + backward": ("#1b4b82", "/////", "white"),
    "backward": ("#1b4b82", "", "white"),
    "AdamW": ("#d0632b", "\\\\\\\\\\", "white"),
    "load weights": ("#4fa58c", "", "white"),
    "store gradients": ("#5f4690", "-----", "white"),
    "move activations": ("#e58fb0", "....", "#6b1239"),
    "gradient copy": ("#c9a6cf", "xxxxx", "#5c3566"),
}
"""Work -> colour, hatch and the hatch's colour; in the legend's order."""
BAR = 0.8


def draw(steps: Sequence[Step], title: str) -> Figure:
    """One panel a step, the longest first: how long each lane works, and how much is hidden."""
    ordered = sorted(steps, key=lambda step: -step.step_s)
    heights = [len(step.lanes) for step in ordered]
    figure = Figure(figsize=(style.PAGE_IN, 1.1 + sum(0.3 + 0.17 * lanes for lanes in heights)))
    panels = figure.subplots(len(ordered), height_ratios=heights, sharex=True, squeeze=False).flat
    for axes, step in zip(panels, ordered, strict=True):
        _panel(axes, step)
    panels[-1].set(
        xlabel="seconds since the step's embedding began", xlim=(0, 1.2 * ordered[0].step_s)
    )
    shown = {work for step in steps for work in step.intervals["work"]}
    handles = [
        Patch(facecolor=color, edgecolor=ink, hatch=hatch, linewidth=0, label=work)
        for work, (color, hatch, ink) in FILLS.items()
        if work in shown
    ]
    about = "hidden: share of a lane's work during which the device computes"
    style.titled(figure, title, about, legend=handles)
    return figure


def compare(recorded: Sequence[Step]) -> Figure:
    """Several recorded steps, with how far the longest and the shortest lie apart."""
    ordered = sorted(recorded, key=lambda one: one.step_s)
    short, long = ordered[0], ordered[-1]
    ratio = f"{long.step_s / short.step_s:.1f}x between them"
    return draw(recorded, f"A 7B step of {long.name} and of {short.name}: {ratio}")


def _panel(axes: Axes, step: Step) -> None:
    for position, lane in enumerate(step.lanes):
        axes.broken_barh(
            [(0, step.step_s)], (position - BAR / 2, BAR), facecolor="#eeeeee", linewidth=0
        )
        for work, (color, hatch, ink) in FILLS.items():
            mine = step.intervals[
                (step.intervals["lane"] == lane) & (step.intervals["work"] == work)
            ]
            spans = list(zip(mine["start_s"], mine["end_s"] - mine["start_s"], strict=True))
            place = (position - BAR / 2, BAR)
            axes.broken_barh(spans, place, facecolor=color, edgecolor=color, linewidth=0.3)
            if hatch and spans:
                axes.broken_barh(
                    spans, place, facecolor="none", edgecolor=ink, hatch=hatch, linewidth=0
                )
        hidden = step.hidden_share(lane)
        words = f"{step.busy_s(lane):.2f} s" + ("" if hidden is None else f", {hidden:.0%} hidden")
        style.beside(axes, words, step.step_s, position, fontsize=6.5)
    kind = "predicted" if step.predicted else "recorded"
    axes.set_title(f"{step.name}, {kind}: {step.step_s:.2f} s a step", fontsize=8)
    axes.set_yticks(range(len(step.lanes)), [LANES[lane] for lane in step.lanes])
    axes.set_ylim(len(step.lanes) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
