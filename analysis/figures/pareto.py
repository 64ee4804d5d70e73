"""Throughput against the memory that it takes, device and host together: one panel a model."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import names, speeds
from analysis.figures import style

TITLE = "Throughput against the memory that it takes"


def draw(lines: pd.DataFrame) -> Figure:
    """lines: of the whole record. Hollow: what does not agree with the reference."""
    mine = lines[lines["study"].str.startswith("vs_") & lines["tokens_per_s"].notna()]
    best = mine.groupby("model")["tokens_per_s"].transform("max")
    mine = mine[mine["tokens_per_s"] > 0.1 * best]  # what uses a disk would press all else together
    models = mine.sort_values("num_params", ascending=False)["model"].unique()
    figure = Figure(figsize=(style.PAGE_IN, 3.1))
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        here = mine[mine["model"] == model]
        here = here.loc[here.groupby(["family", "mode"])["tokens_per_s"].idxmax()]
        for (_, line), may in zip(here.iterrows(), speeds.comparable(here), strict=True):
            look = {"markersize": 6} | names.look(line["family"])
            look |= {"linestyle": "", "markerfacecolor": look["color"] if may else "white"}
            axes.plot(line["device_gb"] + line["host_gb"], line["tokens_per_s"], **look)
        title = str(model).removeprefix("qwen2.5-").upper()
        axes.set(title=title, xlim=(0, None), ylim=(0, None), xlabel="device + host memory (GB)")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K")
    panels[0].set_ylabel("tokens/s")
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=color, label=name)
        for family, (name, color, marker) in names.SYSTEMS.items()
        if family in set(mine["family"])
    ]
    about = (
        "32 x 1024 tokens a step, one H200, each system at its fastest; "
        "hollow: its losses differ from the reference"
    )
    style.titled(figure, TITLE, about, legend=handles)
    return figure
