"""Rows to frame: types, nulls, labels, groups and bad input. Also the fixture rows of all analysis tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import load
from sweeps.result import Row

GIB = 1 << 30
H200 = {"gpu": "NVIDIA H200", "num_gpus": 1, "cpu": "Xeon", "num_cores": 16, "host_bytes": 134_000_000_000}
CPU = {"gpu": None, "num_gpus": 0, "cpu": "EPYC", "num_cores": 2, "host_bytes": 16_000_000_000}
VERSIONS = {"torch": "2.11.0", "deepspeed": "0.19.8"}


def curve(num_steps: int, offset: float = 0.0) -> list[float]:
    """A decreasing loss with a wobble; `offset` grows linearly to its full size."""
    return [2.0 + 10.3 * math.exp(-step / 9) + 0.04 * math.sin(2.1 * step) + offset * step / num_steps for step in range(num_steps)]


def row(system: str, step_s: list[float] | None = None, **fields: Any) -> Row:
    """A measured row of the 3B shape on an H200; any field can be overridden."""
    windows = step_s if step_s is not None else []
    tokens_per_s = 32 * 1024 * len(windows) / sum(windows) if windows else None
    params = 3_397_103_616
    defaults: dict[str, Any] = {
        "experiment": "quickstart",
        "cell": f"cell-{system}-{fields.get('preset')}",
        "system": system,
        "model": "qwen2.5-3b",
        "batch_size": 32,
        "seq_len": 1024,
        "num_micro_batches": 1,
        "status": "ok",
        "num_params": params,
        "tokens_per_s": tokens_per_s,
        "step_s": windows,
        "tflops_6p": 6 * params * tokens_per_s / 1e12 if tokens_per_s else None,
        "mfu": 6 * params * tokens_per_s / 1e12 / 794 if tokens_per_s else None,
        "machine": H200,
        "versions": VERSIONS,
        "git_commit": "0123456789abcdef",
        "started_at": "2026-11-21T08:00:00Z",
    }
    return Row(**(defaults | fields))


def plan(device: int, host: int) -> dict[str, dict[str, int]]:
    return {"device": {"slots": device // 2, "head": device - device // 2}, "host": {"weights": host}}


def h200_rows() -> list[Row]:
    """An H200 run: five measured, of which one differs in numerics; one OOM, one unsupported, one non-finite."""
    return [
        row(
            "in_memory",
            [1.51, 1.52, 1.51, 1.52, 1.53],
            losses=curve(40),
            peak_device_bytes=96 * GIB,
            peak_host_bytes=6 * GIB,
            plan=plan(95 * GIB, 5 * GIB),
        ),
        row(
            "zero3",
            [2.89, 2.94, 2.85, 2.90, 2.87],
            losses=curve(40, 4e-4),
            peak_device_bytes=69_600_000_000,
            peak_host_bytes=88 * GIB,
            agrees=True,
            max_loss_difference=4e-4,
            plan=plan(66 * GIB, 80 * GIB),
        ),
        row(
            "megatrain",
            [1.60, 1.57, 1.66, 1.61, 1.59],
            losses=curve(40, -6e-4),
            peak_device_bytes=18 * GIB,
            peak_host_bytes=44 * GIB,
            agrees=True,
            max_loss_difference=6e-4,
            plan=plan(17 * GIB, 41 * GIB),
        ),
        row(
            "fsdp2",
            [4.05, 4.01, 4.12, 4.02, 4.07],
            losses=curve(40, 2e-4),
            peak_device_bytes=65_200_000_000,
            peak_host_bytes=70 * GIB,
            agrees=True,
            max_loss_difference=2e-4,
            plan=plan(60 * GIB, 67 * GIB),
        ),
        row(
            "published_megatrain",
            [1.40, 1.41, 1.39],
            losses=curve(40, 0.6),
            peak_device_bytes=17_900_000_000,
            peak_host_bytes=52 * GIB,
            agrees=False,
            max_loss_difference=0.6,
        ),
        row("zero2", status="oom_device", reason="CUDA out of memory at step 0: 141 GB", losses=[]),
        row("superoffload", status="unsupported", reason="needs an NVLink-C2C host"),
        row("zenflow", status="nonfinite", reason="loss nan at step 12", losses=[*curve(40)[:12], math.nan]),
    ]


def cpu_rows() -> list[Row]:
    """A CPU run of the four quickstart systems, DeepSpeed missing: no peak, no device memory."""
    common: dict[str, Any] = {
        "model": "qwen2-tiny",
        "num_params": 12_345_678,
        "batch_size": 8,
        "seq_len": 256,
        "machine": CPU,
        "mfu": None,
    }
    return [
        row(
            "in_memory",
            [1.1, 1.2, 1.15],
            losses=curve(30),
            peak_host_bytes=1_300_000_000,
            tokens_per_s=1780.0,
            tflops_6p=0.13,
            **common,
        ),
        row(
            "megatrain",
            [1.6, 1.5, 1.4],
            losses=curve(30, 8e-4),
            peak_host_bytes=900_000_000,
            tokens_per_s=1365.0,
            tflops_6p=0.1,
            agrees=True,
            max_loss_difference=8e-4,
            plan=plan(40_000_000, 300_000_000),
            **common,
        ),
        row("zero3", status="unsupported", reason="g++ not found; install g++ 9 or newer", **common),
        row(
            "fsdp2",
            [1.55, 1.45, 1.5],
            losses=curve(30, 3e-4),
            peak_host_bytes=1_700_000_000,
            tokens_per_s=1360.0,
            tflops_6p=0.1,
            agrees=True,
            max_loss_difference=3e-4,
            **common,
        ),
    ]


def save(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(one.to_json() + "\n" for one in rows), encoding="utf-8")
    return path


def test_file_and_rows_give_the_same_typed_frame(tmp_path: Path) -> None:
    rows = h200_rows()
    path = save(tmp_path / "rows.jsonl", rows)
    frame, direct = load.load(path), load.from_rows(rows)
    assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == load.COLUMNS | {
        column: "object" for column in load.COLUMNS if load.COLUMNS[column] == "object"
    }
    unlike = ["source", "file", "losses"]
    pd.testing.assert_frame_equal(frame.drop(columns=unlike), direct.drop(columns=unlike))
    assert set(frame["source"]) == {str(path)}
    assert math.isnan(frame["losses"].iloc[7][-1])


def test_nulls_stay_null_and_bytes_stay_integers() -> None:
    frame = load.from_rows(h200_rows()).set_index("system")
    assert frame.loc["zero3", "peak_device_bytes"] == 69_600_000_000
    for column in ("tokens_per_s", "tokens_per_s_lo", "step_s_median", "peak_device_bytes", "agrees", "plan_host_bytes"):
        assert frame.loc["zero2", column] is pd.NA, column
    assert frame.loc["in_memory", "agrees"] is pd.NA
    assert frame.loc["zero2", "num_windows"] == 0


def test_derived_columns() -> None:
    megatrain = load.from_rows(h200_rows()).set_index("system").loc["megatrain"]
    assert megatrain["label"] == "MegaTrain"
    assert megatrain["step_s_median"] == 1.60
    lo, value, hi = (megatrain[f"tokens_per_s{end}"] for end in ("_lo", "", "_hi"))
    assert 19_800 < lo < value < hi < 21_000
    assert lo * hi == pytest.approx(value**2)
    assert megatrain["final_loss"] == curve(40, -6e-4)[-1]
    assert megatrain["host_bytes_per_param"] == pytest.approx(44 * GIB / 3_397_103_616)
    assert megatrain["plan_device_bytes"] == 17 * GIB
    assert megatrain["machine_name"] == "NVIDIA H200, 16 cores, 134 GB host"


def test_without_a_gpu_the_host_holds_both_shares_of_the_plan() -> None:
    megatrain = load.from_rows(cpu_rows()).set_index("system").loc["megatrain"]
    assert megatrain["plan_device_bytes"] is pd.NA
    assert megatrain["plan_host_bytes"] == 340_000_000


def test_labels_tell_apart_rows_of_one_system() -> None:
    by_depth = [
        row("megatrain", [1.0], cell=str(depth), config={"system": {"depth": depth, "k": 2}, "logging": {"id": depth}})
        for depth in (1, 2)
    ]
    assert list(load.from_rows(by_depth)["label"]) == ["MegaTrain depth=1", "MegaTrain depth=2"]
    by_cap = [
        row("megatrain", [1.0], cell=str(cap), config={"machine": {"device": "cuda", "device_bytes": cap}}) for cap in (16, 24)
    ]
    assert list(load.from_rows(by_cap)["label"]) == ["MegaTrain device_bytes=16", "MegaTrain device_bytes=24"]
    by_preset = [row("megatrain", [1.0], preset=preset) for preset in ("paper", "fast")]
    assert list(load.from_rows(by_preset)["label"]) == ["MegaTrain paper", "MegaTrain fast"]
    knobs: list[dict[str, Any]] = [{}, {"huge_pages": True}, {"huge_pages": False, "k": 1}]
    own = [row("zero3", [1.0], preset="twinflow", config={"system": one, "output_dir": str(one)}) for one in knobs]
    assert list(load.from_rows(own)["label"]) == ["ZeRO-3 twinflow", "ZeRO-3 twinflow, huge_pages=True", "ZeRO-3 twinflow, k=1"]
    told: dict[str, Any] = {"system": {"depth": 2}, "machine": {"device": "cuda"}}
    repeats = [row("megatrain", [1.0], preset="fast", cell=str(n), config={**told, "measure": {"repeat": n}}) for n in (1, 2)]
    assert list(load.from_rows(repeats)["label"]) == ["MegaTrain fast", "MegaTrain fast"]


def test_groups_never_mix_models_lengths_or_machines() -> None:
    other_host = row("zero3", [3.1], machine=H200 | {"num_cores": 64})
    frame = load.from_rows([*h200_rows(), *cpu_rows(), other_host, row("zero3", [5.0], seq_len=2048)])
    assert [len(part) for part in load.groups(frame)] == [8, 4, 1, 1]


def test_latest_attempt_supersedes() -> None:
    frame = load.from_rows([row("zero3", status="timeout", reason="600 s"), row("megatrain", [1.6]), row("zero3", [2.9])])
    kept = load.latest(frame)
    assert list(kept["system"]) == ["megatrain", "zero3"]
    assert list(kept["status"]) == ["ok", "ok"]
    assert list(kept["label"]) == ["MegaTrain", "ZeRO-3"]


def test_a_cell_of_another_file_is_another_measurement(tmp_path: Path) -> None:
    """The machine that measured it may have been another, and a study keeps the base that it was measured with."""
    first = save(tmp_path / "a.jsonl", [row("zero3", status="timeout", reason="600 s"), row("zero3", [2.9])])
    second = save(tmp_path / "b.jsonl", [row("zero3", [3.1], started_at="2026-11-22T08:00:00Z")])
    frame = load.load(first, second)
    assert list(load.latest(frame)["step_s_median"]) == [2.9, 3.1]
    assert [list(part["step_s_median"]) for part in load.by_file(frame)] == [[2.9], [3.1]]


def test_machines_of_one_kind_are_told_apart_by_boot_and_matrix_peak() -> None:
    machines = [H200, H200 | {"matrix_peak_tflops": 679.04}, H200 | {"matrix_peak_tflops": 694.19}]
    machines += [machines[1] | {"boot": "0123abcd"}, machines[1] | {"boot": "4567abcd"}]
    frame = load.from_rows([row("zero3", [3.0], machine=machine) for machine in (*machines, *machines)])
    assert list(frame["host"][:5]) == list(frame["host"][5:])
    assert frame["host"].nunique() == 5
    assert frame["machine_name"].nunique() == 1


def test_folders_are_searched_in_order_and_files_read_once(tmp_path: Path) -> None:
    save(tmp_path / "b" / "rows.jsonl", cpu_rows())
    first = save(tmp_path / "a.jsonl", h200_rows())
    assert len(load.load(tmp_path, first)) == 12
    assert load.load(tmp_path)["source"].iloc[0] == str(first)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file or folder"),
        ("", "no rows in it"),
        ("[1]\n{}\n", "line 1 has no row"),
        ('{"schema_version": 1, "speed": 3}\n{}\n', "line 1 has the field 'speed'"),
        ('{"schema_version": 1, "status": "ok"}\n{}\n', "line 1 has no experiment, allowed a row with"),
        (json.dumps({**json.loads(row("zero3", [1.0]).to_json()), "schema_version": 0}) + "\n", "schema_version 0"),
        (
            json.dumps({**json.loads(row("zero3", [1.0]).to_json()), "tokens_per_s": "abc"}),
            "line 1 has tokens_per_s 'abc', allowed a",
        ),
        (
            json.dumps({**json.loads(row("zero3", [1.0]).to_json()), "step_s": [1.0, None]}),
            "line 1 has step_s None, allowed a number",
        ),
        ("{torn\n" + row("zero3", [1.0]).to_json() + "\n", "line 1 is not JSON"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=told) as caught:
        load.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_empty_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in this folder"):
        load.load(tmp_path)


@pytest.mark.parametrize(
    ("preset", "compiled", "shown"),
    [
        (None, False, None),
        (None, True, "compiled"),
        ("stream", True, "stream compiled"),
        ("fast", True, "fast"),
        ("5_compiled", True, "5_compiled"),
        ("paper", False, "paper"),
    ],
)
def test_a_label_says_what_was_compiled(preset: str | None, compiled: bool, shown: str | None) -> None:
    frame = load.from_rows([row("megatrain", [1.0], preset=preset, config={"system": {"compile": compiled}})])
    assert (None if pd.isna(frame["preset"][0]) else frame["preset"][0]) == shown
    assert frame["label"][0] == f"MegaTrain {shown}" if shown else "MegaTrain"
