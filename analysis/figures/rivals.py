"""How many times as fast `fast` is as each rival: a mark a run, a panel a size."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import names, speeds
from analysis.figures import style

TITLE = "The engine over each rival, run by run"
CLAIM = 1.84
"""The paper's ratio of MegaTrain to DeepSpeed ZeRO-3 with offload at 14B (arXiv 2604.05091)."""
LIMIT = 3.7
"""Rivals that are slower still (a disk) are left to the table."""
RIVAL = ["family", "mode"]


def ratios(lines: pd.DataFrame) -> pd.DataFrame:
    """One line a run and rival: the rival's, with value, lo, hi of `fast` over it."""
    found = []
    keys = ["study", "run", "model", "batch_size", "seq_len"]
    for _, here in lines[speeds.comparable(lines)].groupby(keys, sort=False):
        fast = here[here["family"] == "megatrain_fast"]
        for _, several in here[speeds.rivals(here)].groupby(RIVAL, sort=False):
            if len(fast):
                rival = speeds.fastest(several)
                told = asdict(speeds.ratio(speeds.fastest(fast), rival))
                found.append(rival[["model", "run", *RIVAL, "num_params"]].to_dict() | told)
    return pd.DataFrame(found)


def draw(lines: pd.DataFrame) -> Figure:
    """lines: of the whole record, of which the comparisons with ZeRO-3 are drawn."""
    told = ratios(lines[lines["study"].str.startswith("vs_")])
    told = told[told["value"] < LIMIT]
    models = told.sort_values("num_params", ascending=False)["model"].unique()
    heights = [told[told["model"] == model].groupby(RIVAL).ngroups for model in models]
    tall = 0.8 + 0.235 * sum(heights) + 0.25 * len(models)
    figure = Figure(figsize=(style.PAGE_IN * 0.86, tall))
    panels = figure.subplots(len(models), height_ratios=heights, sharex=True, squeeze=False).flat
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, told[told["model"] == model], str(model))
    words: Any = {"fontsize": 6.5, "color": style.ALARM, "va": "top"}
    at: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    panels[-1].annotate(f"paper, 14B: {CLAIM}", (CLAIM, 1), xytext=(3, -2), **at, **words)
    panels[-1].set_xlabel("tokens/s of MegaTrain fast over the rival's, in the same run")
    panels[-1].set_xlim(left=0.85)
    least = told.sort_values("value").iloc[0]
    over = f"at least {least['value']:.2f}x its strongest rival, {names.name(least)}"
    about = (
        "32 x 1024 tokens a step, one H200; a mark a run, bars: 95% intervals; "
        "hollow: too few windows for an interval"
    )
    style.titled(figure, f"MegaTrain fast is {over}", about)
    return figure


def _panel(axes: Axes, mine: pd.DataFrame, model: str) -> None:
    order = mine.groupby(RIVAL)["value"].mean().sort_values(ascending=False).index
    for at, (family, mode) in enumerate(order):
        several = mine[(mine["family"] == family) & (mine["mode"] == mode)].sort_values("run")
        several = several.assign(y=at + 0.2 * (np.arange(len(several)) - (len(several) - 1) / 2))
        for hollow, part in several.groupby(several["lo"].isna()):
            look = names.look(family) | style.WHISKER | {"linestyle": ""}
            look["markerfacecolor"] = "white" if hollow else look["color"]
            axes.errorbar(part["value"], part["y"], xerr=style.reach(part, "value"), **look)
    axes.axvline(CLAIM, color=style.ALARM, linewidth=0.9, linestyle="--", zorder=1)
    axes.axvline(1.0, color=style.INK, linewidth=0.9, zorder=1)
    labels = [names.name({"family": family, "mode": mode}) for family, mode in order]
    axes.set_yticks(range(len(order)), labels)
    axes.set(
        title=model.removeprefix("qwen2.5-").upper(),
    )
    axes.set_ylim(-0.7, len(order) - 0.3)
