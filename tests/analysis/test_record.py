"""Filing rows: names, bytes, what is there already, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from analysis import __main__ as command
from analysis import record, rows
from sweeps.result import Row
from tests.made_rows import CPU, H200, curve, row, save

BOOT, OTHER = (
    {**H200, "boot": "0123abcd", "device_bytes": 10**11},
    {**H200, "boot": "deadbeef", "device_bytes": 10**11},
)


def lines_of(path: Path) -> list[dict]:
    """The rows of a file as they stand."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(
    system: str,
    *,
    machine: dict = BOOT,
    experiment: str = "mine",
    started: str = "08:00:00",
    **fields,
) -> Row:
    config = {
        "experiment": experiment,
        "system": {"name": system, "dtype": "bfloat16"},
        "measure": {"repeat": 1},
        "machine": {"device": "cuda"},
    }
    return row(
        system,
        [1.0, 1.1, 1.05],
        experiment=experiment,
        machine=machine,
        started_at=f"2026-11-21T{started}Z",
        losses=curve(3),
        **{"config": config, **fields},
    )


def test_rows_are_filed_by_study_date_machine_and_boot_byte_for_byte(tmp_path: Path) -> None:
    held = OTHER | {"matrix_peak_tflops": 790.0, "matrix_sustained_tflops": 668.04}
    source = save(
        tmp_path / "out" / "rows.jsonl", [measured("zero3"), measured("megatrain", machine=held)]
    )
    results = tmp_path / "results"
    told = record.add([source], results)
    assert told == [
        "mine/2026-11-21_h200-16c_0123abcd: 1 new row",
        "mine/2026-11-21_h200-16c_deadbeef: 1 new row",
    ]
    files = sorted((results / "mine").glob("*.jsonl"))
    assert b"".join(path.read_bytes() for path in files) == source.read_bytes()
    kinds = yaml.safe_load((results / "machines.yaml").read_text())["kinds"]
    assert list(kinds["h200-16c"]["runs"]) == [
        "2026-11-21_h200-16c_0123abcd",
        "2026-11-21_h200-16c_deadbeef",
    ]
    assert kinds["h200-16c"]["runs"]["2026-11-21_h200-16c_deadbeef"] == {
        "matrix_peak_tflops": [790.0, 790.0],
        "matrix_sustained_tflops": [668.0, 668.0],
    }


def test_a_later_row_of_the_run_joins_its_file_and_a_known_one_does_not(tmp_path: Path) -> None:
    results, source = tmp_path / "results", tmp_path / "out" / "rows.jsonl"
    record.add([save(source, [measured("zero3")])], results)
    told = record.add(
        [save(source, [measured("zero3"), measured("megatrain", started="09:00:00")])], results
    )
    assert told == ["mine/2026-11-21_h200-16c_0123abcd: 1 new row, 1 known"]
    (path,) = (results / "mine").glob("*.jsonl")
    assert [one["system"] for one in lines_of(path)] == ["zero3", "megatrain"]


def test_a_row_that_another_study_measured_is_filed_once_and_shared(tmp_path: Path) -> None:
    results, original = tmp_path / "results", measured("zero3", experiment="first")
    copy = dataclasses.replace(original, experiment="second")
    source = save(
        tmp_path / "rows.jsonl", [original, copy, measured("megatrain", experiment="second")]
    )
    record.add([source], results)
    assert len(list(results.rglob("*.jsonl"))) == 2
    found = record.load(results)
    assert sorted(zip(found["study"], found["system"], strict=True)) == [
        ("first", "zero3"),
        ("second", "megatrain"),
        ("second", "zero3"),
    ]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (measured("zero3", machine=CPU), "measured without a GPU"),
        (measured("zero3", git_commit=None), "a row of commit unknown"),
        (measured("zero3", git_commit="0123456-dirty"), "a row of commit 0123456-dirty"),
    ],
)
def test_what_may_not_be_filed_is_one_line_and_leaves_nothing(
    tmp_path: Path, bad: Row, told: str
) -> None:
    source = save(tmp_path / "rows.jsonl", [measured("megatrain"), bad])
    with pytest.raises(ValueError, match=told) as caught:
        record.add([source], tmp_path / "results")
    assert str(source) in str(caught.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_run_of_wandb_is_no_file_of_rows(tmp_path: Path) -> None:
    """Its bytes would become a line of the record. What it holds can be read all the same."""
    source = save(tmp_path / "rows.jsonl", [measured("zero3")])
    subprocess.run([sys.executable, "-m", "sweeps.upload", source], check=True)
    source.unlink()
    assert len(rows.frame(tmp_path)) == 1
    with pytest.raises(ValueError, match="got a run of W&B, allowed a file of rows"):
        record.add([tmp_path], tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    source = save(tmp_path / "rows.jsonl", [measured("zero3")])
    with source.open("a") as file:
        file.write(measured("megatrain").to_json()[:50])
    record.add([source], tmp_path / "results")
    (path,) = (tmp_path / "results" / "mine").glob("*.jsonl")
    assert [json.loads(line)["system"] for line in path.read_text().splitlines()] == ["zero3"]


def test_a_study_without_a_speed_gets_its_page_and_no_picture(tmp_path: Path, capsys) -> None:
    lost = {
        "status": "oom_device",
        "reason": "full",
        "tokens_per_s": None,
        "step_s": [],
        "losses": [],
    }
    source = save(tmp_path / "rows.jsonl", [dataclasses.replace(measured("zero3"), **lost)])
    results = tmp_path / "results"
    assert command.main(["add", str(source), "--results", str(results)]) == 0
    assert "Nothing was measured; below stands why." in (results / "mine" / "README.md").read_text()
    assert list(results.rglob("*.png")) == []
    assert capsys.readouterr().err == ""


def test_the_record_is_small() -> None:
    files = [path for path in record.RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 200
    assert sum(path.stat().st_size for path in files) <= 8 << 20
