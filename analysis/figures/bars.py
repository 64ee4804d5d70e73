"""One bar a setting of a study, in order, each with its interval and its change from its base."""

import pandas as pd
from matplotlib.figure import Figure

from analysis import answers, names, speeds, tables
from analysis.figures import style
from analysis.studies import Study


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run. A rung of the ladder is held against the one before."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    ladder = study.x == "system.preset"
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 0.9 + 0.3 * len(shown)))
    axes = figure.subplots()
    steps, labels = [line for _, line in shown.iterrows()], []
    for at, line in enumerate(steps):
        base = steps[at - 1] if ladder and at else tables.base_of(study, shown, line)
        known = base is not None and base.name != line.name
        style.bar(axes, line, at, f"  {speeds.ratio(line, base).change}" if known else "")
        told = [tables.value(line, path) for path in (study.x, study.hue) if path]
        labels.append(("+ " if ladder and at else "") + ", ".join(told))
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    style.tokens_per_s(axes)
    axes.set_xlim(0, 1.25 * shown["tokens_per_s"].max())
    axes.grid(axis="y", visible=False)
    against = "the bar above" if ladder else tables.base_title(study)
    about = f"{names.setup(lines)}; changes are against {against}"
    style.titled(figure, answers.answer(study, lines).title, about)
    return figure
