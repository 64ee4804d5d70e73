"""What a study varies along x, one line a hue: throughput with its intervals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from analysis import answers, names, studies, tables
from analysis.figures import style
from analysis.studies import Study

BLUES = ("#9cc5ea", "#4f8fca", "#1f5fa8", "#123a68")
SCALED = ("num_params", "batch_size", "seq_len", "machine.device_bytes")
"""What is drawn on a logarithmic axis, for it doubles from point to point."""


def draw(study: Study, lines: pd.DataFrame) -> Figure:
    """lines: of all runs that are to be drawn; each run's are joined among themselves alone."""
    figure = Figure(figsize=(style.PAGE_IN * 0.72, 2.9))
    axes = figure.subplots()
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    unit = 1e-9 if study.x in ("num_params", "machine.device_bytes") else 1
    places = sorted(pd.to_numeric(studies.column(shown, str(study.x)).fillna(0)).unique() * unit)
    for number, (label, color, marker, mine) in enumerate(_series(study, shown)):
        x = pd.to_numeric(studies.column(mine, str(study.x)).fillna(0)) * unit
        for position, (_, part) in enumerate(mine.groupby("run", sort=False)):
            look: Any = {"color": color, "marker": marker, "zorder": 3 + number}
            axes.plot(*_with_gaps(x[part.index], part[study.value], places), label=label if position == 0 else None, **look)
            for at, (_, line) in zip(x[part.index], part.iterrows(), strict=True):
                style.whisker(axes, line, float(at), horizontal=False, scale=line[study.value] / line["tokens_per_s"], color=color)
    _axes(axes, study, shown, unit)
    first = shown.iloc[0]
    about = f"{first['model']}, " if shown["model"].nunique() == 1 else ""
    style.titled(
        figure,
        answers.finding(study, lines[lines["run"] == lines["run"].iloc[0]]),
        f"{about}{names.machine(first['machine_details'])}; bars: 95% intervals",
    )
    return figure


def _with_gaps(x: pd.Series, y: pd.Series, places: list[float]) -> tuple[list[float], list[float]]:
    """x and y, broken where a place between two points was not measured in this run."""
    known = dict(zip(x, y, strict=True))
    shown = [place for place in places if min(x) <= place <= max(x)]
    return shown, [known.get(place, float("nan")) for place in shown]


def _series(study: Study, shown: pd.DataFrame) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    """(label, colour, marker, lines) of every hue."""
    if study.hue == "system":
        for _, mine in shown.groupby(["family", "mode"], sort=False):
            family = mine.iloc[0]["family"]
            yield names.name(mine.iloc[0]), names.color(family), names.marker(family), mine
        return
    if study.hue is None:
        yield names.name(shown.iloc[0]), names.color(shown.iloc[0]["family"]), "o", shown
        return
    values = studies.column(shown, study.hue)
    for number, value in enumerate(sorted(values.unique())):
        label = f"{names.value(study.hue, value)} {names.setting(study.hue)}"
        yield label, BLUES[-values.nunique() + number], "o^sD"[number % 4], shown[values == value]


def _axes(axes: Axes, study: Study, shown: pd.DataFrame, unit: float) -> None:
    raw = sorted(value for value in studies.column(shown, str(study.x)).dropna().unique())
    places = [float(value) * unit for value in raw]
    if study.x in SCALED:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(places))
    words = [
        names.value(str(study.x), value).removesuffix("B") if study.x == "num_params" else names.value(str(study.x), value)
        for value in raw
    ]
    axes.xaxis.set_major_formatter(FixedFormatter(words))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=names.setting(str(study.x)), ylabel=names.setting(study.value))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
