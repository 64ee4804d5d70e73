"""Figures of memory, ablations and convergence: data, axes, units, series and marks; never pixels."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from analysis import load, style
from analysis.figures import ablation, convergence, memory, paper, throughput
from analysis.make import RESULTS
from sweeps.result import Row, read_rows
from tests.unit.drawn import figure_of, legend, lines, patches, points
from tests.unit.study_rows import (
    batch_rows,
    capped_rows,
    deep_rows,
    factor_rows,
    grid_rows,
    ladder_rows,
    many_studies,
    precision_rows,
    scaled,
    size_rows,
    windows,
)
from tests.unit.test_analysis_figures import words
from tests.unit.test_analysis_load import GIB, H200, cpu_rows, curve, h200_rows, row


def test_a_study_of_scale_draws_every_cell_and_tells_its_systems_apart() -> None:
    figure = throughput.study_figure(load.from_rows(capped_rows(16 * 10**9, 24 * 10**9, 48 * 10**9)))
    (axes,) = figure.axes
    assert (axes.get_title(loc="left"), axes.get_ylabel()) == ("Device memory", "tokens / s")
    assert [x / 1e9 for x, _ in points(lines(axes)["MegaTrain stream"])] == [16, 24, 48]
    assert [x / 1e9 for x, _ in points(lines(axes)["ZeRO-3"])] == [24, 48]
    assert points(lines(axes)["ZeRO-3 oom_device"])[0][0] == 16e9
    assert legend(figure) == ["MegaTrain fast", "MegaTrain stream", "ZeRO-3", "OOM (device)"]
    own = {
        name: style.curve(system, variant)
        for name, system, variant in (("MegaTrain stream", "megatrain", 1), ("ZeRO-3", "zero3", 0))
    }
    for name, looks in own.items():
        assert (lines(axes)[name].get_color(), lines(axes)[name].get_marker()) == (looks["color"], looks["marker"])
    deep = throughput.study_figure(load.from_rows(deep_rows()))
    assert deep.axes[0].get_xlabel() == "parameters (10⁹)\n(32 × 1024 tokens)"
    assert deep.get_suptitle() == "qwen2.5-deep, batch 32 × 1024 tokens\nNVIDIA H200, 16 cores, 134 GB host"
    assert [x for x, _ in points(lines(deep.axes[0])["ZeRO-3 oom_host"])] == [5.6e9]
    guess = points(lines(throughput.study_figure(load.from_rows(batch_rows())).axes[0])["MegaTrain stream predicted"])
    assert guess[-1] == (32, pytest.approx(4000))


def test_bars_of_several_systems_have_their_looks() -> None:
    figure = ablation.figure(load.from_rows(capped_rows(16 * 10**9, None)))
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "MegaTrain stream / 16 GB"
    assert labels[-2:] == ["ZeRO-3 / 16 GB", "ZeRO-3 / whole device"]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 3
    assert "OOM (device)" in words(axes)


def test_memory_by_kind_with_the_plan_of_what_was_refused() -> None:
    refused = row("fsdp2", status="wont_fit", plan={"device": {"weights": 10**9}, "host": {"moments": 10**11, "odd": 10**11}})
    figure = figure_of(memory, [*h200_rows()[:3], refused])
    device, host = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Device, observed above plan", "Host, observed above plan"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"peak, GB (10⁹ bytes)"}
    assert patches(device)["ZeRO-3 observed"].get_width() == pytest.approx(69.6)
    assert patches(device)["ZeRO-3 observed"].get_hatch() == style.SYSTEMS["zero3"].hatch
    assert patches(host)["MegaTrain weights"].get_width() == pytest.approx(41 * GIB / 1e9)
    moments, other = patches(host)["FSDP2 moments"], patches(host)["FSDP2 other"]
    assert (moments.get_width(), other.get_x(), other.get_width()) == (100, 100, 100)
    assert "FSDP2 observed" not in patches(host)
    assert words(device).count("does not fit") == 1
    assert [line.get_xdata()[0] for line in host.lines if line.get_label() == "limit"] == [134]  # type: ignore[index]
    assert legend(figure) == ["weights", "Adam moments", "other"]


def test_memory_of_a_cpu_run_has_the_host_alone() -> None:
    (axes,) = figure_of(memory, cpu_rows()).axes
    assert axes.get_title(loc="left") == "Host, observed"
    assert set(patches(axes)) - {"_nolegend_"} == {"in memory observed", "MegaTrain observed", "FSDP2 observed"}


def test_kinds_keep_their_order_and_unknown_ones_are_other() -> None:
    found = memory.kinds({"head": 1, "gradients": 2, "optimizer": 6, "weights": 3, "setup": 4, "master": 0})
    assert list(found.items()) == [("weights", 3), ("optimizer", 6), ("gradients", 2), ("other", 5)]


def cell_words(axes: Axes) -> dict[tuple[int, int], str]:
    return {(round(text.get_position()[0]), round(text.get_position()[1])): text.get_text() for text in axes.texts}


def test_heat_map_of_depth_and_streams() -> None:
    figure = figure_of(ablation, grid_rows())
    (axes,) = figure.axes
    assert figure.get_size_inches()[0] == style.COLUMN_IN
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("streams", "depth (slots)")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "3"]
    told = cell_words(axes)
    assert told[1, 1] == "fastest\n8,192"
    assert told[2, 0].startswith("−33.3% ±")
    assert told[2, 0].endswith("\n5,461")
    assert told[0, 1] == "numerics\ndiffer"
    assert told[0, 2] == "OOM\n(device)"
    assert told[1, 2] == "8,000\npredicted"
    boxes = patches(axes)
    guess = boxes["depth 3, streams 2"]
    assert (to_hex(guess.get_facecolor()), guess.get_linestyle()) == ("#ffffff", "--")
    assert boxes["depth 3, streams 1"].get_hatch() == "////"
    shades = [sum(boxes[f"depth {depth}, streams 3"].get_facecolor()[:3]) for depth in (1, 2)]
    assert shades[0] < shades[1], "the more is lost, the darker"
    assert "qwen2.5-3b, batch 32 × 1024 tokens\nNVIDIA H200" in figure.get_suptitle()


def test_ladder_is_cumulative() -> None:
    (axes,) = figure_of(ablation, ladder_rows()).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["paper", "+ own slabs", "+ overlap", "+ fast"]
    assert words(axes) == ["1.00×", "1.20× (+20.0%)", "1.50× (+25.0%)", "3.00× (+100.0%)"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([32768 / step for step in (6, 5, 4, 2)])  # type: ignore[attr-defined]
    assert axes.get_xlabel() == "tokens / s\n(95% interval of 3 windows)"


def test_bars_of_any_factors() -> None:
    rows = factor_rows()
    rows[3] = row("megatrain", status="oom_host", experiment=rows[3].experiment, cell="3", config=rows[3].config)
    rows[2] = row(
        "megatrain", status="wont_fit", plan={"step_s": 4.0}, experiment=rows[2].experiment, cell="2", config=rows[2].config
    )
    figure = figure_of(ablation, rows)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["on / off", "on / 1.0", "off / off", "off / 1.0"]
    assert words(axes) == ["−33.3%", "fastest", "OOM (host)", "predicted"]
    guess = patches(axes)["optimizer overlap off, clip norm 1.0"]
    assert (guess.get_facecolor()[3], guess.get_linestyle(), guess.get_hatch()) == (0, "--", None)
    assert (
        figure.get_suptitle()
        .replace("\n", " ")
        .endswith("rows: optimizer overlap / clip norm; at the bars: change from the fastest")
    )


def test_what_is_no_ablation_is_refused() -> None:
    for rows in (h200_rows(), size_rows()):
        with pytest.raises(ValueError, match="no ablation"):
            figure_of(ablation, rows)
    with pytest.raises(ValueError, match="no study of scale"):
        throughput.study_figure(load.from_rows(grid_rows()))


def test_convergence_shows_every_loss_and_the_difference() -> None:
    figure = figure_of(convergence, h200_rows())
    assert figure.get_size_inches()[0] == style.COLUMN_IN
    loss, difference = sorted(figure.axes, key=lambda axes: -axes.get_position().y0)
    assert [line[1] for line in points(lines(loss)["FSDP2"])] == curve(40, 2e-4)
    assert difference.get_title(loc="left") == "Difference from in memory"
    assert (loss.get_ylabel(), difference.get_ylabel(), difference.get_xlabel()) == (
        "nats / token",
        "nats / token",
        "optimizer step",
    )
    assert set(lines(difference)) == set(lines(loss)) - {"in memory"}
    assert legend(figure) == list(lines(loss))
    assert words(loss) == ["non-finite loss"]


def test_convergence_without_a_reference_says_so() -> None:
    rows = [row("megatrain", [1.0], losses=curve(9)), row("fsdp2", [1.0], losses=curve(9, 1e-3))]
    (axes,) = figure_of(convergence, rows).axes
    assert axes.get_xlabel() == "optimizer step (no reference was measured)"


def test_convergence_of_a_study_is_against_its_own_fp32_master() -> None:
    figure = convergence.study_figure(load.from_rows(precision_rows()))
    loss, difference = sorted(figure.axes, key=lambda axes: -axes.get_position().y0)
    assert list(lines(loss)) == legend(figure) == ["split", "fp32", "bf16"]
    assert [y for _, y in points(lines(loss)["bf16"])] == curve(12, 0.9)
    assert difference.get_title(loc="left") == "Difference from split"
    assert set(lines(difference)) == {"fp32", "bf16"}
    assert len({line.get_color() for line in lines(loss).values()}) == 3
    assert figure.get_suptitle().endswith("lines: master")


LARGE = H200 | {"num_gpus": 4, "num_cores": 64, "host_bytes": 550_000_000_000}


def committed() -> list[Row]:
    return [one for name in ("h200_3b", "h200_7b") for one in read_rows(RESULTS / f"{name}.jsonl")]


def crowded() -> list[Row]:
    """The published widths: four of five sizes near each other."""
    sizes = (2_176_486_144, 16_317_391_104, 21_891_769_984, 28_281_809_920, 43_508_872_960)
    return [row("megatrain", windows(1.0), experiment="width", cell=str(size), num_params=size) for size in sizes]


@pytest.mark.parametrize(
    "figure",
    [
        figure_of(throughput, size_rows()),
        figure_of(throughput, committed()),
        figure_of(throughput, many_studies()),
        figure_of(throughput, many_studies(), "num_params"),
        figure_of(throughput, [scaled(batch, 1024, batch / 8, machine=LARGE) for batch in (8, 32)]),
        figure_of(paper, [one for path in sorted(RESULTS.glob("*.jsonl")) for one in read_rows(path)]),
        figure_of(paper, grid_rows()),
        figure_of(ablation, grid_rows()),
        figure_of(ablation, ladder_rows()),
        figure_of(ablation, factor_rows()),
        throughput.study_figure(load.from_rows(capped_rows(16 * 10**9, 24 * 10**9, 141 * 10**9))),
        throughput.study_figure(load.from_rows(crowded())),
        ablation.figure(load.from_rows(capped_rows(16 * 10**9, None))),
        convergence.study_figure(load.from_rows(precision_rows())),
        figure_of(memory, committed()[5:]),
        figure_of(convergence, committed()[:5]),
    ],
    ids=[
        "sizes",
        "committed sizes",
        "many studies",
        "one panel of many",
        "one panel",
        "paper",
        "paper of a deep loss",
        "grid",
        "ladder",
        "factor",
        "caps",
        "crowded sizes",
        "systems",
        "losses",
        "memory",
        "convergence",
    ],
)
def test_no_words_overlap_or_leave_the_page(figure: Figure, tmp_path: Path) -> None:
    with style.context():
        figure.draw_without_rendering()
        texts = list(figure.texts)
        texts += [text for axes in figure.axes for text in [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title]]  # type: ignore[attr-defined]
        for axes in figure.axes:
            (x0, x1), (y0, y1) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
            texts += [
                tick.label1 for tick in axes.xaxis.get_major_ticks() if x0 <= tick.get_loc() <= x1 and tick.label1.get_visible()
            ]
            texts += [
                tick.label1 for tick in axes.yaxis.get_major_ticks() if y0 <= tick.get_loc() <= y1 and tick.label1.get_visible()
            ]
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    boxes += [("legend", one.get_window_extent()) for one in figure.legends]
    page = figure.bbox
    for word, box in boxes:
        assert page.x0 - 1 <= box.x0, word
        assert box.x1 <= page.x1 + 1, word
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        assert not first.padded(-1).overlaps(second.padded(-1)), (one, other)
    png, pdf = style.save(figure, tmp_path / "figure")
    assert b"/Type3" not in pdf.read_bytes()
    assert png.stat().st_size > 5000
