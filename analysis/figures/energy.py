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
    may, joules = speeds.comparable(shown), shown["joules_per_token"].map("{:#.3g}".format)
    held = shown["throttle_reasons"].map(names.throttled)
    figure = Figure(figsize=(style.PAGE_IN * 0.86, 0.9 + 0.3 * len(shown)))
    axes = figure.subplots()
    words = joules + ("  held down by " + held).mask(held == "", "")
    style.bars(axes, shown, words, "joules_per_token")
    axes.set_yticks(range(len(shown)), tables.labels(shown))
    axes.set(xlabel="joules of the device a token", xlim=(0, 1.5 * axes.dataLim.x1))
    title, about = TITLE, names.setup(shown) + ("" if may.all() else "; hollow: not ranked")
    if may.any():
        least = f"{names.name(shown[may].iloc[-1])} takes the least energy"
        title = f"{least}: {joules[may].iloc[-1]} J a token"
    style.titled(figure, title, about)
    return figure
