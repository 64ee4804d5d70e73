"""The style and the quickstart figure: data, labels, units, series and marks; never pixels."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from analysis import load, style
from analysis.figures import convergence, quickstart
from analysis.make import RESULTS
from sweeps.result import LOSS_TOLERANCE, Row, read_rows
from tests.unit.test_analysis_load import GIB, cpu_rows, curve, h200_rows, plan, row


@pytest.fixture(scope="module")
def h200() -> Figure:
    return quickstart.figure(load.from_rows(h200_rows()))


def many_rows() -> list[Row]:
    """Three rows of one system beside another."""
    presets = ("paper", "stream", "fast")
    rows = [row("megatrain", [1.0 + at, 1.1 + at, 1.2 + at], preset=name, losses=curve(30)) for at, name in enumerate(presets)]
    return [*rows, row("zero3", [9.0, 9.1, 9.2], losses=curve(30))]


def words(axes: Axes) -> list[str]:
    return [child.get_text() for child in axes.get_children() if isinstance(child, Annotation)]


def bars(axes: Axes) -> dict[str, float]:
    return {
        str(container.get_label()): patch.get_width()
        for container in axes.containers
        if hasattr(container, "patches")
        for patch in container.patches
    }


def lightness(color: str) -> float:
    linear: list[float] = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance: float = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * math.pow(luminance, 1 / 3) - 16


def test_systems_stay_apart() -> None:
    looks = style.SYSTEMS
    for first, second in itertools.combinations(["in_memory", "megatrain", "zero3", "fsdp2"], 2):
        assert abs(lightness(looks[first].color) - lightness(looks[second].color)) >= 15, (first, second)
    grey = sorted((lightness(one.color), system) for system, one in looks.items())
    for (first, one), (second, other) in itertools.pairwise(grey):
        assert second - first >= 4.5, (one, other)
    for attribute in ("name", "color", "marker", "hatch"):
        assert len({getattr(one, attribute) for one in looks.values()}) == len(looks), attribute
    assert style.look("something_new").name == "something_new"


def test_page_size_and_panels(h200: Figure) -> None:
    assert h200.get_size_inches()[0] == style.PAGE_IN
    assert [axes.get_title(loc="left") for axes in h200.axes] == ["Throughput", "Peak memory", "Training loss", ""]
    assert [axes.get_xlabel() for axes in h200.axes] == [
        "tokens / s\n(95% interval of 3 to 5 windows)\nat the bars: × ZeRO-3",
        "GB (10⁹ bytes)",
        "",
        "optimizer step",
    ]
    assert [axes.get_ylabel() for axes in h200.axes[2:]] == ["nats / token", "loss − ref.\n(log > 0.002)"]
    assert "qwen2.5-3b (3.40B parameters), batch 32 × 1024 tokens, NVIDIA H200" in h200.get_suptitle()


def test_throughput_shows_every_cell(h200: Figure) -> None:
    axes = h200.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "in memory",
        "MegaTrain",
        "ZeRO-3",
        "FSDP2",
        "MegaTrain (published)",
        "ZeRO-2",
        "SuperOffload",
        "ZenFlow",
    ]
    assert bars(axes)["MegaTrain"] == pytest.approx(32768 * 5 / 8.03)
    assert set(bars(axes)) >= {"in memory", "MegaTrain", "ZeRO-3", "FSDP2", "MegaTrain (published)"}
    assert words(axes) == [
        "1.90×",
        "1.80×",
        "1.00×",
        "0.71×",
        "2.06×",
        "numerics differ",
        "OOM (device)",
        "unsupported",
        "non-finite loss",
    ]
    crosses = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "x"]  # type: ignore[index]
    assert crosses == [5, 6, 7]
    assert axes.get_xlim()[0] == 0


def test_memory_in_decimal_gigabytes_with_the_plan_beside(h200: Figure) -> None:
    axes = h200.axes[1]
    assert bars(axes)["ZeRO-3 device"] == pytest.approx(69.6)
    assert bars(axes)["ZeRO-3 host"] == pytest.approx(88 * GIB / 1e9)
    plans = sorted(segment[0][0] for lines in axes.collections for segment in lines.get_segments())  # type: ignore[attr-defined]
    assert plans == pytest.approx(sorted(count * GIB / 1e9 for count in (95, 5, 66, 80, 17, 41, 60, 67)))
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["device", "host", "plan"]


def test_losses_of_all_systems_and_their_difference(h200: Figure) -> None:
    loss, difference = h200.axes[2], h200.axes[3]
    series = {line.get_label(): line for line in loss.lines if not str(line.get_label()).startswith("_")}
    assert list(series) == ["in memory", "MegaTrain", "ZeRO-3", "FSDP2", "MegaTrain (published)", "ZenFlow"]
    assert np.asarray(series["ZeRO-3"].get_ydata()).tolist() == curve(40, 4e-4)
    assert series["ZeRO-3"].get_color() == style.SYSTEMS["zero3"].color
    assert words(loss) == ["non-finite loss"]
    gaps = {line.get_label(): np.asarray(line.get_ydata()) for line in difference.lines}
    assert list(gaps["MegaTrain"]) == pytest.approx([-6e-4 * step / 40 for step in range(40)], abs=1e-12)
    assert difference.get_yscale() == "symlog"
    assert difference.get_ylim()[1] == pytest.approx(1.6)
    assert list(difference.get_yticks()) == pytest.approx([-0.002, 0, 0.002, 1, 0.1])


@pytest.mark.parametrize("preset", [None, "tuned kept", "a preset with a long name"])
def test_the_words_below_the_speeds_end_before_the_next_panels(preset: str | None) -> None:
    rows = [row("megatrain", [1.0, 1.1, 1.2]), row("zero3", [2.0, 2.1, 2.2], preset=preset)]
    figure = quickstart.figure(load.from_rows(rows))
    figure.draw_without_rendering()
    throughput, memory = figure.axes[:2]
    told, legend = throughput.xaxis.get_label(), memory.get_legend()
    assert legend is not None
    assert "× ZeRO-3" in told.get_text()
    assert told.get_window_extent().x1 < legend.get_window_extent().x0, told.get_text()


def test_long_names_leave_the_panels_their_width() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = quickstart.figure(load.frame(RESULTS / "zero3_7b_huge_pages.jsonl"))
        figure.draw_without_rendering()
    throughput, memory, loss = figure.axes
    assert min(one.get_position().width for one in (throughput, memory, loss)) > 0.18
    names = [text.get_window_extent() for text in throughput.get_yticklabels()]
    assert names[3].height > 2.5 * names[0].height  # in three lines
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(names))


def test_six_curves_one_far_off_leave_legend_and_ticks_apart() -> None:
    figure = quickstart.figure(load.frame(RESULTS / "zero3_3b_best.jsonl"))
    figure.draw_without_rendering()
    loss, difference = figure.axes[2:]
    assert not quickstart.covered(loss)
    assert difference.get_yscale() == "symlog"
    ticks = sorted((text.get_window_extent() for text in difference.get_yticklabels()), key=lambda box: float(box.y0))
    assert len(ticks) == 5
    assert all(upper.y0 > lower.y1 for lower, upper in itertools.pairwise(ticks))


def test_long_names_below_the_losses_stay_on_the_page() -> None:
    names = [f"on an on an on an on an on an on {number}" for number in range(6)]
    figure = convergence.figure(load.from_rows([row("zero3", [1.0], preset=name, cell=name, losses=curve(9)) for name in names]))
    figure.draw_without_rendering()
    (told,) = figure.legends
    box = told.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.axes[0].get_window_extent().height > 0.7 * figure.dpi
    assert len(told.get_texts()) == 6


def drawn_points(axes: Axes) -> np.ndarray:
    """Every curve in pixels, densely along its segments."""
    found = []
    for line in axes.lines:
        points = axes.transData.transform(np.asarray(line.get_xydata(), dtype=np.float64))
        for first, second in itertools.pairwise(points):
            found.append(first + np.linspace(0, 1, 50)[:, None] * (second - first))
        found.append(points)
    every = np.concatenate(found)
    return every[np.isfinite(every).all(axis=1)]


def slow_rows() -> list[Row]:
    """Losses that fall in a straight line from corner to corner."""
    falling = [8.0 - 0.2 * step for step in range(30)]
    return [row(system, [1.0, 1.1, 1.2], losses=falling, agrees=True) for system in ("in_memory", "megatrain", "zero3", "fsdp2")]


def rising_rows() -> list[Row]:
    return [row("in_memory", [1.0], losses=[2.0 + 0.1 * step**1.5 for step in range(30)]), row("zero3", [2.0], losses=[2.0, 4.0])]


@pytest.mark.parametrize(
    "rows",
    [list(read_rows(RESULTS / "h200_3b.jsonl")), h200_rows(), cpu_rows(), slow_rows(), rising_rows(), many_rows()],
    ids=["committed", "h200", "cpu", "straight", "rising", "many"],
)
def test_the_legend_covers_no_curve(rows: list[Row], tmp_path: Path) -> None:
    figure = quickstart.figure(load.from_rows(rows))
    style.save(figure, tmp_path / "legend")
    axes = figure.axes[2]
    legend = axes.get_legend()
    assert legend is not None
    box, panel = legend.get_window_extent(), axes.get_window_extent()
    points = drawn_points(axes)
    inside = (points > [box.x0, box.y0]).all(axis=1) & (points < [box.x1, box.y1]).all(axis=1)
    assert not inside.any()
    assert panel.x0 <= box.x0 < box.x1 <= panel.x1 + 1
    assert not any(box.overlaps(text.get_window_extent()) for text in axes.texts)


@pytest.mark.parametrize(
    ("system", "presets", "expected"),
    [
        ("megatrain", ["stream"], [0]),
        ("megatrain", ["stream", "fast"], [1, 0]),
        ("megatrain", ["paper", "0_paper", "fast", "1_overlap"], [3, 1, 0, 2]),
        ("megatrain", ["fast", "fast", "stream"], [0, 2, 1]),
        ("zero3", ["compiled", None], [1, 0]),
        ("zero3", ["kept compiled", "compiled", None], [2, 1, 0]),
        ("fsdp2", [None, "compiled"], [0, 1]),
        ("fsdp2", ["kept compiled", "compiled"], [2, 1]),
        ("superoffload", ["kept compiled", "compiled"], [2, 1]),
        ("in_memory", ["kept compiled", None], [2, 0]),
        ("fsdp2", [None, None], [0, 1]),
    ],
)
def test_a_preset_has_its_look_wherever_it_stands_beside_others(
    system: str, presets: list[str | None], expected: list[int]
) -> None:
    assert style.variants(system, presets) == expected


def test_variants_of_one_system_are_told_apart() -> None:
    assert len({style.look("zero3", variant).fill for variant in range(5)}) == 5, "as many as have rows"
    looks = [style.look("megatrain", variant) for variant in range(4)]
    assert looks[0] == style.SYSTEMS["megatrain"]
    assert {one.marker for one in looks} == {"s"}
    for first, second in itertools.pairwise(looks):
        assert lightness(second.color) - lightness(first.color) > 5
        assert (first.line, first.fill) != (second.line, second.fill)
    axes = quickstart.figure(load.from_rows(many_rows())).axes
    curves = [line for line in axes[2].lines if str(line.get_label()).startswith("MegaTrain")]
    assert [str(line.get_label()) for line in curves] == ["MegaTrain paper", "MegaTrain stream", "MegaTrain fast"]
    assert [(line.get_linestyle(), line.get_fillstyle()) for line in curves] == [("--", "right"), ("-.", "left"), ("-", "full")]
    dashes = curves[0]._unscaled_dash_pattern[1]  # type: ignore[attr-defined]
    assert dashes[0] == 7, "longer than a prediction's"
    assert [str(line.get_color()) for line in curves] == [style.look("megatrain", variant).color for variant in (3, 1, 0)]
    faces = [to_hex(patch.get_facecolor()) for patch in axes[0].patches]
    hatches = [patch.get_hatch() for patch in axes[0].patches]
    assert faces == [style.look("megatrain", variant).color for variant in (3, 1, 0)] + [style.SYSTEMS["zero3"].color]
    assert hatches[1:3] == ["//////", "///"]


def test_what_was_not_measured_is_hollow_dashed_or_dotted() -> None:
    for variant in range(12):
        measured = style.curve("megatrain", variant)
        assert "markerfacecolor" not in measured
        assert measured["linestyle"] not in ("--", ":", style.predicted_point("megatrain")["linestyle"])
        assert style.bar("megatrain", variant)["facecolor"] != "none"
    for looks, line in ((style.predicted_bar("zero3"), "--"), (style.claimed_bar("zero3"), ":")):
        assert (looks["facecolor"], looks["linestyle"], looks["edgecolor"]) == ("none", line, style.SYSTEMS["zero3"].color)
    for point in (style.predicted_point("zero3"), style.claimed_point("zero3")):
        assert (point["markerfacecolor"], point["marker"]) == ("white", style.SYSTEMS["zero3"].marker)


def test_difference_is_linear_where_all_agree() -> None:
    axes = quickstart.figure(load.from_rows(h200_rows()[:4])).axes[3]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim() == (-1.25 * LOSS_TOLERANCE, 1.25 * LOSS_TOLERANCE)


def test_cpu_run_has_only_host_memory() -> None:
    figure = quickstart.figure(load.from_rows(cpu_rows()))
    assert figure.axes[1].get_title(loc="left") == "Peak host memory"
    assert set(bars(figure.axes[1])) == {"in memory host", "MegaTrain host", "FSDP2 host"}
    assert figure.axes[0].get_title(loc="left") == "Throughput"
    assert words(figure.axes[0]) == ["1,780", "1,365", "1,360", "unsupported"]
    assert not figure.axes[1].collections, "the plan of a small model beside what torch takes would look like a bad forecast"


@pytest.mark.parametrize(
    "rows",
    [
        [row("zero3", status="error", reason="boom")],
        [row("in_memory", status="wont_fit", plan=plan(236 * GIB, GIB)), row("megatrain", [5.9], losses=curve(1))],
        [row("in_memory", [1.0], losses=[2.0, 1.0]), row("megatrain", [1.0], losses=[2.0, 1.0], agrees=True)],
        [row("in_memory", [1.0], losses=[2.0, 1.0]), row("megatrain", status="nonfinite", losses=[float("nan")])],
    ],
    ids=["nothing measured", "no reference", "identical losses", "first loss not finite"],
)
def test_sparse_groups_still_draw(rows: list[Row], tmp_path: Path) -> None:
    figure = quickstart.figure(load.from_rows(rows))
    assert len(figure.axes[0].get_yticks()) == len(rows)
    style.save(figure, tmp_path / "sparse")


def test_files_are_reproducible_and_fonts_embedded(tmp_path: Path) -> None:
    first = style.save(quickstart.figure(load.from_rows(cpu_rows())), tmp_path / "a.b")
    second = style.save(quickstart.figure(load.from_rows(cpu_rows())), tmp_path / "again")
    assert [path.name for path in first] == ["a.b.png", "a.b.pdf"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    pdf = first[1].read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf
