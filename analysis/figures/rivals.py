"""How many times as fast `fast` is as each rival: a mark a run with its interval, a panel a size, a line at the paper's claim."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import names, numbers, speeds
from analysis.figures import style

CLAIM = 1.84
"""The paper's ratio of MegaTrain to DeepSpeed ZeRO-3 with offload at 14B (arXiv 2604.05091)."""

LIMIT = 3.6
"""Rivals that are slower still (a disk) are left to the table."""


def ratios(lines: pd.DataFrame) -> pd.DataFrame:
    """One line a run and rival: model, run, family, mode, value, lo, hi of `fast` over it. Superseded runs are left out."""
    found = []
    for (_, run), mine in lines[~lines["superseded"]].groupby(["study", "run"], sort=False):
        for _, here in mine.groupby(["model", "batch_size", "seq_len"]):
            fast = here[(here["family"] == "megatrain_fast") & speeds.comparable(here)]
            others = here[numbers.rivals(here)]
            if not len(fast) or not len(others):
                continue
            best = speeds.fastest(fast)
            for (family, mode), several in others.groupby(["family", "mode"], sort=False):
                rival = speeds.fastest(several)
                about = {"model": rival["model"], "run": run, "family": family, "mode": mode, "num_params": rival["num_params"]}
                found.append(about | speeds.ratio(best, rival))
    return pd.DataFrame(found)


def draw(lines: pd.DataFrame) -> Figure:
    """lines: of all runs of the comparisons with ZeRO-3."""
    told = ratios(lines[lines["study"].str.startswith("vs_")])
    told = told[told["value"] < LIMIT]
    models = told.sort_values("num_params", ascending=False)["model"].unique()
    heights = [told[told["model"] == model].groupby(["family", "mode"]).ngroups for model in models]
    figure = Figure(figsize=(style.PAGE_IN * 0.86, 0.8 + 0.235 * sum(heights) + 0.25 * len(models)))
    panels = figure.subplots(len(models), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, told[told["model"] == model], str(model))
    panels[-1].set_xlabel("tokens/s of MegaTrain fast over the rival's, in the same run")
    strongest = told.groupby(["family", "mode"])["value"].min().sort_values().index[0]
    spread = told[(told["family"] == strongest[0]) & (told["mode"] == strongest[1])]["value"]
    least = f"{spread.min():.2f}x its strongest rival, {names.name({'family': strongest[0], 'mode': strongest[1]})}"
    title = f"MegaTrain fast is at least {least}"
    style.titled(
        figure,
        title,
        "32 x 1024 tokens a step, one H200; a mark a run, bars: 95% intervals; hollow: too few windows for an interval",
    )
    return figure


def _panel(axes: Axes, mine: pd.DataFrame, model: str) -> None:
    order = mine.groupby(["family", "mode"])["value"].mean().sort_values(ascending=False).index
    for at, (family, mode) in enumerate(order):
        several = mine[(mine["family"] == family) & (mine["mode"] == mode)].sort_values("run")
        for number, (_, one) in enumerate(several.iterrows()):
            place = at + 0.2 * (number - (len(several) - 1) / 2)
            hollow = pd.isna(one["lo"])
            color = names.color(family)
            axes.plot(
                one["value"],
                place,
                marker=names.marker(family),
                color=color,
                markerfacecolor="white" if hollow else color,
                zorder=5,
            )
            style.whisker(axes, one, place, horizontal=True, color=color)
    axes.axvline(CLAIM, color=style.ALARM, linewidth=0.9, linestyle="--", zorder=1)
    axes.axvline(1.0, color=style.INK, linewidth=0.9, zorder=1)
    axes.annotate(
        f"paper, 14B: {CLAIM}",
        (CLAIM, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -8),
        textcoords="offset points",
        fontsize=6.5,
        color=style.ALARM,
    )
    axes.set_yticks(range(len(order)), [names.name({"family": family, "mode": mode}) for family, mode in order])
    axes.set(title=model.removeprefix("qwen2.5-").upper(), ylim=(-0.7, len(order) - 0.3), xlim=(0.85, LIMIT))
