"""The figures of the whole record: the engine over its rivals, and what fills memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import names, speeds, studies, tables
from analysis.figures import style

HEADLINE = "vs_zero3_14b"
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("#1b4b82", ("weights",)),
    "master and optimizer state": ("#d0632b", ("master", "moments", "optimizer")),
    "gradients": ("#f0b68f", ("gradients",)),
    "activations": ("#3f8f3a", ("activations", "kept", "checkpoints", "masks")),
    "other": ("#b0b0b0", ()),
}
"""Name -> colour, and the kinds of a row's plan that it stands for; what none names is other."""
OWNER = {kind: name for name, (_, kinds) in KINDS.items() for kind in kinds}
CLAIM = 1.84
"""The paper's ratio of MegaTrain to DeepSpeed ZeRO-3 with offload at 14B (arXiv 2604.05091)."""
LIMIT = 3.7
"""Rivals that are slower still (a disk) are left to the table."""
RIVAL = ["family", "mode"]


def memory(lines: pd.DataFrame) -> Figure:
    """What fills the memory of each system of the headline's leading run: device as planned and
    its peak, host as observed."""
    lines = studies.leading(studies.listed()[HEADLINE], lines[lines["study"] == HEADLINE])
    shown = lines[lines["tokens_per_s"].notna()].sort_values("tokens_per_s")
    device = [plan.get("device", {}) for plan in shown["plan"]]
    plans = {"device": device, "host": list(shown["host_split"])}
    figure, places = Figure(figsize=(style.PAGE_IN, 1.5 + 0.36 * len(shown))), range(len(shown))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (where, sizes) in zip(panels, plans.items(), strict=True):
        known = pd.DataFrame(sizes).fillna(0.0).T / 1e9
        parts = known.groupby(lambda kind: OWNER.get(kind, "other")).sum()
        parts = parts.reindex(list(KINDS)).fillna(0.0)
        ends = parts.cumsum()
        for kind, (color, _) in KINDS.items():
            size, left = parts.loc[kind], ends.loc[kind] - parts.loc[kind]
            axes.barh(places, size, left=left, height=0.66, color=color)
        limit = lines.iloc[0]["machine_details"][f"{where}_bytes"] / 1e9
        axes.axvline(limit, color=style.ALARM, linewidth=0.9, linestyle="--")
        axes.set(title=f"{where.capitalize()} (has {limit:.0f} GB)", xlabel="GB")
        axes.grid(axis="y", visible=False)
    peaks: Any = {"marker": "|", "s": 400, "color": style.INK, "zorder": 3}
    panels[0].scatter(shown["device_gb"], places, **peaks)
    panels[0].set_yticks(places, tables.labels(shown).str.replace(", ", ",\n", n=1))
    handles = [Patch(color=color, label=name) for name, (color, _) in KINDS.items()]
    told = [
        f"{names.name(one)} {one['device_gb'] + one['host_gb']:.0f} GB"
        for _, one in shown.tail(2)[::-1].iterrows()
    ]
    title = f"Device and host together: {'; '.join(told)}"
    about = "device as planned, black: observed peak; host as observed"
    style.titled(figure, title, f"{names.setup(shown)}; {about}", legend=handles)
    return figure


def ratios(lines: pd.DataFrame) -> pd.DataFrame:
    """One line a run and rival: the rival's, with value, lo, hi of `fast` over it."""
    found = []
    keys = ["study", "run", "model", "batch_size", "seq_len"]
    for _, here in lines[speeds.comparable(lines)].groupby(keys, sort=False):
        fast = here[here["family"] == "megatrain_fast"]
        for _, several in here[speeds.rivals(here)].groupby(RIVAL, sort=False):
            if len(fast):
                rival = speeds.fastest(several)
                told = speeds.ratio(speeds.fastest(fast), rival)._asdict()
                found.append(rival[["model", "run", *RIVAL, "num_params"]].to_dict() | told)
    return pd.DataFrame(found)


def rivals(lines: pd.DataFrame) -> Figure:
    """How many times as fast `fast` is as each rival: a mark a run, a panel a size."""
    told = ratios(lines[lines["study"].str.startswith("vs_")])
    told = told[told["value"] < LIMIT].sort_values("num_params", ascending=False)
    sizes = list(told.groupby("model", sort=False))
    heights = [mine.groupby(RIVAL).ngroups for _, mine in sizes]
    tall = 0.8 + 0.235 * sum(heights) + 0.25 * len(sizes)
    figure = Figure(figsize=(style.PAGE_IN * 0.86, tall))
    panels = figure.subplots(len(sizes), height_ratios=heights, sharex=True, squeeze=False).flat
    for axes, (model, mine) in zip(panels, sizes, strict=True):
        _forest(axes, mine)
        axes.set_title(str(model).removeprefix("qwen2.5-").upper())
    words: Any = {"fontsize": 6.5, "color": style.ALARM, "va": "top"}
    at: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    panels[-1].annotate(f"paper, 14B: {CLAIM}", (CLAIM, 1), xytext=(3, -2), **at, **words)
    panels[-1].set_xlabel("tokens/s of MegaTrain fast over the rival's, in the same run")
    panels[-1].set_xlim(left=0.85)
    least = told.sort_values("value").iloc[0]
    over = f"at least {least['value']:.2f}x its strongest rival, {names.name(least)}"
    about = "32 x 1024 tokens a step, one H200; a mark a run, bars: 95% intervals; "
    about += "hollow: too few windows for an interval"
    style.titled(figure, f"MegaTrain fast is {over}", about)
    return figure


def _forest(axes: Axes, mine: pd.DataFrame) -> None:
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
    axes.set_ylim(-0.7, len(order) - 0.3)


DRAWN: dict[str, tuple[str, Callable[[pd.DataFrame], Figure]]] = {
    "memory": ("What fills the memory of each system", memory),
    "rivals": ("The engine over each rival, run by run", rivals),
}
"""Name -> what the index page calls it, and what draws it from the lines of the whole record."""
