"""The figures of the whole record: speed over rivals, and what it takes of memory and energy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import names, speeds, studies, tables
from analysis.figures import style

HEADLINE = "vs_zero3_14b"
KINDS: dict[str, tuple[str, list[str]]] = names.WORDS["memory"]
OWNER = {kind: name for name, (_, kinds) in KINDS.items() for kind in kinds}
CLAIM = 1.84
"""The paper's ratio of MegaTrain to DeepSpeed ZeRO-3 with offload at 14B (arXiv 2604.05091)."""
CLAIMED = "14B"
"""The size in whose panel the claim is drawn."""
COMPARE = r"vs_|headline$"
"""The studies that compare systems."""
LIMIT = 5.0
"""Rivals that are slower still (a disk) are left to the table."""
RIVAL = ["family", "mode"]
RUN = ["study", "run", *studies.WORK]
"""What lines share that may be held against each other."""


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
        before = parts.cumsum() - parts
        for kind, (color, _) in KINDS.items():
            axes.barh(places, parts.loc[kind], left=before.loc[kind], height=0.66, color=color)
        limit = lines.iloc[0]["machine_details"][f"{where}_bytes"] / 1e9
        axes.axvline(limit, color=style.ALARM, linewidth=0.9, linestyle="--")
        axes.set(title=f"{where.capitalize()} (has {limit:.0f} GB)", xlabel="GB")
        axes.grid(axis="y", visible=False)
    peaks: Any = {"marker": "|", "s": 400, "color": style.INK, "zorder": 3}
    panels[0].scatter(shown["device_gb"], places, **peaks)
    panels[0].set_yticks(places, tables.labels(shown).str.replace(", ", ",\n", n=1))
    handles = [Patch(color=color, label=name) for name, (color, _) in KINDS.items()]
    size = (shown["device_gb"] + shown["host_gb"]).map(" {:.0f} GB".format)
    told = (shown.apply(names.name, axis=1) + size)[::-1][:2]
    title = f"Device and host together: {'; '.join(told)}"
    about = "device as planned, black: observed peak; host as observed"
    style.titled(figure, title, f"{names.setup(shown)}; {about}", legend=handles)
    return figure


def ratios(lines: pd.DataFrame) -> pd.DataFrame:
    """One line a run and rival: the rival's, with value, lo, hi of `fast` over it."""
    found = []
    for _, here in lines[speeds.comparable(lines)].groupby(RUN, sort=False, dropna=False):
        fast = here[here["family"] == "megatrain_fast"]
        for _, several in here[speeds.rivals(here)].groupby(RIVAL, sort=False):
            if len(fast):
                rival = speeds.fastest(several)
                told = speeds.ratio(speeds.fastest(fast), rival)._asdict()
                found.append(rival.to_dict() | told)
    return pd.DataFrame(found)


def _about(lines: pd.DataFrame) -> str:
    """What stands below a figure of several runs: their work, kinds of device, its marks."""
    gpus = " or ".join(sorted({names.gpu(one["gpu"]) for one in lines["machine_details"]}))
    return f"32 x 1024 tokens a step, one {gpus}; a mark a run, bars: 95% intervals; "


def rivals(lines: pd.DataFrame) -> Figure:
    """How many times as fast `fast` is as each rival: a mark a run, a panel a size."""
    told = ratios(lines[lines["study"].str.match(COMPARE)])
    told = told[told["value"] < LIMIT].sort_values("num_params", ascending=False)
    sizes = list(told.groupby("size", sort=False))
    heights = [mine.groupby(RIVAL).ngroups for _, mine in sizes]
    tall = 0.8 + 0.235 * sum(heights) + 0.25 * len(sizes)
    figure = Figure(figsize=(style.PAGE_IN * 0.86, tall))
    panels = figure.subplots(len(sizes), height_ratios=heights, sharex=True, squeeze=False).flat
    for axes, (size, mine) in zip(panels, sizes, strict=True):
        _forest(axes, mine)
        axes.set_title(size)
        if size == CLAIMED:
            axes.axvline(CLAIM, color=style.ALARM, linewidth=0.9, linestyle="--", zorder=1)
            look: Any = {"transform": axes.get_xaxis_transform(), "color": style.ALARM, "va": "top"}
            axes.text(CLAIM, 0.97, f"  paper, over ZeRO-3: {CLAIM}", fontsize=6.5, **look)
    panels[-1].set_xlabel("tokens/s of MegaTrain fast over the rival's, in the same run")
    panels[-1].set_xlim(left=0.85)
    least = told.loc[told.groupby("size", sort=False)["value"].idxmin()]
    each = [f"{one['value']:.2f}x at {one['size']}" for _, one in least.iterrows()]
    about = f"{_about(told)}hollow: too few windows for an interval"
    over = f"MegaTrain fast over its strongest rival of any run: {', '.join(each)}"
    style.titled(figure, over, about)
    return figure


def _forest(axes: Axes, mine: pd.DataFrame) -> None:
    order = mine.groupby(RIVAL)["value"].mean().sort_values(ascending=False).index
    for at, (family, mode) in enumerate(order):
        several = mine[(mine["family"] == family) & (mine["mode"] == mode)].sort_values("run")
        last = len(several) - 1
        apart = min(0.2, 0.6 / max(last, 1))  # a row keeps its distance from the next
        several = several.assign(y=at + apart * (np.arange(len(several)) - last / 2))
        for hollow, part in several.groupby(several["lo"].isna()):
            look = names.look(family) | style.WHISKER | {"linestyle": ""}
            look["markerfacecolor"] = "white" if hollow else look["color"]
            axes.errorbar(part["value"], part["y"], xerr=style.reach(part, "value"), **look)
    axes.axvline(1.0, color=style.INK, linewidth=0.9, zorder=1)
    labels = [names.name({"family": family, "mode": mode}) for family, mode in order]
    axes.set_yticks(range(len(order)), labels)
    axes.set_ylim(-0.7, len(order) - 0.3)


def pareto(lines: pd.DataFrame) -> Figure:
    """Tokens/s against device and host memory together: a mark a run, a panel a size."""
    mine = lines[lines["study"].str.match(COMPARE) & lines["tokens_per_s"].notna()]
    mine = mine.assign(gb=mine["device_gb"] + mine["host_gb"], may=speeds.comparable(mine))
    mine = mine.sort_values(["num_params", "gb"], ascending=[False, True])
    speed = mine["tokens_per_s"].where(mine["may"])
    mine["edge"] = speed == speed.groupby(mine["model"]).cummax()
    sizes = list(mine.groupby("size", sort=False))
    figure = Figure(figsize=(style.PAGE_IN, 3.1))
    panels = figure.subplots(1, len(sizes), squeeze=False).flat
    for axes, (size, here) in zip(panels, sizes, strict=True):
        edge = here[here["edge"]]
        axes.step(edge["gb"], edge["tokens_per_s"], where="post", color=style.MUTED, linewidth=0.9)
        for (family, may), part in here.groupby(["family", "may"]):
            look = names.look(str(family)) | style.WHISKER | {"linestyle": ""}
            look["markerfacecolor"] = look["color"] if may else "white"
            axes.errorbar(part["gb"], part["tokens_per_s"], yerr=style.reach(part), **look)
        axes.set(title=size, xlabel="device + host memory (GB)", xlim=(0, None), ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel("tokens/s")
    lead = studies.leading(studies.listed()[HEADLINE], mine[mine["study"] == HEADLINE])
    each = (lead["gb"] / lead["tokens_per_s"]).sort_values()
    least, rival = each[lead["may"]].index[0], each[speeds.rivals(lead)].index[0]
    edge = mine["edge"] & (mine["model"] == lead.loc[least, "model"])
    on = mine[edge].apply(names.name, axis=1).unique()
    who = f"{' and '.join(on)} {'are' if len(on) > 1 else 'alone is'}"
    title = f"At {lead.loc[least, 'size']} {who} on the frontier; in one "
    title += f"run {names.name(lead.loc[rival])} takes {each[rival] / each[least]:.2f}x the memory "
    title += f"of {names.name(lead.loc[least])} for a token/s"
    about = f"{_about(mine)}grey: the frontier; hollow: its losses differ"
    known = [family for family in names.SYSTEMS if family in set(mine["family"])]
    looks = [names.look(one) | {"label": names.family_name(one)} for one in known]
    handles = [Line2D([], [], linestyle="", **look) for look in looks]
    style.titled(figure, title, about, legend=handles)
    return figure


def energy(lines: pd.DataFrame) -> Figure:
    """Joules that the device takes for a token under each system of a run: of the largest model of
    which a run knows several systems. The interval is that of the speed, at the mean power."""
    known = lines[lines["joules_per_token"].notna() & speeds.comparable(lines)]
    known = known.drop_duplicates([*RUN, "family", "mode"])
    runs = [part for _, part in known.groupby(RUN, dropna=False) if part["system"].nunique() > 1]
    shown = max(runs, key=lambda run: (run["num_params"].max(), len(run)))
    shown = shown.sort_values("joules_per_token")
    held = shown["throttle_reasons"].map(names.throttled)
    power = shown["joules_per_token"] * shown["tokens_per_s"]
    ends = {"lo": power / shown["hi"], "hi": power / shown["lo"]}
    shown = shown.assign(label=tables.labels(shown), words=held.where(held != ""), **ends)
    figure = Figure(figsize=(style.PAGE_IN, 0.9 + 0.36 * len(shown)))
    style.bars(figure.subplots(), shown, "joules_per_token", "#.3g")
    least = shown.iloc[0]
    then = shown[shown["system"] != least["system"]].iloc[0]
    joules = least["joules_per_token"]
    less = f"{1 - joules / then['joules_per_token']:.0%} less than {names.name(then)}"
    about = f"{names.setup(shown)}; bars: 95% intervals of the speed, at the mean power; beside "
    about += "each: what held the clock down, and for how much of the time"
    style.titled(figure, f"{names.name(least)} takes {joules:#.3g} J a token, {less}", about)
    return figure


DRAWN: dict[str, tuple[str, Callable[[pd.DataFrame], Figure]]] = {
    "energy": ("What a token costs in energy", energy),
    "memory": ("What fills the memory of each system", memory),
    "pareto": ("Throughput against the memory that it takes", pareto),
    "rivals": ("The engine over each rival, run by run", rivals),
}
"""Name -> what the index page calls it, and what draws it from the lines of the whole record."""
