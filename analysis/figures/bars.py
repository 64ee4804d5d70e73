"""Bars of one run: its systems with their memory, the settings of a study, or masters with their
losses."""

import pandas as pd
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
    ratios = tables.ratios(study, shown).map(lambda one: one.times, na_action="ignore")
    figure = Figure(figsize=(style.PAGE_IN, 0.75 + 0.36 * len(shown)))
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    words = _told(shown, ratios.where(shown["may"], "other losses"))
    style.bars(speed, shown, words)
    speed.xaxis.set_major_locator(MaxNLocator(5))
    speed.set_xlim(0, 1.36 * shown["tokens_per_s"].max())
    speed.set_yticks(range(len(shown)), shown["label"].str.replace(", ", ",\n", n=1))
    device, host = (shown[name].fillna(0.0) for name in ("device_gb", "host_gb"))
    memory.barh(range(len(shown)), device, height=0.67, color="#4a4a4a", label="GPU")
    bars = memory.barh(
        range(len(shown)), host, left=device, height=0.67, color="#c9c9c9", label="host"
    )
    known = [f"{gpu:.3g} + {rest:.3g}" for gpu, rest in zip(device, host, strict=True)]
    memory.bar_label(bars, known, padding=5, fontsize=7)
    memory.set(xlabel="peak memory (GB)", xlim=(0, 1.3 * (device + host).max() or 1))
    memory.grid(axis="y", visible=False)
    memory.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    about = f"{names.setup(lines)}; bars: 95% intervals"
    style.titled(figure, answers.answer(study, lines), about)
    return figure


def _told(shown: pd.DataFrame, words: pd.Series) -> pd.Series:
    """The speed and, where there are any, the words."""
    return shown["tokens_per_s"].map("{:,.0f}".format) + ("  " + words).fillna("")


def settings(study: Study, lines: pd.DataFrame) -> Figure:
    """Each setting with its change from its base; a rung of the ladder, from the one before."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    ladder, found = study.x == "system.preset", tables.ratios(study, shown)
    axis = [tables.values(shown, path) for path in (study.x, study.hue) if path]
    labels = [", ".join(words) for words in zip(*axis, strict=True)]
    if ladder:
        steps = [line for _, line in shown.iterrows()]
        found[1:] = [speeds.ratio(*pair) for pair in zip(steps[1:], steps, strict=False)]
        labels[1:] = [f"+ {label}" for label in labels[1:]]
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 0.9 + 0.3 * len(shown)))
    axes = figure.subplots()
    changes = found.map(lambda one: one.change, na_action="ignore")
    style.bars(axes, shown, _told(shown, changes))
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * shown["tokens_per_s"].max())
    against = "the bar above" if ladder else tables.base_title(study)
    about = f"{names.setup(lines)}; changes are against {against}"
    style.titled(figure, answers.answer(study, lines), about)
    return figure


def losses(study: Study, lines: pd.DataFrame) -> Figure:
    """How far each line's losses lie from the first's without a caveat, and the speeds."""
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    figure = Figure(figsize=(style.PAGE_IN * 0.8, 2.6))
    loss, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = tables.values(shown, str(study.x))
    for at, gaps in enumerate(answers.loss_gaps(shown)):
        look = {"marker": "os^D"[at % 4], "color": COLORS[at % 4], "label": labels[at]}
        loss.plot(range(1, len(gaps) + 1), gaps, **look)
    loss.set(xlabel="step", ylabel="loss − that of an fp32 master")
    loss.legend()
    wrapped = [label.replace(", ", "\n").replace(" ", "\n", 1) for label in labels]
    whiskers = {"yerr": style.reach(shown), "ecolor": style.INK, "error_kw": style.WHISKER}
    speed.bar(wrapped, shown["tokens_per_s"], color=COLORS, width=0.66, **whiskers)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.set_ylabel("tokens/s")
    speed.grid(axis="x", visible=False)
    style.titled(figure, answers.answer(study, lines), names.setup(lines))
    return figure
