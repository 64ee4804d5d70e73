"""Figures of throughput: data, axes, units, series and marks; never pixels."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from analysis import style
from analysis.figures import throughput
from sweeps.result import Row
from tests.unit.drawn import figure_of, legend, lines, points
from tests.unit.study_rows import grid_rows, many_studies, scaled, size_rows, windows
from tests.unit.test_analysis_load import cpu_rows, h200_rows, row


def test_throughput_against_model_size() -> None:
    figure = figure_of(throughput, size_rows(), "num_params")
    (axes,) = figure.axes
    assert figure.get_size_inches()[0] == style.COLUMN_IN
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("TFLOPS (6P)", "parameters (10⁹)\n(32 × 1024 tokens)")
    fast = points(lines(axes)["MegaTrain fast"])
    assert fast == [(1e9, pytest.approx(6e9 * 32768 / 1e12)), (2e9, pytest.approx(6e9 * 32768 / 1e12))]
    guess = lines(axes)["MegaTrain fast predicted"]
    assert points(guess)[-1] == (8e9, pytest.approx(6 * 8e9 * 3276.8 / 1e12))
    assert (to_hex(str(guess.get_markerfacecolor())), guess.get_linestyle()) == ("#ffffff", "--")
    assert guess.get_markevery() == slice(1, None), "the measured point it starts from is not drawn hollow"
    refused = lines(axes)["ZeRO-3 wont_fit"]
    assert points(refused) == [(8e9, 0)]
    assert refused.get_transform().transform((8e9, 0))[1] < axes.bbox.y0  # type: ignore[index]  # below the axis: no speed
    assert [line.get_marker() for line in axes.lines if line.get_color() == style.ALARM] == ["+"]
    assert legend(figure) == ["MegaTrain fast", "MegaTrain stream", "ZeRO-3", "predicted, not run", "does not fit"]
    assert axes.get_ylim()[0] == 0


def test_throughput_has_a_panel_for_each_thing_that_varies() -> None:
    rows = [scaled(batch, 1024, 0.5 + batch / 8) for batch in (2, 8, 32)]
    rows += [scaled(32 * 1024 // length, length, 4.6) for length in (4096, 32768)]
    figure = figure_of(throughput, [*rows, *size_rows()])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Model size", "Batch", "Context"]
    assert figure.get_size_inches()[0] == style.PAGE_IN
    batch, context = figure.axes[1:]
    assert batch.get_xlabel() == "sequences a step\n(qwen2.5-3b, 1024 tokens each)"
    assert batch.get_ylabel() == "tokens / s"
    assert [x for x, _ in points(lines(batch)["MegaTrain"])] == [2, 8, 32]
    assert context.get_xlabel() == "tokens a sequence\n(qwen2.5-3b, 32,768 tokens)"
    assert [x for x, _ in points(lines(context)["MegaTrain"])] == [1024, 4096, 32768]
    assert [context.xaxis.get_major_formatter()(value) for value in (1024, 32768)] == ["1K", "32K"]


def test_a_line_of_throughput_joins_one_study_and_ticks_are_thinned() -> None:
    size, batch, context = figure_of(throughput, many_studies()).axes
    fast = [points(line) for line in size.lines if line.get_label() == "MegaTrain fast" and line.get_linestyle() != "None"]
    assert [len(line) for line in fast] == [6, 5, 5], "model_size, depth (their largest have no room), width"
    assert all(line == sorted(line) for line in fast)
    for axes, ends in ((size, ("0.494", "72.7")), (batch, ("2", "256")), (context, ("1K", "512K"))):
        named = [axes.xaxis.get_major_formatter()(value) for value in axes.xaxis.get_majorticklocs()]
        assert (named[0], named[-1]) == ends
        assert "" in named
        assert len([name for name in named if name]) >= 4


def test_points_of_several_studies_are_not_joined() -> None:
    rows = [row("megatrain", windows(billions), experiment=f"h200_{billions}b", cell=str(billions), model=str(billions),
                num_params=billions * 10**9) for billions in (3, 7)]  # fmt: skip
    (axes,) = figure_of(throughput, rows).axes
    drawn = [line for line in axes.lines if line.get_label() == "MegaTrain"]
    assert [[x for x, _ in points(line)] for line in drawn] == [[3e9], [7e9]]
    assert {line.get_linestyle() for line in drawn} == {"None"}


def test_lone_points_that_would_overlap_stand_side_by_side_inside_the_axes() -> None:
    """At both ends of an axis, at their own heights, where places leave room; what a line joins stays."""
    systems = ("published_megatrain", "zero3", "fsdp2", "superoffload", "zenflow")

    def rows_at(places: tuple[int, ...]) -> list[Row]:
        study = [("megatrain", "model_size", place) for place in places]
        lone = [(system, str(place), place) for system in systems for place in (places[0], places[-1])]
        return [
            row(system, windows(0.1 * place), experiment=experiment, cell=f"{system}{place}", num_params=place * 10**9)
            for system, experiment, place in (*study, *lone)
        ]

    figure = figure_of(throughput, rows_at((1, 64)), "num_params")
    assert throughput.SIDE_BY_SIDE in figure.get_suptitle()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    drawn = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    plain = np.vstack([axes.transData.transform(points(line)) for line in drawn]) * 72 / figure.dpi
    shown = np.vstack([line.get_transform().transform(points(line)) for line in drawn]) * 72 / figure.dpi
    moved = ~np.isclose(shown[:, 0], plain[:, 0])
    assert (len(moved), moved.sum()) == (12, 10), "all but the line's two"
    assert shown[:, 1] == pytest.approx(plain[:, 1])
    assert (np.abs(shown[:, None] - shown[None]).max(axis=-1) + np.diag([99.0] * 12)).min() > 3.8, "a marker is 3.8 points wide"
    edges = axes.get_window_extent().get_points() * 72 / figure.dpi
    assert ((shown - 1.9 >= edges[0]) & (shown + 1.9 <= edges[1])).all()
    for rows in (rows_at(tuple(2**power for power in range(10))), size_rows()):  # no room between the places; no overlap
        assert throughput.SIDE_BY_SIDE not in figure_of(throughput, rows, "num_params").get_suptitle()


def test_a_panel_without_a_line_has_room_for_more_points_at_a_place() -> None:
    """As of all systems at three sizes on one kind of machine; beside a line they would look like another place's."""
    names = [f"preset {number}" for number in range(10)]

    def apart(*study: Row) -> int:
        rows = [
            row("zero3", windows(0.1 * place), preset=name, cell=f"{name}{place}", experiment=str(place), num_params=place * 10**9)
            for name in names
            for place in (3, 8, 15)
        ]
        (axes,) = figure_of(throughput, [*rows, *study], "num_params").axes
        drawn = [line for line in axes.lines if str(line.get_label()).startswith("ZeRO-3") and points(line)[0][0] == 3e9]
        return len({round(line.get_transform().transform(points(line))[0][0], 3) for line in drawn})

    line = [
        row("megatrain", windows(place), cell=f"m{place}", experiment="model_size", num_params=place * 10**9) for place in (3, 8)
    ]
    assert apart() > apart(*line)


def test_throughput_takes_the_fastest_measurement_and_no_ablations() -> None:
    """Whatever was measured last: a slower host, a setting that did not help, a cell that found no room."""
    old = scaled(2, 1024, 9.0, started_at="2026-11-01T00:00:00Z", git_commit="old")
    new = scaled(2, 1024, 1.5, started_at="2026-12-01T00:00:00Z", git_commit="new")
    refused = scaled(2, 1024, 1.0, started_at="2026-12-02T00:00:00Z", status="wont_fit")
    wrong = scaled(2, 1024, 0.5, started_at="2026-12-03T00:00:00Z", agrees=False)
    rows = [scaled(2, 1024, 1.0), scaled(8, 1024, 2.0), old, new, refused, wrong]
    axes = figure_of(throughput, [*rows, *grid_rows()]).axes[0]
    assert points(lines(axes)["MegaTrain"]) == [(2, pytest.approx(2048)), (8, pytest.approx(4096))]
    assert set(lines(axes)) == {"MegaTrain"}


def test_throughput_refuses_what_a_line_cannot_show() -> None:
    with pytest.raises(ValueError, match="the same in all rows"):
        figure_of(throughput, h200_rows())
    with pytest.raises(ValueError, match="a line never spans two"):
        figure_of(throughput, [*h200_rows(), *cpu_rows()])


def test_a_long_legend_is_inside_the_figure_and_says_whose_numerics_differ() -> None:
    names = [name for name in style.SYSTEMS if name != "in_memory"]
    presets = ("kept compiled", "a preset with a long name")
    agreed = {("superoffload", 3): False, ("zenflow", 7): False, ("zenflow", 3): None}

    def point(name: str, preset: str, place: int) -> Row:
        told = {"experiment": str(place), "cell": f"{name}{preset}{place}", "num_params": place * 10**9}
        return row(name, windows(0.1 * place), preset=preset, agrees=agreed.get((name, place), True), **told)

    rows = [point(name, preset, place) for name in names for preset in presets for place in (3, 7)]
    figure = figure_of(throughput, rows)
    figure.draw_without_rendering()
    (told,) = figure.legends
    box, page = told.get_window_extent(), figure.bbox
    assert page.x0 <= box.x0 < box.x1 <= page.x1
    assert page.y0 <= box.y0 < box.y1 < figure.axes[0].get_window_extent().y0
    assert figure.axes[0].get_window_extent().height > 1.1 * figure.dpi
    entries = [entry.replace("\n", " ") for entry in legend(figure)]
    assert {entry for entry in entries if "numerics" in entry} == {
        f"{style.name_of(name)} {preset} (numerics differ in part)" for name in ("superoffload", "zenflow") for preset in presets
    }
