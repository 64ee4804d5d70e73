"""Joules that the device takes for a token, of each system of one run, with what held its clock."""

import pandas as pd
from matplotlib.figure import Figure

from analysis import names, speeds, tables
from analysis.figures import style

TITLE = "What a token costs in energy"


def known(lines: pd.DataFrame) -> bool:
    """Whether any line tells."""
    return bool(lines["joules_per_token"].notna().any())


def draw(lines: pd.DataFrame) -> Figure:
    """The largest model of which a run tells two lines that may be compared, and most lines of it.
    lines: of the record, or any rows."""
    told = lines[lines["joules_per_token"].notna()]
    shape = ["study", "run", "model", "batch_size", "seq_len"]
    runs = [part for _, part in told.groupby(shape)]
    shown = max(
        runs,
        key=lambda run: (speeds.comparable(run).sum() > 1, run["num_params"].max(), len(run)),
    )
    shown = shown.assign(label=tables.labels(shown), may=speeds.comparable(shown))
    shown = shown.sort_values("joules_per_token", ascending=False)
    figure = Figure(figsize=(style.PAGE_IN * 0.86, 0.9 + 0.3 * len(shown)))
    axes = figure.subplots()
    for at, (_, line) in enumerate(shown.iterrows()):
        color, joules = names.color(line["family"]), line["joules_per_token"]
        axes.barh(at, joules, height=0.67, color=color if line["may"] else "white", edgecolor=color)
        held = names.throttled(line["throttle_reasons"])
        words = [f"{joules:#.3g}", held and f"held down by {held}"]
        style.beside(axes, "  ".join(filter(None, words)), joules, at)
    axes.set_yticks(range(len(shown)), shown["label"])
    axes.set(xlabel="joules of the device a token", xlim=(0, 1.5 * shown["joules_per_token"].max()))
    axes.grid(axis="y", visible=False)
    fit, about, title = shown[shown["may"]], names.setup(shown), TITLE
    if len(fit):
        joules = f"{fit.iloc[-1]['joules_per_token']:#.3g} J a token"
        title = f"{names.name(fit.iloc[-1])} takes the least energy: {joules}"
    if len(fit) < len(shown):
        about += "; hollow: not ranked"
    style.titled(figure, title, about)
    return figure
