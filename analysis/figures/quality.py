"""Whether systems learn the same: held-out loss against tokens and hours, and what other masters
lose. One message a panel."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import answers, names, tables
from analysis.figures import style
from analysis.studies import Study

MEANS = 20
"""The gap is averaged over this part of all steps."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (5, 1, 1, 1)))
POINTS = ["step", "tokens", "seconds", "loss"]


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run."""
    shown = lines[lines["tokens_per_s"].notna()]
    looks = [
        {"color": names.color(line["family"]), "linestyle": DASHES[at % 4], "marker": ""}
        | {
            "linewidth": 1.2 + 0.4 * max(0, 4 - at),
            "label": label,
        }  # equal curves show, all of them
        for at, (label, line) in enumerate(zip(tables.labels(shown), _each(shown), strict=True))
    ]
    figure = Figure(figsize=(style.PAGE_IN, 3.2))
    tokens, hours, gap = figure.subplots(1, 3)
    for line, look in zip(_each(shown), looks, strict=True):
        seen = pd.DataFrame(line["heldout"], columns=POINTS)
        tokens.plot(seen["tokens"] / 1e6, seen["loss"], **look)
        hours.plot(seen["seconds"] / 3600, seen["loss"], **look)
    tokens.set(xlabel="million tokens", ylabel="held-out loss (nats)")
    hours.set(xlabel="hours of training")
    _masters(gap, shown, looks)
    gap.set(xlabel="step", ylabel="loss − the split master's")
    for axes, message in zip((tokens, hours, gap), _messages(shown), strict=True):
        axes.set_title(message, fontsize=7.5)
        axes.xaxis.set_major_locator(MaxNLocator(3))
    about = f"{names.setup(lines)}; LoRA trains another function"
    handles = [Line2D([], [], **look) for look in looks]
    title = answers.answer(study, lines).title
    style.titled(figure, title, about, legend=handles, columns=4)
    return figure


def _each(lines: pd.DataFrame) -> list[pd.Series]:
    return [line for _, line in lines.iterrows()]


def _masters(axes: Axes, shown: pd.DataFrame, looks: list[dict[str, Any]]) -> None:
    """Every step of the other masters, and a moving mean."""
    by_place = dict(zip(shown.index, looks, strict=True))
    for _, line, gaps in answers.master_gaps(shown):
        look, steps = by_place[line.name], range(1, len(gaps) + 1)
        mean = pd.Series(gaps).rolling(max(1, len(gaps) // MEANS), min_periods=1).mean()
        axes.plot(steps, gaps, color=look["color"], linewidth=0.5, alpha=0.4, marker="")
        axes.plot(steps, mean, **look | {"linewidth": 1.6})
    axes.axhline(0.0, color=style.MUTED, linewidth=0.8, zorder=1)


def _messages(shown: pd.DataFrame) -> tuple[str, str, str]:
    """What each panel says, as far as rows tell."""
    told = shown[shown["heldout"].map(bool)]
    ends = pd.DataFrame([points[-1] for points in told["heldout"]], told.index, POINTS)
    full, adapters = ends[answers.full(told)], ends[~answers.full(told)]
    higher, first, lost = "On the same text", "", ""
    if len(full) and len(adapters):
        higher = f"LoRA ends {_signed(adapters['loss'].min() - full['loss'].mean())} nats off"
    if len(full):
        at = int(full["seconds"].argmin())
        first = f"First: {names.name(told[answers.full(told)].iloc[at])}"
    for master, _, gaps in answers.master_gaps(shown):
        if master == "bf16":
            later = gaps[len(gaps) // 2 :]
            lost = f"With a bf16 master: {_signed(sum(later) / len(later))}"
    return higher, first, lost


def _signed(number: float) -> str:
    return f"{number:+.2g}".replace("-", "−")
