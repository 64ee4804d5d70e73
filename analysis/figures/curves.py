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
Look = dict[str, Any]


def draw(study: Study, lines: pd.DataFrame, beside: pd.DataFrame | None = None) -> Figure:
    """lines: of all runs, the leading one first; each run's points are joined among themselves.

    beside: other studies' lines, of which rivals at the same shape are drawn as single marks.
    """
    figure = Figure(figsize=(style.PAGE_IN * 0.72, 2.9))
    axes = figure.subplots()
    shown = tables.sort(study, lines[lines["tokens_per_s"].notna()])
    shown = shown.assign(x=pd.to_numeric(shown[study.x].fillna(0)))
    about = f"{names.setup(shown)}; bars: 95% intervals"
    for order, (label, mine, look) in enumerate(_series(study, shown)):
        _line(axes, study, mine, look | {"label": label, "zorder": 3 + order}, shown["x"])
    if shown["run"].nunique() > 1:
        about += "; a line joins one run"
    if beside is not None and len(marks := _rivals(study, shown, beside)):
        about += "; single marks: other runs, on other machines"
        for family, mine in marks.groupby("family"):
            several = mine.apply(names.name, axis=1)
            best = f"{names.family_name(str(family))} at its best"
            label = several.iloc[0] if several.nunique() == 1 else best
            look = names.look(str(family)) | {"label": label, "linestyle": "", "zorder": 9}
            _line(axes, study, mine.assign(run=""), look, mine["x"])
    told = paper.along(study).sort_values("x")
    for family, mine in told.groupby("system", sort=False):
        look = {"label": f"{names.family_name(str(family))}, paper", "markerfacecolor": "white"}
        axes.errorbar(mine["x"], mine["y"], linestyle=":", **look, **names.look(str(family)))
    about += "; dotted: the paper, one GH200, other batches" if study.paper else ""
    _axes(axes, study, sorted({*shown[study.x].dropna(), *told["x"]}))
    style.titled(figure, answers.answer(study, lines), about)
    return figure


def _series(study: Study, shown: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, Look]]:
    """(label, lines, colour and marker) of every hue."""
    if study.hue and not study.of_systems:
        for at, (value, mine) in enumerate(several := list(shown.groupby(study.hue))):
            label = f"{names.setting(study.hue)}: {names.value(study.hue, value)}"
            color = BLUES[(at - len(several)) % len(BLUES)]
            yield label, mine, {"color": color, "marker": "o^sD"[at % 4]}
        return
    for (family, _), mine in shown.groupby(["family", "mode"], sort=False):
        yield names.name(mine.iloc[0]), mine, names.look(str(family))


def _line(axes: Axes, study: Study, mine: pd.DataFrame, look: Look, places: pd.Series) -> None:
    """A line a run with its intervals, broken at a place that was not measured in its run."""
    for _, part in mine.groupby("run", sort=False):
        within = sorted(places[places.between(part["x"].min(), part["x"].max())].unique())
        part = part.set_index("x").reindex(within)
        ends = style.reach(part) * (part[study.value] / part["tokens_per_s"]).to_numpy()
        axes.errorbar(within, part[study.value], yerr=ends, **style.WHISKER, **look)
        look = look | {"label": None}


def _rivals(study: Study, shown: pd.DataFrame, beside: pd.DataFrame) -> pd.DataFrame:
    """The strongest of ZeRO-3 and of Twin-Flow in each of those runs, at a shape of this study."""
    same = [name for name in studies.SHAPES if name != study.x]
    near = beside[beside["family"].isin(RIVALS) & speeds.comparable(beside)]
    near = near.merge(shown[same].drop_duplicates(), on=same).assign(x=lambda all: all[study.x])
    return near.loc[near.groupby(["run", "family", "x"])["tokens_per_s"].idxmax()]


def _axes(axes: Axes, study: Study, known: list[Any]) -> None:
    x = str(study.x)
    if x in SCALED:
        axes.set_xscale("log", base=2)
    words = [names.value(x, value) for value in known]
    bare = [word.removesuffix("B") for word in words] if x == "num_params" else words
    axes.set_xticks([float(value) for value in known], bare)
    axes.minorticks_off()
    axes.set(xlabel=names.setting(x), ylabel=names.setting(study.value), ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
