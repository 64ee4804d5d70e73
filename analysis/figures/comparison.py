"""Systems of one run: throughput with its interval and ratio, and the memory that each takes, side by side."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import answers, names, speeds, tables
from analysis.figures import style
from analysis.studies import Study


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of one run. What has no speed is left to the table, but for the reference, which is named as not fitting."""
    shown = lines[lines["tokens_per_s"].notna()]
    shown = shown.assign(label=tables.labels(shown))
    shown = shown.assign(may=speeds.comparable(shown)).sort_values(["may", "tokens_per_s"])
    base = tables.base_of(study, lines)
    figure = Figure(figsize=(style.PAGE_IN, 0.75 + 0.36 * len(shown)))
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    _speeds(speed, shown, base)
    _memory(memory, shown)
    speed.set_yticks(range(len(shown)), [label.replace(", ", ",\n", 1) for label in shown["label"]])
    first = lines.iloc[0]
    about = f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step; {names.machine(first['machine_details'])}"
    style.titled(figure, answers.finding(study, lines), f"{about}; bars: 95% intervals")
    return figure


def _speeds(axes: Axes, shown: pd.DataFrame, base: pd.Series | None) -> None:
    for at, (_, line) in enumerate(shown.iterrows()):
        alike = bool(line["may"])
        look: Any = (
            {"color": names.color(line["family"])} if alike else {"color": "white", "edgecolor": names.color(line["family"])}
        )
        axes.barh(at, line["tokens_per_s"], height=0.66, **look)
        style.whisker(axes, line, at, horizontal=True)
        words = f"{line['tokens_per_s']:,.0f}"
        if base is not None and alike and line.name != base.name:
            words += f"  {speeds.ratio(line, base)['value']:.2f}x"
        words += "" if alike else "  other losses"
        end = max(line["tokens_per_s"], 0 if pd.isna(line["hi"]) else line["hi"])
        axes.annotate(words, (end, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="tokens/s", xlim=(0, 1.36 * shown["tokens_per_s"].max()))
    axes.grid(axis="y", visible=False)


def _memory(axes: Axes, shown: pd.DataFrame) -> None:
    device, host = (shown[name].astype(float).fillna(0.0) for name in ("device_gb", "host_gb"))
    total = device + host
    places = range(len(shown))
    axes.barh(places, device, height=0.66, color="#4a4a4a", label="GPU")
    axes.barh(places, host, left=device, height=0.66, color="#c9c9c9", label="host")
    for at, (gpu, rest) in enumerate(zip(device, host, strict=True)):
        words = f"{gpu:.3g} + {rest:.3g}" if gpu else f"{rest:.3g}"
        axes.annotate(words, (gpu + rest, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set(xlabel="peak memory (GB)", xlim=(0, 1.3 * total.max() or 1))
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
