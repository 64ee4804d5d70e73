"""The figures that a study can ask for by its `figure` in studies.yaml."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from analysis import answers, names, paper, speeds, studies, tables
from analysis.figures import style
from analysis.studies import Study
from sweeps.agreement import ADAPTERS

COLORS = ("#1f5fa8", "#e0701f", "#3f8f3a", "#5f4690")
BLUES = ("#9cc5ea", "#4f8fca", "#1f5fa8", "#123a68")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (5, 1, 1, 1)))
SCALED = ("num_params", "batch_size", "seq_len", "machine.device_bytes")
"""What is drawn on a logarithmic axis, for it doubles from point to point."""
RIVALS = ("zero3", "zero3_twinflow")
LEGEND = 26
"""Letters in a line of the legend beside lines."""
FILLS = {"compiled": "left", "kept": "bottom", "kept compiled": "top"}
"""The half of a mark that is filled, by how a rival was run."""
Look = dict[str, Any]


def drawable(study: Study, lines: pd.DataFrame) -> bool:
    """Whether anything was measured that a figure could show: two points of a line along x, two
    systems of a comparison."""
    measured = studies.leading(study, lines)["tokens_per_s"].notna().sum()
    return bool(measured > (study.figure in ("lines", "comparison")))


def draw(study: Study, lines: pd.DataFrame, beside: Iterable[pd.DataFrame] = ()) -> Figure:
    """The figure of a study's lines: for lines along x of all runs of the same work, else of the
    leading one."""
    lead = studies.leading(study, lines)
    if study.figure == "lines":
        ordered = pd.concat([lead, studies.same_work(lines.drop(lead.index), lead)])
        return along(study, ordered, pd.concat([lines[:0], *beside]))
    if study.figure == "quality":
        return quality(study, lines)
    kinds = {"comparison": bars, "bars": bars, "losses": losses}
    if study.figure not in kinds:
        allowed = f"allowed {', '.join(kinds)}, lines, quality; choose one"
        raise ValueError(f"studies.yaml: {study.name}.figure: got {study.figure!r}, {allowed}")
    return kinds[study.figure](study, studies.main_part(study, lead))


def bars(study: Study, lines: pd.DataFrame) -> Figure:
    """Throughput with its interval, and memory: of systems with their ratios, the fastest above and
    hollow what is not ranked; of settings in order with their changes, and of a rung of the ladder
    with that from the rung before."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    about, found = f"{names.setup(shown)}; {style.intervals(shown)}", tables.ratios(study, shown)
    figure = Figure(figsize=(style.PAGE_IN, 1.0 + 0.36 * len(shown)))
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    if study.compares:
        shown = tables.rank(shown.assign(label=tables.labels(shown)))
        times = found.map(lambda one: one.times, na_action="ignore")
        shown["words"] = times.where(shown["may"], "other losses")
    else:
        against, steps = tables.base_title(study), [line for _, line in shown.iterrows()]
        if study.x == "system.preset":
            against = "the bar above, to which each adds one switch"
            found[1:] = [speeds.ratio(*pair) for pair in zip(steps[1:], steps, strict=False)]
        about += f"; changes are against {against}"
        labels = [", ".join(tables.value(line, path) for path in study.axes) for line in steps]
        words = found.map(lambda one: one.change, na_action="ignore")
        shown = shown.assign(label=labels, words=words)
    style.bars(speed, shown, "tokens_per_s", ",.0f")
    speed.xaxis.set_major_locator(MaxNLocator(5))
    speed.xaxis.set_major_formatter("{x:,.0f}")
    device, host = (shown[name].fillna(0.0) for name in ("device_gb", "host_gb"))
    memory.barh(speed.get_yticks(), device, height=0.67, color="#4a4a4a", label="GPU")
    look: Look = {"left": device, "height": 0.67, "color": "#c9c9c9", "label": "host"}
    known = [f"{gpu:.3g} + {rest:.3g}" for gpu, rest in zip(device, host, strict=True)]
    memory.bar_label(memory.barh(speed.get_yticks(), host, **look), known, padding=5, fontsize=7)
    memory.set(xlabel="peak memory (GB)", xlim=(0, 1.3 * (device + host).max() or 1))
    memory.grid(axis="y", visible=False)
    memory.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    style.titled(figure, answers.answer(study, lines), about)
    return figure


def losses(study: Study, lines: pd.DataFrame) -> Figure:
    """How far each line's losses lie from the first's without a caveat."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    figure = Figure(figsize=(style.PAGE_IN * 0.72, 2.6))
    axes, labels = figure.subplots(), list(shown.apply(tables.value, axis=1, path=study.x))
    for at, gaps in enumerate(answers.loss_gaps(shown)):
        look: Look = {"marker": "os^D"[at % 4], "color": COLORS[at % 4], "label": labels[at]}
        axes.plot(range(1, len(gaps) + 1), gaps, **look)
    axes.set(xlabel="step", ylabel="loss − that of an fp32 master")
    axes.legend()
    style.titled(figure, answers.losses(study, shown), names.setup(lines))
    return figure


def along(study: Study, lines: pd.DataFrame, beside: pd.DataFrame) -> Figure:
    """What a study varies along x, one line a hue: throughput with its intervals. lines: of all
    runs, the leading one first; each run's points are joined among themselves. beside: other
    studies' lines, of which rivals at the same shape are drawn as single marks."""
    figure = Figure(figsize=(style.PAGE_IN * 0.72, 2.9))
    axes, ready = figure.subplots(), lines[lines["tokens_per_s"].notna()]
    shown = tables.sort(study, pd.concat([ready, _rivals(study, ready, beside)]))
    shown = shown.assign(x=pd.to_numeric(shown[study.x].fillna(0)))
    for order, (label, mine, look) in enumerate(_series(study, shown)):
        look |= {"label": textwrap.fill(label, LEGEND), "zorder": 3 + order}
        _line(axes, study, mine, look, shown["x"])
    ahead = lines[
        lines["tokens_per_s"].isna() & (lines["predicted"] > 0) & (study.x == "num_ranks")
    ]
    for family, mine in ahead.groupby("family"):
        look = names.look(str(family)) | {"linestyle": "", "markerfacecolor": "white"}
        axes.plot(mine["num_ranks"], mine["predicted"], **look)
    told = paper.along(study).sort_values("x")
    for family, mine in told.groupby("system", sort=False):
        label = f"the paper's {names.family_name(str(family))}"
        look = {"label": label, "markerfacecolor": "white"}
        axes.errorbar(mine["x"], mine["y"], linestyle=":", **look, **names.look(str(family)))
    x = str(study.x)
    known = sorted({*shown[x].dropna(), *told["x"], *ahead["num_ranks"]})
    words = [names.value(x, value).removesuffix("B") for value in known]
    if x in SCALED:
        axes.set_xscale("log", base=2)
    axes.set_xticks([float(value) for value in known], words)
    if len(known) > 8:
        axes.tick_params(axis="x", labelsize=6.5)
    axes.minorticks_off()
    axes.update_datalim([(shown["x"].iloc[0], 0.0)])  # so that the margin counts from zero
    axes.autoscale_view()
    axes.set(xlabel=names.setting(x), ylabel=names.setting(study.value), ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    about = f"{names.setup(ready)}; {style.intervals(ready)}"
    about += "; a line or single mark: one run" if shown["run"].nunique() > 1 else ""
    about += ", rivals on other machines" if len(shown) > len(ready) else ""
    about += "; hollow: predicted, for the machine has fewer GPUs" if len(ahead) else ""
    about += "; dotted: the paper, one GH200, other batches" if study.paper else ""
    style.titled(figure, answers.answer(study, lines), about)
    return figure


def _series(study: Study, shown: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, Look]]:
    """(label, lines, colour and marker) of every hue; the rest tells dashes apart."""
    if study.hue in (None, "system"):
        hues = [
            (names.name(mine.iloc[0]), mine, names.look(str(family)) | _fill(str(mode)))
            for (family, mode), mine in shown.groupby(["family", "mode"], sort=False)
        ]
    else:
        several = list(shown.groupby(study.hue))
        hues = []
        for at, (value, mine) in enumerate(several):
            label = f"{names.setting(study.hue)}: {names.value(study.hue, value)}"
            color = BLUES[(at - len(several)) % len(BLUES)]
            hues.append((label, mine, {"color": color, "marker": "o^sD"[at % 4]}))
    for label, mine, look in hues:
        rest = mine.apply(lambda line: tables.at(line, *study.rest), axis=1)
        for at, (told, part) in enumerate(part for part in mine.groupby(rest, sort=False)):
            dashed = {"linestyle": DASHES[at % len(DASHES)]} if at else {}
            alone = {"marker": "*", "markersize": 9} if at and len(part) == 1 else {}
            yield ", ".join(filter(None, [label, told])), part, look | dashed | alone


def _fill(mode: str) -> Look:
    return {"fillstyle": FILLS.get(mode, "full"), "markerfacecoloralt": "white"}


def _line(axes: Axes, study: Study, mine: pd.DataFrame, look: Look, places: pd.Series) -> None:
    """A line a run with its intervals, broken at a place that was not measured in its run."""
    for _, part in mine.groupby("run", sort=False):
        within = sorted(places[places.between(part["x"].min(), part["x"].max())].unique())
        part = pd.DataFrame({"x": within}).merge(part, on="x", how="left")
        ends = style.reach(part) * (part[study.value] / part["tokens_per_s"]).to_numpy()
        whiskers = ends if pd.notna(ends).any() else None  # else the legend has them too
        axes.errorbar(part["x"], part[study.value], yerr=whiskers, **style.WHISKER, **look)
        look = look | {"label": None}


def _rivals(study: Study, shown: pd.DataFrame, beside: pd.DataFrame) -> pd.DataFrame:
    """The strongest of ZeRO-3 and of Twin-Flow in each of those runs, at a shape of this study."""
    same = [name for name in (*studies.SHAPES, "num_ranks") if name != study.x]
    near = beside[beside["family"].isin(RIVALS) & speeds.comparable(beside)]
    near = near.merge(shown[same].drop_duplicates(), on=same)
    return near.loc[near.groupby(["run", "family", str(study.x)])["tokens_per_s"].idxmax()]


def quality(study: Study, lines: pd.DataFrame) -> Figure:
    """Whether systems learn the same: held-out loss against tokens and against hours, and how
    far the training loss of what trains every parameter lies from the first's without a caveat.
    The seeds of a system look alike. lines: of all runs; those of the leading one are drawn."""
    lead = studies.main_part(study, studies.leading(study, lines))
    shown = lead[lead["tokens_per_s"].notna()]
    shown = shown.assign(label=tables.labels(shown, seeds=False))
    alike = list(dict.fromkeys(shown["label"]))
    full = shown[~shown["system"].isin(ADAPTERS)]
    gaps = pd.DataFrame(answers.loss_gaps(full), full.index).T
    figure = Figure(figsize=(style.PAGE_IN, 3.2))
    tokens, hours, gap = figure.subplots(1, 3)
    for place, line in shown.iterrows():
        at = alike.index(line["label"])
        look = names.look(line["family"]) | {"marker": "", "linestyle": DASHES[at % 4]}
        wider = 0.4 * max(0, 4 - at) if len(alike) == len(shown) else 0.0  # equal ones show
        look |= {"linewidth": 1.2 + wider, "label": line["label"]}
        seen = pd.DataFrame(line["heldout"], columns=["tokens", "seconds", "loss"])
        tokens.plot(seen["tokens"] / 1e6, seen["loss"], **look)
        hours.plot(seen["seconds"] / 3600, seen["loss"], **look)
        if place in gaps:
            gap.plot(gaps[place], linewidth=0.5, alpha=0.4, color=look["color"], marker="")
            mean = gaps[place].rolling(1 + len(gaps) // 20, min_periods=1).mean()
            gap.plot(mean, **look | {"linestyle": "-", "linewidth": 1.6})
    for one in (tokens, hours):
        one.set_yscale("log")
        one.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one.yaxis.set_major_formatter("{x:g}")
        one.yaxis.set_minor_formatter(NullFormatter())
    tokens.set(xlabel="million tokens", ylabel="held-out loss (nats)")
    hours.set(xlabel="hours of training")
    hours.xaxis.set_major_locator(MaxNLocator(4))
    late = gaps.tail(len(gaps) // 2).mean().groupby(full["label"]).mean()
    far = late.reindex(late.abs().sort_values().index).tail(1)
    told = [f"{name}:\n{one:+.2g} nats in the second half" for name, one in far.items()]
    gap.set_title("".join(told).replace("-", "−"), fontsize=7.5)
    gap.set(xlabel="step", ylabel="training loss − an exact master's")
    about = names.setup(lead)
    about += "" if len(full) == len(shown) else "; LoRA trains another function"
    about += "" if len(alike) == len(shown) else "; a line a seed"
    named = {line.get_label(): line for line in tokens.lines}
    style.titled(figure, answers.answer(study, lines), about, legend=[*named.values()], columns=4)
    return figure
