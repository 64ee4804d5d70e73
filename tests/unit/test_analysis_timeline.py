"""Timelines read from files, and the arithmetic on their intervals, from a small step whose numbers are known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import engine.timeline
from analysis import style, timeline
from analysis.figures import timeline as drawing
from analysis.timeline import Interval, Step
from engine.pipeline import LANES, Pipeline
from engine.schedule import build
from tests.unit.test_analysis_figures import lightness
from tests.unit.test_analysis_load import row, save

ROWS: list[list[Any]] = [
    ["cpu", "step 1", 0.0, 1.5],
    ["cpu", "check -1", 9.9, 9.9001],
    ["cpu", "step 0", 9.5, 10.0],
    ["d2h", "store 3", 4.0, 5.0],
    ["h2d", "load 2", 1.0, 2.5],
    ["h2d", "load 3", 2.5, 3.0],
    ["compute", "compute embed 0", 0.0, 0.5],
    ["compute", "compute forward 1", 0.5, 2.0],
    ["compute", "free 1", 2.0, 2.00001],
    ["compute", "compute tail 3", 2.5, 4.0],
    ["compute", "compute backward 2", 4.0, 6.0],
    ["compute", "compute backward 1", 6.0, 8.0],
    ["compute", "compute embed_backward 0", 8.0, 8.01],
    ["compute", "step device_step 2", 8.5, 9.0],
]
"""Ten seconds: compute idles in 2.0-2.5, 8.01-8.5 and 9-10, but for the nothing that `free` takes."""


def plain(rows: list[list[Any]] = ROWS, scale: float = 1.0) -> dict[str, Any]:
    return {"step_s": 10.0 * scale, "intervals": [[lane, label, scale * a, scale * b] for lane, label, a, b in rows]}


def step_of(rows: list[list[Any]], step_s: float = 10.0) -> Step:
    return Step(step_s=step_s, intervals=tuple(Interval(lane=r[0], label=r[1], start_s=r[2], end_s=r[3]) for r in rows))


def put(path: Path, *, predicted: float | None = 0.8, scale: float = 1.0) -> Path:
    content = {"measured": plain(scale=scale)} | ({"predicted": plain(scale=scale * predicted)} if predicted else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_busy_idle_and_hidden_seconds() -> None:
    step = step_of(ROWS)
    assert step.lanes == ["compute", "h2d", "d2h", "cpu"]
    assert step.busy_s("compute") == pytest.approx(8.01001)
    assert step.idle_s("compute") == pytest.approx(1.98999)
    assert step.busy_s("h2d") == pytest.approx(2.0)
    assert step.hidden_share("compute") is None
    assert step.hidden_share("h2d") == pytest.approx(1.50001 / 2)
    assert step.hidden_share("d2h") == pytest.approx(1.0)
    assert step.hidden_share("cpu") == pytest.approx(1.5 / 2)
    assert step.hidden_share("copy") is None


def test_overlapping_intervals_count_once_and_copies_hide_nothing() -> None:
    rows = [["compute", "compute tail 1", 0.0, 4.0], ["compute", "load 1", 4.0, 6.0], ["cpu", "step 1", 3.0, 5.0]]
    step = step_of([*rows, ["cpu", "step 0", 4.0, 7.0]])
    assert step.busy_s("cpu") == pytest.approx(4.0)
    assert step.hidden_share("cpu") == pytest.approx(1.0 / 4.0)


@pytest.mark.parametrize("streams", [2, 3])
def test_the_arithmetic_is_the_engines(streams: int) -> None:
    pipeline = Pipeline(num_layers=5, streams=streams, kept_layers=1, offloaded_layers=2, device_blocks=2)
    theirs = engine.timeline.simulate(build(pipeline), lambda op: 0.1 + 0.07 * len(op.kind) + 0.03 * op.block)
    mine = step_of([[i.lane, i.label, i.start_s, i.end_s] for i in theirs.intervals], theirs.step_s)
    for lane in set(LANES[streams].values()):
        assert mine.busy_s(lane) == pytest.approx(theirs.busy_s(lane))
        if lane != "compute":
            assert mine.hidden_share(lane) == pytest.approx(theirs.hidden_share(lane))


def test_every_label_of_a_schedule_is_work_with_a_fill() -> None:
    pipelines = [
        Pipeline(num_layers=9, checkpoint_interval=3, gradient_slabs=2),
        Pipeline(num_layers=4, kept_layers=1, offloaded_layers=2, device_blocks=2),
    ]
    labels = {engine.timeline.label_of(op) for pipeline in pipelines for op in build(pipeline)}
    works = {label: Interval(lane="compute", label=label, start_s=0.0, end_s=1.0).work for label in labels}
    assert set(works.values()) == set(style.WORK)
    assert {label.split()[0] for label, work in works.items() if work == timeline.OTHER} == {
        "clip",
        "check",
        "free",
        "drop",
        "stage",
    }


def test_work_stays_apart_in_grey() -> None:
    fills = [fill for work, fill in style.WORK.items() if work != timeline.OTHER]
    for one, other in itertools.combinations(fills, 2):
        apart = abs(lightness(one.color) - lightness(other.color)) >= 10
        assert apart or one.hatch != other.hatch, (one.name, other.name)
    for fill in fills:
        assert not fill.hatch or abs(lightness(fill.color) - lightness(fill.ink)) >= 30, fill.name
    assert len({fill.name for fill in style.WORK.values()}) == len(style.WORK)


BAD: dict[str, tuple[str | None, str]] = {
    "missing": (None, "no such file"),
    "text": ("step", "not JSON"),
    "list": ("[]", "no field 'measured'"),
    "rows": ('{"predicted": {}}', "no field 'measured'"),
    "no intervals": ('{"measured": {"step_s": 1.0}}', "measured: allowed is an object with 'step_s' and 'intervals'"),
    "no step": (json.dumps({"measured": plain() | {"step_s": None}}), "measured.step_s: got None"),
    "nan": (json.dumps({"measured": plain() | {"step_s": float("nan")}}), "measured.step_s: got nan"),
    "empty": ('{"measured": {"step_s": 1.0, "intervals": []}}', "measured.intervals: got none"),
    "short": (
        json.dumps({"measured": plain([*ROWS[:2], ["cpu", "step 1", 0.0, 1.0]])}).replace(', "step 1"', ""),
        "intervals[0]: got",
    ),
    "backwards": (
        json.dumps({"measured": plain([["cpu", "step 1", 2.0, 1.0]])}),
        "measured.intervals[0]: got ['cpu', 'step 1', 2.0, 1.0]",
    ),
    "outside": (json.dumps({"measured": plain([["cpu", "step 1", 2.0, 11.0]])}), "within the step's 10.0 s"),
    "predicted": (json.dumps({"measured": plain(), "predicted": 3}), "predicted: allowed is an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, (content, said) = tmp_path / "x.timeline.json", BAD[case]
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.timeline\.json") as caught:
        timeline.load(path)
    assert said in str(caught.value)
    assert drawing.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.glob("*.p*"))


def test_a_folder_is_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        timeline.load(tmp_path)


def test_names_of_timelines(tmp_path: Path) -> None:
    names = {
        "0123456789ab-megatrain.timeline.json": "MegaTrain",
        "h200_7b.fast.timeline.json": "fast",
        "qwen2.5-7b.timeline.json": "qwen2.5-7b",
        "overlap.timeline.json": "overlap",
        "plain.json": "plain",
    }
    assert {name: timeline.name_in(Path(name)) for name in names} == names
    paths = [put(tmp_path / f"{cell}-megatrain.timeline.json") for cell in ("0123456789ab", "ba9876543210")]
    assert [one.name for one in timeline.load_all(paths)] == ["0123456789ab-megatrain", "ba9876543210-megatrain"]
    assert [one.name for one in timeline.load_all(paths, ["a", "b"])] == ["a", "b"]


def test_rows_beside_the_traces_name_them(tmp_path: Path) -> None:
    cells = {"0123456789ab": "paper", "ba9876543210": "fast"}
    paths = [put(tmp_path / "traces" / f"{cell}-megatrain.timeline.json") for cell in cells]
    save(tmp_path / "rows.jsonl", [row("megatrain", [1.0, 1.1], cell=cell, preset=preset) for cell, preset in cells.items()])
    assert [one.name for one in timeline.load_all(paths)] == ["MegaTrain paper", "MegaTrain fast"]
    save(tmp_path / "rows.jsonl", [row("megatrain", [1.0, 1.1], cell="0123456789ab", preset="paper")])
    assert [one.name for one in timeline.load_all(paths)] == ["MegaTrain paper", "MegaTrain"]
    (tmp_path / "rows.jsonl").write_text("no rows\n")
    assert [one.name for one in timeline.load_all(paths[:1])] == ["MegaTrain"]
