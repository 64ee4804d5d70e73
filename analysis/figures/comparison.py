"""Systems of one run: throughput with its interval and ratio, and the memory that each takes."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import answers, names, speeds, tables
from analysis.figures import style
from analysis.studies import Study


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run. What has no speed is left to the table; hollow: what is not ranked."""
    shown = lines[lines["tokens_per_s"].notna()]
    shown = shown.assign(label=tables.labels(shown), may=speeds.comparable(shown))
    shown = shown.sort_values(["may", "tokens_per_s"])
    figure = Figure(figsize=(style.PAGE_IN, 0.75 + 0.36 * len(shown)))
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    _speeds(speed, shown, tables.base_of(study, lines))
    _memory(memory, shown)
    labels = [label.replace(", ", ",\n", 1) for label in shown["label"]]
    speed.set_yticks(range(len(shown)), labels)
    about = f"{names.setup(lines)}; bars: 95% intervals"
    style.titled(figure, answers.answer(study, lines).title, about)
    return figure


def _speeds(axes: Axes, shown: pd.DataFrame, base: pd.Series | None) -> None:
    for at, (_, line) in enumerate(shown.iterrows()):
        words = ""
        if not line["may"]:
            words = "  other losses"
        elif base is not None and line.name != base.name:
            words = f"  {speeds.ratio(line, base).times}"
        style.bar(axes, line, at, words, hollow=not line["may"])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    style.tokens_per_s(axes)
    axes.set_xlim(0, 1.36 * shown["tokens_per_s"].max())
    axes.grid(axis="y", visible=False)


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
