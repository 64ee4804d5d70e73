"""The figure of the streams and its commands: bars, axes, units, shares, titles and files; never pixels."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from analysis import make, report, style, timeline
from analysis.figures import timeline as drawing
from analysis.timeline import Timeline
from tests.unit.test_analysis_load import row, save
from tests.unit.test_analysis_timeline import ROWS, put, step_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def both() -> Timeline:
    measured, shorter = step_of(ROWS), [[lane, label, 0.8 * a, 0.8 * b] for lane, label, a, b in ROWS]
    return Timeline(name="fast", measured=measured, predicted=step_of(shorter, 8.0))


@pytest.fixture
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(style.RC, "savefig.dpi", 50)


def spans(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Label of a series -> (start, end) of its bars."""
    found = {}
    for series in axes.collections:
        if isinstance(series, PolyCollection) and not str(series.get_label()).startswith("_"):
            xs = [path.vertices[:, 0] for path in series.get_paths()]
            found[str(series.get_label())] = [(float(x.min()), float(x.max())) for x in xs]
    return found


def words(axes: Axes) -> list[str]:
    return [child.get_text() for child in axes.get_children() if isinstance(child, Annotation)]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_measured_above_predicted_on_one_axis_of_seconds(both: Timeline) -> None:
    figure = drawing.figure([both])
    measured, predicted = figure.axes
    assert figure.get_size_inches()[0] == style.PAGE_IN
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["fast, measured: step 10.0 s", "fast, predicted: step 8.00 s (−20.0%)"]
    assert measured.get_xlim() == predicted.get_xlim() == (0, 10)
    assert measured.get_position().y0 > predicted.get_position().y0
    assert predicted.get_xlabel() == "seconds since the step's embedding began"
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "load (H2D)", "store (D2H)", "CPU"]
        assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert legend(figure) == ["forward", "head and loss", "recompute + backward", "AdamW", "load weights", "store gradients"]


def test_bars_are_the_intervals(both: Timeline) -> None:
    measured, predicted = map(spans, drawing.figure([both]).axes)
    assert measured["compute forward"] == [(0.0, 0.5), (0.5, 2.0)]
    assert measured["compute head"] == [(2.5, 4.0)]
    assert measured["compute backward_recomputing"] == [(4.0, 6.0), (6.0, 8.0)]
    assert measured["compute adamw"] == [(8.5, 9.0)]
    assert measured["h2d load"] == [(1.0, 2.5), (2.5, 3.0)]
    assert measured["d2h store"] == [(4.0, 5.0)]
    assert measured["cpu adamw"] == [(0.0, 1.5), (9.5, 10.0)]
    assert measured["compute step"] == [(0.0, 10.0)]
    assert predicted["compute step"] == [(0.0, 8.0)]
    assert predicted["d2h store"] == [pytest.approx((3.2, 4.0))]
    assert not [label for label in measured if label.endswith("other")], "bookkeeping that takes no time is not drawn"


def test_a_lane_with_bookkeeping_alone_names_no_work() -> None:
    idle = step_of([["compute", "compute tail 1", 0.0, 9.0], ["cpu", "check -1", 9.0, 9.001]])
    figure = drawing.figure([Timeline(name="all on the device", measured=idle)])
    assert set(spans(figure.axes[0])) == {"compute step", "compute head", "cpu step"}
    assert legend(figure) == ["head and loss"]
    assert words(figure.axes[0])[3:6] == ["1.0 ms", "<1%", "0%"]


def test_a_line_parts_bars_that_touch(both: Timeline) -> None:
    axes = drawing.figure([both]).axes[0]
    lines = [line for line in axes.collections if isinstance(line, LineCollection)]
    assert sorted(float(segment[0][0]) for line in lines for segment in line.get_segments()) == [0.5, 2.5, 6.0]


def test_seconds_and_shares_beside_each_lane(both: Timeline) -> None:
    measured, predicted = map(words, drawing.figure([both]).axes)
    lanes = [["8.01 s", "80%", "—"], ["2.00 s", "20%", "75%"], ["1.00 s", "10%", "100%"], ["2.00 s", "20%", "75%"]]
    assert measured == [*itertools.chain(*lanes), "busy", "of step", "hidden"]
    assert predicted[:6] == ["6.41 s", "80%", "—", "1.60 s", "20%", "75%"]
    assert predicted[-1] == "hidden: share of busy\nwhile compute works"


def test_shares_round_to_nothing_and_everything_only_when_they_are() -> None:
    assert [timeline.share(part) for part in (0.0, 0.001, 0.5, 0.998, 1.0)] == ["0%", "<1%", "50%", ">99%", "100%"]
    assert [timeline.digits(seconds, 3) for seconds in (0.9936, 1.0, 12.0, 123.4)] == ["0.994", "1.00", "12.0", "123"]
    step = step_of([["compute", "compute tail 1", 0.0, 0.004]])
    assert drawing.told(step, "compute") == ("4.0 ms", "<1%", "—")


def test_several_steps_share_the_axis_and_fewer_streams_have_fewer_lanes(both: Timeline) -> None:
    two = Timeline(
        name="paper", measured=step_of([["copy", "load 1", 0.0, 1.0], ["compute", "compute recompute 1", 1.0, 2.0]], 12.0)
    )
    one = Timeline(name="serial", measured=step_of([["compute", "store 1", 0.0, 1.0], ["elsewhere", "dance 1", 1.0, 2.0]], 3.0))
    figure = drawing.figure([two, both, one])
    titles = [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes]
    assert titles == ["paper, measured", "fast, measured", "fast, predicted", "serial, measured"]
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 12)}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["compute", "all copies"]
    assert [label.get_text() for label in figure.axes[3].get_yticklabels()] == ["compute", "elsewhere"]
    assert legend(figure)[:2] == ["forward", "recomputed forward"]
    assert legend(figure)[-1] == "other"


def test_no_words_overlap(both: Timeline) -> None:
    name = "MegaTrain stream, checkpoint_interval=4, gradient_slabs=12"
    figure = drawing.figure([Timeline(name=name, measured=both.measured, predicted=both.predicted), both])
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in [*axes.texts, axes._left_title, axes.xaxis.label]]  # type: ignore[attr-defined]
    texts += itertools.chain.from_iterable([*(axes.get_yticklabels() for axes in figure.axes), figure.axes[-1].get_xticklabels()])
    boxes = [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]
    boxes.append(figure.legends[0].get_window_extent())
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (one, other)
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)


def test_the_command_prints_lanes_and_writes_both_files(tmp_path: Path) -> None:
    path = put(tmp_path / "0123456789ab-megatrain.timeline.json")
    (tmp_path / "0123456789ab-megatrain.json").write_text("{}")
    command = [sys.executable, "-m", "analysis.figures.timeline", str(path), "--label", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert lines[0] == "fast: measured step 10.000 s, predicted step 8.000 s (−20.0%)"
    assert lines[1].split() == ["measured", "predicted"]
    assert lines[2].split() == ["lane", *["busy", "s", "hidden", "idle", "s"] * 2]
    assert lines[3].split() == ["compute", "8.0100", "—", "1.9900", "6.4080", "—", "1.5920"]
    assert lines[4].split()[-6:] == ["2.0000", "75%", "8.0000", "1.6000", "75%", "6.4000"]
    written = [tmp_path / f"0123456789ab-megatrain.timeline.{kind}" for kind in ("png", "pdf")]
    assert lines[-3:-1] == list(map(str, written))
    assert lines[-1].startswith(f"profiler trace: {tmp_path / '0123456789ab-megatrain.json'} (open it in ui.perfetto.dev")
    assert all(one.stat().st_size > 5000 for one in written)
    assert b"/Type3" not in written[1].read_bytes()


@pytest.mark.usefixtures("_coarse")
def test_the_command_stacks_files_and_counts_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(put(tmp_path / f"s.{name}.timeline.json", predicted=None)) for name in ("paper", "fast")]
    assert drawing.main([*files, "-o", str(tmp_path / "deep" / "overlap")]) == 0
    out = capsys.readouterr().out
    assert "paper: measured step 10.000 s\n" in out
    assert "fast: measured step 10.000 s\n" in out
    assert "profiler" not in out
    assert out.splitlines()[-2:] == [str(tmp_path / "deep" / f"overlap.{kind}") for kind in ("png", "pdf")]
    assert drawing.main([*files, "--label", "one"]) == 2
    assert capsys.readouterr().err == "error: --label: got 1 for 2 files; give one for each, or none\n"


@pytest.mark.usefixtures("_coarse")
def test_make_rebuilds_timelines_to_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "h200.fast.timeline.json")
    put(tmp_path / "h200.paper.timeline.json", scale=2.0)
    put(tmp_path / "alone.timeline.json", predicted=None)
    assert make.main(["--results", str(tmp_path)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    stems = ["alone.timeline", "h200.fast.timeline", "h200.paper.timeline", "h200.timelines"]
    assert [path.name for path in written] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")]
    before = [path.read_bytes() for path in written]
    assert make.main(["--results", str(tmp_path)]) == 0
    assert [path.read_bytes() for path in written] == before


@pytest.mark.usefixtures("_coarse")
def test_the_report_draws_the_timelines_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "traces" / "0123456789ab-megatrain.timeline.json")
    (tmp_path / "traces" / "0123456789ab-megatrain.json").write_text("{}")
    rows = save(tmp_path / "rows.jsonl", [row("megatrain", [1.0, 1.1], cell="0123456789ab")])
    assert report.main([str(rows)]) == 0
    *_, png, pdf, note = capsys.readouterr().out.splitlines()
    assert [png, pdf] == [str(tmp_path / "traces" / f"0123456789ab-megatrain.timeline.{kind}") for kind in ("png", "pdf")]
    assert note.startswith("profiler trace: ")
    assert Path(png).exists()
    assert report.main([str(rows), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "0123456789ab-megatrain.timeline.png").exists()


@pytest.mark.usefixtures("_coarse")
def test_make_stacks_the_longest_step_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(style, "save", lambda figure, stem: drawn.append([a.get_title(loc="left") for a in figure.axes]) or [])
    drawing.write([put(tmp_path / f"h200.{n}.timeline.json", predicted=None, scale=s) for n, s in (("fast", 1.0), ("paper", 2.0))])
    assert drawn[-1] == ["paper, measured: step 20.0 s", "fast, measured: step 10.0 s"]
