"""Whether systems learn the same: held-out loss against tokens and hours, and what other masters
lose. One message a panel."""

from typing import Any

import pandas as pd
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
    figure = Figure(figsize=(style.PAGE_IN, 3.2))
    tokens, hours, gap = figure.subplots(1, 3)
    looks: dict[Any, dict[str, Any]] = {}
    for at, (label, (place, line)) in enumerate(
        zip(tables.labels(shown), shown.iterrows(), strict=True)
    ):
        width = 1.2 + 0.4 * max(0, 4 - at)  # equal curves show, all of them
        look = {"color": names.color(line["family"]), "linestyle": DASHES[at % 4], "marker": ""}
        look = looks[place] = look | {"linewidth": width, "label": label}
        seen = pd.DataFrame(line["heldout"], columns=POINTS)
        tokens.plot(seen["tokens"] / 1e6, seen["loss"], **look)
        hours.plot(seen["seconds"] / 3600, seen["loss"], **look)
    for _, line, gaps in answers.master_gaps(shown):
        look, steps = looks[line.name], range(1, len(gaps) + 1)
        mean = pd.Series(gaps).rolling(max(1, len(gaps) // MEANS), min_periods=1).mean()
        gap.plot(steps, gaps, color=look["color"], linewidth=0.5, alpha=0.4, marker="")
        gap.plot(steps, mean, **look | {"linewidth": 1.6})
    gap.axhline(0.0, color=style.MUTED, linewidth=0.8, zorder=1)
    tokens.set(xlabel="million tokens", ylabel="held-out loss (nats)")
    hours.set(xlabel="hours of training")
    gap.set(xlabel="step", ylabel="loss − the split master's")
    for axes, message in zip((tokens, hours, gap), _messages(shown), strict=True):
        axes.set_title(message, fontsize=7.5)
        axes.xaxis.set_major_locator(MaxNLocator(3))
    about = names.setup(lines)
    about += "" if answers.full(shown).all() else "; LoRA trains another function"
    handles = [Line2D([], [], **look) for look in looks.values()]
    title = answers.answer(study, lines).title
    style.titled(figure, title, about, legend=handles, columns=4)
    return figure


def _messages(shown: pd.DataFrame) -> tuple[str, str, str]:
    """What each panel says, as far as rows tell."""
    told = shown[shown["heldout"].map(bool)]
    ends = pd.DataFrame([points[-1] for points in told["heldout"]], told.index, POINTS)
    full, adapters = ends[answers.full(told)], ends[~answers.full(told)]
    higher, first, lost = "On the same text", "", ""
    if len(full) and len(adapters):
        apart = adapters["loss"].min() - full["loss"].mean()
        higher = f"LoRA ends {apart:+.2g} nats off".replace("-", "−")
    if len(full):
        at = int(full["seconds"].argmin())
        first = f"First: {names.name(told[answers.full(told)].iloc[at])}"
    for master, _, gaps in answers.master_gaps(shown):
        if master == "bf16":
            later = gaps[len(gaps) // 2 :]
            mean = f"{sum(later) / len(later):+.2g}"
            lost = f"With a bf16 master: {mean.replace('-', '−')} nats"
    return higher, first, lost
