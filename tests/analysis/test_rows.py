"""Rows to the frame: what is kept, what replaces what, and bad input in one line."""

import json
from pathlib import Path

import pytest

from analysis import names, record, rows
from tests.analysis.test_record import lines_of
from tests.made_rows import H200, curve, framed, row, save


def test_a_null_stays_null_and_bytes_become_gb(tmp_path: Path) -> None:
    path = save(
        tmp_path / "rows.jsonl",
        [
            row("zero3", [1.0], losses=curve(3), peak_host_bytes=3 * 10**9),
            row("fsdp2", status="error"),
        ],
    )
    found = rows.frame(path).set_index("system")
    assert found.loc["zero3", "host_gb"] == 3.0
    assert found.loc["fsdp2", ["tokens_per_s", "device_gb", "agrees"]].isna().all()


def test_a_run_is_named_by_date_machine_and_boot() -> None:
    machine = {**H200, "boot": "0123abcd"}
    found = framed(
        [
            row("zero3", [1.0], machine=machine),
            row("fsdp2", [1.0], machine={**machine, "boot": None}),
        ]
    )
    assert list(found["run"]) == ["2026-11-21_h200-16c_0123abcd", "2026-11-21_h200-16c_t0800"]


def test_two_boots_are_two_runs_and_both_stay() -> None:
    again = [
        row("zero3", [step], machine={**H200, "boot": boot})
        for boot, step in (("aaaaaaaa", 1.0), ("bbbbbbbb", 2.0))
    ]
    found = framed(again)
    assert list(found["run"].str[-8:]) == ["aaaaaaaa", "bbbbbbbb"]
    assert found["cell"].nunique() == 1


def test_within_a_run_the_last_row_of_a_cell_counts_whatever_its_clock_says() -> None:
    machine = {**H200, "boot": "0123abcd"}
    first = row("zero3", status="timeout", machine=machine, started_at="2026-11-23T00:00:00Z")
    then = row("zero3", [1.0], machine=machine, started_at="2026-11-22T00:00:00Z")
    assert list(framed([first, then])["status"]) == ["ok"]


def test_an_attempt_that_failed_hides_no_measurement() -> None:
    first, second = [1.0] * 3, [2.0] * 3
    given = [
        row("zero3", first),
        row("zero3", second),
        row("zero3", status="timeout", reason="killed"),
        row("fsdp2", status="oom_host"),
        row("fsdp2", status="timeout"),
    ]
    found = framed(given)
    assert list(found["status"]) == ["ok", "timeout"]
    assert found["step_s"][0] == second
    assert list(framed([*given, row("zero3", status="nonfinite")])["status"]) == [
        "timeout",
        "nonfinite",
    ]


def test_a_reference_measured_later_is_held_against() -> None:
    config = {
        "system": {"name": "x", "dtype": "bfloat16"},
        "machine": {"device": "cuda"},
        "measure": {},
        "recipe": {},
    }
    early = row("megatrain", [1.0], losses=curve(5, 1e-4), config=config)
    late = row("in_memory", [1.0], losses=curve(5), config=config)
    found = framed([early, late]).set_index("system")
    assert found.loc["megatrain", "agrees"]


@pytest.mark.parametrize(
    ("preset", "compiled", "known"),
    [
        (None, False, ("zero3", "")),
        (None, True, ("zero3", "compiled")),
        ("kept", True, ("zero3", "kept compiled")),
        ("twinflow", True, ("zero3_twinflow", "compiled")),
        ("twinflow kept", True, ("zero3_twinflow", "kept compiled")),
    ],
)
def test_a_rival_s_family_and_mode(preset, compiled, known) -> None:
    assert (
        rows.family_and_mode(
            row("zero3", [1.0], preset=preset, config={"system": {"compile": compiled}})
        )
        == known
    )


def test_the_engine_s_presets_are_families() -> None:
    engine = [("fast", True), ("stream", False), ("stream", True), ("5_compiled", True)]
    told = [
        rows.family_and_mode(row("megatrain", [1.0], preset=p, config={"system": {"compile": c}}))
        for p, c in engine
    ]
    assert told == [
        ("megatrain_fast", ""),
        ("megatrain_stream", ""),
        ("megatrain_stream", "compiled"),
        ("megatrain_5_compiled", ""),
    ]


GOOD = json.loads(row("zero3", [1.0]).to_json())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file or folder"),
        ("", "no rows in it"),
        ("[1]\n{}\n", "line 1"),
        (json.dumps({**GOOD, "schema_version": 0}) + "\n", "schema_version 0"),
        (json.dumps({**GOOD, "tokens_per_s": "abc"}), "line 1"),
        ("{torn\n" + row("zero3", [1.0]).to_json() + "\n", "line 1 is not JSON"),
    ],
)
def test_bad_input_is_one_line_with_the_file(
    tmp_path: Path, content: str | None, told: str
) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=told) as caught:
        rows.frame(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_log_of_a_training_is_no_file_of_rows(tmp_path: Path) -> None:
    save(tmp_path / "rows.jsonl", [row("zero3", [1.0])])
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert list(rows.frame(tmp_path)["system"]) == ["zero3"]


def test_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in this folder"):
        rows.frame(tmp_path)


def test_every_committed_row_is_read_and_stands_once() -> None:
    files = sorted(record.RESULTS.rglob("*.jsonl"))
    keys = [(one["cell"], one["started_at"]) for path in files for one in lines_of(path)]
    assert len(keys) == len(set(keys)) >= 240
    assert len(rows.every_row(record.RESULTS)) == len(keys)


def test_the_rows_that_a_study_shares_are_another_s_measurement() -> None:
    found = record.load()
    shared = found[
        (found["study"] == "batch_size") & (found["cell"] == "47865487068f") & ~found["superseded"]
    ]
    origin = found[(found["study"] == "model_size") & (found["cell"] == "47865487068f")]
    assert list(shared["tokens_per_s"]) == list(origin["tokens_per_s"])


def test_machines_are_named_by_what_they_have() -> None:
    assert rows.machine_name({"gpu": "NVIDIA H200", "num_gpus": 4, "num_cores": 64}) == "h200x4-64c"
    assert rows.machine_name({"gpu": "NVIDIA H100 80GB HBM3", "num_cores": 16}) == "h100-16c"
    assert rows.machine_name({"gpu": None, "num_cores": 2}) == "cpu-2c"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_called_as_people_call_it(name, said):
    assert names.gpu(name) == said
