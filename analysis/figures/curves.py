"""What a study varies along x, one line a hue: throughput with its intervals."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import answers, names, paper, speeds, studies, tables
from analysis.figures import style
from analysis.studies import Study

BLUES = ("#9cc5ea", "#4f8fca", "#1f5fa8", "#123a68")
SCALED = ("num_params", "batch_size", "seq_len", "machine.device_bytes")
"""What is drawn on a logarithmic axis, for it doubles from point to point."""
RIVALS = ("zero3", "zero3_twinflow")


def draw(study: Study, lines: pd.DataFrame, beside: pd.DataFrame | None = None) -> Figure:
    """lines: of all runs, the leading one first; each run's points are joined among themselves.

    beside: other studies' lines, of which rivals at the same shape are drawn as single marks.
    """
    figure = Figure(figsize=(style.PAGE_IN * 0.72, 2.9))
    axes = figure.subplots()
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    shown = shown.assign(x=pd.to_numeric(shown[str(study.x)].fillna(0)))
    places = sorted(shown["x"].unique())
    for order, (label, color, marker, mine) in enumerate(_series(study, shown)):
        for number, (_, part) in enumerate(mine.groupby("run", sort=False)):
            look: Any = {"color": color, "marker": marker, "zorder": 3 + order}
            # A line is broken where a place between two of its points was not measured in its run.
            within = [x for x in places if part["x"].min() <= x <= part["x"].max()]
            points = part.set_index("x")[study.value].reindex(within)
            axes.plot(within, points, label=None if number else label, **look)
            for _, line in part.iterrows():
                _whisker(axes, study, line, color)
    about = f"{names.setup(shown)}; bars: 95% intervals"
    about += "; a line joins one run" if shown["run"].nunique() > 1 else ""
    if beside is not None and len(marks := _rivals(study, shown, beside)):
        _marks(axes, study, marks)
        about += "; single marks: other runs, on other machines"
    if study.paper:
        _paper(axes, study)
        about += "; dotted: the paper, one GH200, other batches"
    _axes(axes, study, shown)
    style.titled(figure, answers.answer(study, lines).title, about)
    return figure


def _series(study: Study, shown: pd.DataFrame) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    """(label, colour, marker, lines) of every hue."""
    if study.hue and not study.of_systems:
        values = shown[study.hue]
        for number, value in enumerate(sorted(values.unique())):
            label = f"{names.setting(study.hue)}: {names.value(study.hue, value)}"
            color = BLUES[(number - values.nunique()) % len(BLUES)]
            yield label, color, "o^sD"[number % 4], shown[values == value]
        return
    for (family, _), mine in shown.groupby(["family", "mode"], sort=False):
        marker = names.marker(str(family)) if study.hue else "o"
        yield names.name(mine.iloc[0]), names.color(str(family)), marker, mine


def _rivals(study: Study, shown: pd.DataFrame, beside: pd.DataFrame) -> pd.DataFrame:
    """The strongest of ZeRO-3 and of Twin-Flow in each of those runs, at a shape of this study."""
    same = [name for name in studies.SHAPES if name != study.x]
    near = beside[beside["family"].isin(RIVALS) & speeds.comparable(beside)]
    near = near.merge(shown[same].drop_duplicates(), on=same)
    near = near.assign(x=near[str(study.x)])
    return near.loc[near.groupby(["run", "family", "x"])["tokens_per_s"].idxmax()]


def _marks(axes: Axes, study: Study, marks: pd.DataFrame) -> None:
    for family, mine in marks.groupby("family"):
        modes = {names.name(line) for _, line in mine.iterrows()}
        label = modes.pop() if len(modes) == 1 else f"{names.family_name(str(family))} at its best"
        look: Any = {"color": names.color(str(family)), "marker": names.marker(str(family))}
        axes.plot(mine["x"], mine[study.value], linestyle="", label=label, zorder=9, **look)
        for _, line in mine.iterrows():
            _whisker(axes, study, line, look["color"])


def _whisker(axes: Axes, study: Study, line: pd.Series, color: str) -> None:
    scale = line[study.value] / line["tokens_per_s"]
    style.whisker(axes, line, line["x"], horizontal=False, scale=scale, color=color)


def _paper(axes: Axes, study: Study) -> None:
    for system, mine in paper.along(study).sort_values("x").groupby("system", sort=False):
        look: Any = {"color": names.color(str(system)), "marker": names.marker(str(system))}
        label = f"{names.family_name(str(system))}, paper"
        axes.plot(mine["x"], mine["y"], ":", markerfacecolor="white", label=label, **look)


def _axes(axes: Axes, study: Study, shown: pd.DataFrame) -> None:
    x = str(study.x)
    if x in SCALED:
        axes.set_xscale("log", base=2)
    known = [*shown[x].dropna(), *(paper.along(study)["x"] if study.paper else ())]
    raw = sorted({int(value) if value == int(value) else value for value in known})
    words = [names.value(x, value) for value in raw]
    bare = [word.removesuffix("B") for word in words] if x == "num_params" else words
    axes.set_xticks([float(value) for value in raw], bare)
    axes.minorticks_off()
    axes.set(xlabel=names.setting(x), ylabel=names.setting(study.value))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
