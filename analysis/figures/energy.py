"""Joules that the device takes for a token, of each system of one run, with what held its clock."""

import pandas as pd
from matplotlib.figure import Figure

from analysis import names, speeds, tables
from analysis.figures import style

TITLE = "What a token costs in energy"


def draw(lines: pd.DataFrame) -> Figure:
    """The largest model of which a run tells two lines that may be compared, and most lines of it.
    lines: of the record, or any rows."""
    shape = ["study", "run", "model", "batch_size", "seq_len"]
    runs = [part for _, part in lines[lines["joules_per_token"].notna()].groupby(shape)]
    shown = max(
        runs,
        key=lambda run: (speeds.comparable(run).sum() > 1, run["num_params"].max(), len(run)),
    )
    shown = shown.sort_values("joules_per_token", ascending=False)
    joules, may = shown["joules_per_token"], speeds.comparable(shown)
    colors = shown["family"].map(names.color)
    figure = Figure(figsize=(style.PAGE_IN * 0.86, 0.9 + 0.3 * len(shown)))
    axes, places = figure.subplots(), range(len(shown))
    axes.barh(places, joules, height=0.67, color=colors.where(may, "white"), edgecolor=colors)
    for at, (_, line) in enumerate(shown.iterrows()):
        held = names.throttled(line["throttle_reasons"])
        words = [f"{joules.iloc[at]:#.3g}", held and f"held down by {held}"]
        style.beside(axes, "  ".join(filter(None, words)), joules.iloc[at], at)
    axes.set_yticks(places, tables.labels(shown))
    axes.set(xlabel="joules of the device a token", xlim=(0, 1.5 * joules.max()))
    axes.grid(axis="y", visible=False)
    title, about = TITLE, names.setup(shown) + ("" if may.all() else "; hollow: not ranked")
    if may.any():
        least = shown[may].iloc[-1]
        told = f"{least['joules_per_token']:#.3g} J a token"
        title = f"{names.name(least)} takes the least energy: {told}"
    style.titled(figure, title, about)
    return figure
