"""How far the losses of a study's lines lie from those of its fp32 master, step by step."""

import pandas as pd
from matplotlib.figure import Figure

from analysis import answers, names, tables
from analysis.figures import style
from analysis.studies import Study

COLORS = ("#1f5fa8", "#e0701f", "#3f8f3a", "#5f4690")


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run. The first without a caveat is what the others are held against."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    gaps = answers.loss_gaps(shown)
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 2.6))
    loss, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = [tables.value(line, str(study.x)) for _, line in shown.iterrows()]
    for at, (_, line) in enumerate(shown.iterrows()):
        look = COLORS[at % len(COLORS)]
        loss.plot(
            range(1, len(gaps[at]) + 1),
            gaps[at],
            marker="os^D"[at % 4],
            color=look,
            label=labels[at],
        )
        speed.bar(at, line["tokens_per_s"], color=look, width=0.66)
        style.whisker(speed, line, at, horizontal=False)
    wrapped = [label.replace(", ", "\n").replace(" ", "\n", 1) for label in labels]
    speed.set_xticks(range(len(labels)), wrapped)
    style.tokens_per_s(speed, "y")
    speed.grid(axis="x", visible=False)
    loss.set(xlabel="step", ylabel="loss − that of an fp32 master")
    loss.legend()
    style.titled(figure, answers.answer(study, lines).title, names.setup(lines))
    return figure
