"""Bars of one run: its systems with their memory, the settings of a study, or masters with their
losses."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import answers, names, speeds, tables
from analysis.figures import style
from analysis.studies import Study

COLORS = ("#1f5fa8", "#e0701f", "#3f8f3a", "#5f4690")


def systems(study: Study, lines: pd.DataFrame) -> Figure:
    """Throughput with its interval and ratio, and memory. Hollow: what is not ranked."""
    shown = lines[lines["tokens_per_s"].notna()]
    shown = shown.assign(label=tables.labels(shown), may=speeds.comparable(shown))
    shown = shown.sort_values(["may", "tokens_per_s"])
    words = tables.ratios(study, shown).map(lambda one: one.times, na_action="ignore")
    figure = Figure(figsize=(style.PAGE_IN, 0.75 + 0.36 * len(shown)))
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    style.bars(speed, shown, words.where(shown["may"], "other losses"), hollow=~shown["may"])
    speed.xaxis.set_major_locator(MaxNLocator(5))
    speed.set_xlim(0, 1.36 * shown["tokens_per_s"].max())
    _memory(memory, shown)
    speed.set_yticks(range(len(shown)), [one.replace(", ", ",\n", 1) for one in shown["label"]])
    about = f"{names.setup(lines)}; bars: 95% intervals"
    style.titled(figure, answers.answer(study, lines).title, about)
    return figure


def _memory(axes: Axes, shown: pd.DataFrame) -> None:
    device, host = (shown[name].fillna(0.0) for name in ("device_gb", "host_gb"))
    places = range(len(shown))
    axes.barh(places, device, height=0.67, color="#4a4a4a", label="GPU")
    axes.barh(places, host, left=device, height=0.67, color="#c9c9c9", label="host")
    for at, (gpu, rest) in enumerate(zip(device, host, strict=True)):
        style.beside(axes, f"{gpu:.3g} + {rest:.3g}" if gpu else f"{rest:.3g}", gpu + rest, at)
    axes.set(xlabel="peak memory (GB)", xlim=(0, 1.3 * (device + host).max() or 1))
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def settings(study: Study, lines: pd.DataFrame) -> Figure:
    """Each setting with its change from its base; a rung of the ladder, from the one before."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    ladder = study.x == "system.preset"
    told, paths = tables.ratios(study, shown), [path for path in (study.x, study.hue) if path]
    if ladder:
        steps = [line for _, line in shown.iterrows()]
        told[1:] = [speeds.ratio(*pair) for pair in zip(steps[1:], steps, strict=False)]
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 0.9 + 0.3 * len(shown)))
    axes = figure.subplots()
    style.bars(axes, shown, told.map(lambda one: one.change, na_action="ignore"))
    labels = [
        ", ".join(one) for one in zip(*(tables.values(shown, path) for path in paths), strict=True)
    ]
    labels[1:] = [f"+ {label}" if ladder else label for label in labels[1:]]
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * shown["tokens_per_s"].max())
    against = "the bar above" if ladder else tables.base_title(study)
    about = f"{names.setup(lines)}; changes are against {against}"
    style.titled(figure, answers.answer(study, lines).title, about)
    return figure


def losses(study: Study, lines: pd.DataFrame) -> Figure:
    """How far each line's losses lie from the first's without a caveat, and the speeds."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 2.6))
    loss, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = tables.values(shown, str(study.x))
    for at, ((_, line), gaps) in enumerate(
        zip(shown.iterrows(), answers.loss_gaps(shown), strict=True)
    ):
        color, marker = COLORS[at % 4], "os^D"[at % 4]
        loss.plot(range(1, len(gaps) + 1), gaps, marker=marker, color=color, label=labels[at])
        speed.bar(at, line["tokens_per_s"], color=color, width=0.66)
        style.whisker(speed, at, line[style.SPEED])
    wrapped = [label.replace(", ", "\n").replace(" ", "\n", 1) for label in labels]
    speed.set_xticks(range(len(labels)), wrapped)
    style.tokens_per_s(speed.yaxis)
    speed.grid(axis="x", visible=False)
    loss.set(xlabel="step", ylabel="loss − that of an fp32 master")
    loss.legend()
    style.titled(figure, answers.answer(study, lines).title, names.setup(lines))
    return figure
