"""Throughput against the memory that it takes, device and host together: one panel a model, the last run of each system."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import names, numbers, speeds
from analysis.figures import style


def draw(lines: pd.DataFrame) -> Figure:
    """lines: of all runs of the comparisons with ZeRO-3. Hollow: what does not agree with the reference."""
    mine = lines[lines["study"].str.startswith("vs_") & ~lines["superseded"] & lines["tokens_per_s"].notna()]
    mine = mine[mine["tokens_per_s"] > 0.1 * mine.groupby("model")["tokens_per_s"].transform("max")]
    models = mine.sort_values("num_params", ascending=False)["model"].unique()
    figure = Figure(figsize=(style.PAGE_IN, 3.1))
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        here = mine[mine["model"] == model]
        best = here.loc[here.groupby(["family", "mode"])["tokens_per_s"].idxmax()]
        for (_, line), may in zip(best.iterrows(), speeds.comparable(best), strict=True):
            color = names.color(line["family"])
            face = color if may else "white"
            axes.plot(
                line["device_gb"] + line["host_gb"],
                line["tokens_per_s"],
                names.marker(line["family"]),
                color=color,
                markerfacecolor=face,
                markersize=6,
            )
        axes.set(
            title=str(model).removeprefix("qwen2.5-").upper(), xlim=(0, None), ylim=(0, None), xlabel="device + host memory (GB)"
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K")
    panels[0].set_ylabel("tokens/s")
    families = [family for family in names.SYSTEMS if family in set(mine["family"])]
    handles = [
        Line2D([], [], linestyle="", marker=names.marker(family), color=names.color(family), label=names.family_name(family))
        for family in families
    ]
    engine = mine[numbers.engine(mine)]
    assert len(engine), "the comparisons have no line of the engine"
    about = "32 x 1024 tokens a step, one H200, each system at its fastest; hollow: its losses differ from the reference"
    style.titled(figure, "Throughput against the memory that it takes", about, legend=handles)
    return figure
