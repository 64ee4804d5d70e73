"""One bar a setting of a study, in order, each with its interval and its change against what it is held against."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import answers, names, numbers, speeds, studies, tables
from analysis.figures import style
from analysis.studies import Study


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    ladder = study.x == "system.preset"
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 0.9 + 0.3 * len(shown)))
    axes = figure.subplots()
    steps = [line for _, line in shown.iterrows()]
    for at, line in enumerate(steps):
        axes.barh(at, line["tokens_per_s"], height=0.68, color=names.color(line["family"]))
        style.whisker(axes, line, at, horizontal=True)
        base = tables.base_line(study, shown, line)
        before = steps[at - 1] if ladder and at else base
        words = f"{line['tokens_per_s']:,.0f}"
        if before is not None and before.name != line.name:
            words += f"  {numbers.percent(speeds.ratio(line, before)['value'] - 1)}"
        end = line["tokens_per_s"] if pd.isna(line["hi"]) else line["hi"]
        axes.annotate(words, (end, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_yticks(range(len(shown)), [_label(study, line, at) for at, line in enumerate(steps)])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="tokens/s", xlim=(0, 1.25 * shown["tokens_per_s"].max()))
    axes.grid(axis="y", visible=False)
    first = shown.iloc[0]
    against = "the bar above" if ladder else tables.base_title(study, shown)
    about = f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step; {names.machine(first['machine_details'])}"
    style.titled(figure, answers.finding(study, lines), f"{about}; changes are against {against}")
    return figure


def _label(study: Study, line: pd.Series, at: int) -> str:
    if study.x == "system.preset":
        return names.family_name(line["family"]) if at == 0 else f"+ {names.family_name(line['family'])}"
    told = [names.value(path, studies.column(line.to_frame().T, path).iloc[0]) for path in (study.x, study.hue) if path]
    return ", ".join(told)
