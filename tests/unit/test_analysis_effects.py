"""What a setting is worth: pairs of cells that differ in it alone; and what is said where rows come from several machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from analysis import effects, load, machines, report
from sweeps.result import Row
from tests.unit.study_rows import config, grid_rows, ladder_rows, windows
from tests.unit.test_analysis_load import H200, row, save


def changes(rows: list[Row], setting: str = "without double buffering") -> list[effects.Change]:
    return effects.setting_changes(load.from_rows(rows), setting)


def test_the_setting_of_an_ablation_is_a_pair_that_differs_in_it_alone() -> None:
    found = changes(grid_rows())
    assert [(one.cell.config["system.depth"], one.base.config["system.depth"]) for one in found] == [(1, 2), (1, 2)]
    assert [one.cell.config[effects.STREAMS] == one.base.config[effects.STREAMS] for one in found] == [True, True]
    assert [one.cell.config[effects.STREAMS] for one in found] == [3, 2], "where overlap is taken away comes first"
    assert found[0].estimate.value == pytest.approx(-1 / 3)
    assert found[0].estimate.has_interval
    unlike = [one for one in grid_rows() if one.config["system"]["depth"] == 1 or one.config["system"]["streams"] == 1]
    assert changes(unlike) == []
    assert changes(grid_rows(), "checkpoint interval 1") == []
    assert changes(grid_rows(), "without the gradient slab pool") == []


def depth_rows(*step_s: float, repeat: int = 1, **fields: Any) -> list[Row]:
    """Depth 1, then depth 2, three streams, as one round of the study measures them."""
    rows = []
    for depth, second in enumerate(step_s, 1):
        composed = config(depth=depth, streams=3) | {"measure": {"windows": 3, "repeat": repeat}}
        common: dict[str, Any] = {"experiment": "double_buffering", "cell": f"{depth} {repeat}", "config": composed}
        rows.append(row("megatrain", windows(second), **(common | fields)))
    return rows


@pytest.mark.parametrize(
    "differs",
    [
        {"machine": H200 | {"matrix_peak_tflops": 694.19}},
        {"machine": H200 | {"boot": "0123abcd"}},
        {"git_commit": "another"},
        {"config": config(depth=1, streams=3) | {"measure": {"windows": 2}}},
        {"config": config(depth=1, streams=3) | {"measure": {"windows": 3, "repeat": 2}}},
    ],
    ids=["matrix peak", "boot", "commit", "windows", "repeat"],
)
def test_no_pair_spans_machines_commits_or_ways_to_measure(differs: dict[str, Any]) -> None:
    shallow, deep = depth_rows(6.0, 4.0, machine=H200 | {"matrix_peak_tflops": 679.04})
    assert len(changes([shallow, deep])) == 1
    assert changes([dataclasses.replace(shallow, **differs), deep]) == []


def test_no_pair_spans_files_and_the_one_with_most_steps_speaks(tmp_path: Path) -> None:
    shallow, deep = depth_rows(6.0, 4.0)
    apart = load.load(save(tmp_path / "a.jsonl", [shallow]), save(tmp_path / "b.jsonl", [deep]))
    assert effects.setting_changes(apart, "without double buffering") == []
    brief = [dataclasses.replace(one, step_s=one.step_s[:2], started_at="2026-12-01T00:00:00Z") for one in depth_rows(5.0, 4.0)]
    frame = load.load(save(tmp_path / "a.jsonl", [shallow, deep]), save(tmp_path / "b.jsonl", brief))
    found = effects.setting_changes(frame, "without double buffering")
    assert [(one.file, one.num_windows) for one in found] == [("a.jsonl", 3), ("b.jsonl", 2)]
    assert found[0].estimate.value == pytest.approx(4 / 6 - 1)
    longer = [dataclasses.replace(one, config=one.config | {"measure": {"windows": 2, "steps_per_window": 2}}) for one in brief]
    frame = load.load(save(tmp_path / "a.jsonl", [shallow, deep]), save(tmp_path / "b.jsonl", longer))
    found = effects.setting_changes(frame, "without double buffering")
    assert [(one.file, one.num_windows, one.steps_per_window) for one in found] == [("b.jsonl", 2, 2), ("a.jsonl", 3, 1)]


def test_repeats_pair_round_by_round() -> None:
    """Whatever machine a round met, it met for both; a round that lacks one of the two does not count."""
    rounds = [(6.0, 4.0), (9.0, 6.1), (3.0, 2.02)]
    rows = []
    for number, (shallow, deep) in enumerate(rounds, 1):
        rows += depth_rows(shallow, deep, repeat=number, machine=H200 | {"matrix_peak_tflops": 600.0 + number})
    (found,) = changes([*rows, *depth_rows(1.0, repeat=4)])
    assert (found.num_rounds, found.num_windows) == (3, 9)
    assert found.estimate.value == pytest.approx((4.0 + 6.1 + 2.02) / 18 - 1)
    assert found.estimate.lo is not None
    assert found.estimate.hi is not None
    assert found.estimate.hi - found.estimate.lo < 0.05, "rounds differ by half, pairs do not"
    assert not changes(rows[:4])[0].estimate.has_interval


def machines_of(*found: dict[str, Any]) -> list[str]:
    rows = [row("megatrain", [1.0], cell=str(number), machine=H200 | machine) for number, machine in enumerate(found)]
    refused = row("zero3", status="wont_fit", machine=H200)
    return machines.notes(load.from_rows([*rows, refused]))


def test_rows_of_several_machines_of_a_kind_say_so() -> None:
    slow, fast = {"matrix_peak_tflops": 680.0}, {"matrix_peak_tflops": 700.4}
    assert machines_of({}) == machines_of(slow, slow) == []
    told = (
        "Rows of several machines of this kind, whose matrix peaks read 680 to 700 TFLOPS; differences between them are in these "
        "numbers."
    )
    assert machines_of(slow, fast, slow) == [told]
    assert machines_of(slow | {"boot": "01234567"}, fast | {"boot": "01234567"}) == [], "one machine, its peak measured twice"
    assert machines_of({"boot": "01234567"}, {"boot": "89abcdef"}) == [
        "Rows of several machines of this kind; differences between them are in these numbers."
    ]
    rows = ladder_rows()
    rows[0] = dataclasses.replace(rows[0], machine=H200 | fast)
    rows[1:] = [dataclasses.replace(one, machine=H200 | slow) for one in rows[1:]]
    (part,) = report.sections(load.from_rows(rows))
    assert told in part.sheet.notes
    assert told in " ".join(part.figure().get_suptitle().split())
    pair = [row("megatrain", windows(2.0), machine=H200 | slow), row("zero3", windows(4.0), machine=H200 | fast)]
    (part,) = report.sections(load.from_rows(pair))
    assert told in part.sheet.notes
    assert told in " ".join(part.figure().get_suptitle().split())
