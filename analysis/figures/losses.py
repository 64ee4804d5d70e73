"""How far the losses of a study's lines lie from those of its fp32 master, step by step."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import answers, names, studies, tables
from analysis.figures import style
from analysis.studies import Study


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run. The first line without a caveat is what the others are held against."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    reference = next(line for _, line in shown.iterrows() if not isinstance(line["caveat"], str))
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 2.6))
    loss, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = ("#1f5fa8", "#e0701f", "#3f8f3a", "#5f4690")
    for number, (_, line) in enumerate(shown.iterrows()):
        label = names.value(str(study.x), studies.column(line.to_frame().T, str(study.x)).iloc[0])
        gap = [mine - theirs for mine, theirs in zip(line["losses"], reference["losses"], strict=False)]
        loss.plot(range(1, len(gap) + 1), gap, marker="os^D"[number % 4], color=colors[number % 4], label=label)
        speed.bar(number, line["tokens_per_s"], color=colors[number % 4], width=0.66)
        style.whisker(speed, line, number, horizontal=False)
    labels = [names.value(str(study.x), value) for value in studies.column(shown, str(study.x))]
    speed.set_xticks(range(len(labels)), [label.replace(", ", "\n").replace(" ", "\n", 1) for label in labels])
    speed.set_ylabel("tokens/s")
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    speed.grid(axis="x", visible=False)
    loss.set(xlabel="step", ylabel="loss less that of the fp32 master")
    loss.legend()
    first = shown.iloc[0]
    about = f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step; {names.machine(first['machine_details'])}"
    style.titled(figure, answers.finding(study, lines), about)
    return figure
