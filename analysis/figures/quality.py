"""Whether systems learn the same: held-out loss against tokens and against hours."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import answers, names, tables
from analysis.figures import style
from analysis.studies import Study

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (5, 1, 1, 1)))


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run."""
    shown = lines[lines["tokens_per_s"].notna()]
    figure = Figure(figsize=(style.PAGE_IN, 3.2))
    tokens, hours = figure.subplots(1, 2, sharey=True)
    for at, (label, (_, line)) in enumerate(
        zip(tables.labels(shown), shown.iterrows(), strict=True)
    ):
        width = 1.2 + 0.4 * max(0, 4 - at)  # equal curves show, all of them
        look: Any = {"color": names.color(line["family"]), "linestyle": DASHES[at % 4]}
        seen = pd.DataFrame(line["heldout"], columns=["tokens", "seconds", "loss"])
        tokens.plot(seen["tokens"] / 1e6, seen["loss"], linewidth=width, label=label, **look)
        hours.plot(seen["seconds"] / 3600, seen["loss"], linewidth=width, **look)
    tokens.set(xlabel="million tokens", ylabel="held-out loss (nats)")
    hours.set(xlabel="hours of training")
    hours.xaxis.set_major_locator(MaxNLocator(4))
    about = names.setup(lines)
    about += "" if answers.full(shown).all() else "; LoRA trains another function"
    handles = tokens.get_legend_handles_labels()[0]
    style.titled(figure, answers.answer(study, lines), about, legend=handles, columns=4)
    return figure
