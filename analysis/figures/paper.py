"""The paper's throughput beside this record's, a small figure a question: model size, and context length."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import names, paper
from analysis.figures import style

SIZES = {"3B": 3.1, "7B": 7.6, "14B": 14.8, "32B": 32.8}


def draw(lines: pd.DataFrame) -> Figure:
    """lines: of the whole record."""
    told = paper.beside(lines)
    told = told[(told["metric"] == "tflops") & told["system"].isin(["megatrain", "zero3", "fsdp2"])]
    figure = Figure(figsize=(style.PAGE_IN, 2.7))
    size, context = figure.subplots(1, 2, sharey=True)
    _panel(size, told[(told["study"] == "headline") & told["model"].isin(list(SIZES))], "model")
    _panel(context, told[told["study"] == "context"], "seq_len")
    size.set(xlabel="parameters (billions)", ylabel="TFLOPS", title="Model size, 1K tokens per sequence", ylim=(0, None))
    context.set(xlabel="tokens per sequence (thousands)", title="Context length at 7B, attention counted")
    about = "hollow: the paper, one GH200; filled: here, one H200 on PCIe; other machines and batches, so read shapes, not races"
    style.titled(
        figure, "The paper's throughput beside this record's", about, legend=size.get_legend_handles_labels()[0], columns=3
    )
    return figure


def _panel(axes: Axes, told: pd.DataFrame, place: str) -> None:
    for system, mine in told.groupby("system", sort=False):
        family = paper.OURS[str(system)]
        color, marker = names.color(family), names.marker(family)
        name = "MegaTrain" if system == "megatrain" else names.family_name(family)
        x = mine["model"].map(SIZES) if place == "model" else mine["seq_len"] / 1024
        theirs = mine.assign(x=x).dropna(subset=["value"]).sort_values("x")
        ours = mine.assign(x=x).dropna(subset=["measured"]).sort_values("x")
        axes.plot(theirs["x"], theirs["value"], ":", marker=marker, color=color, markerfacecolor="white", label=f"{name}, paper")
        axes.plot(ours["x"], ours["measured"].astype(float), "-", marker=marker, color=color, label=f"{name}, here")
    axes.set_xscale("log", base=2)
    ticks = sorted(set(told["model"].map(SIZES) if place == "model" else told["seq_len"] / 1024))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
