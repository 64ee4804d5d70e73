"""The bench through its command line: user errors in one line, skips, kills, missing packages, the W&B mirror."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweeps import auto, run
from sweeps.errors import USER_ERRORS, one_line
from sweeps.result import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "measure=brief",
    "shape.batch_size=2",
    "shape.seq_len=16",
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_attention_heads=2",
    "system.dtype=float32",
    "data.max_bytes=65536",
]


def sweep(output: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sweeps.run", *overrides, f"output_dir={output}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=nope"], "model: got 'nope', allowed auto, qwen2.5-0.5b"),
        (["system=nope"], "system: got 'nope', allowed fsdp2, in_memory, megatrain"),
        (["+experiment=nope"], "experiment: got 'nope', allowed h200_3b"),
        (["system.dpeth=3"], "system.dpeth: got '3', an unknown field, allowed checkpoint_interval"),
        (["shape.batch_size=5", "shape.num_micro_batches=2"], "shape.num_micro_batches: got 2, allowed a divisor"),
        (["shape.seq_len=9999"], "shape.seq_len: got 9999, allowed 1 to 2048"),
        (["system.dtype=int8"], "system.dtype: got 'int8', allowed bfloat16, float32"),
        (["seed=[1"], "seed=[1: got an override that Hydra cannot read"),
        (["seed=${nowhere}"], "seed: got an interpolation that leads nowhere"),
        (["seed=1,2"], "seed"),
        (["--multirun", "system=megatrain,nope"], "system: got 'nope', allowed"),
        (["--multirun", "shape.seq_len=16,9999"], "shape.seq_len: got 9999"),
        (["~system"], "system: got nothing, allowed a value"),
        (["~shape.seq_len"], "shape.seq_len: got nothing"),
        (["measure.windows=abc"], "measure.windows: got 'abc', allowed a value of type int"),
        (["model.config=3"], "model.config: got 3, allowed"),
        (["data.max_bytes=70000", "shape.seq_len=2048", "shape.batch_size=64"], "shape.seq_len: got 2048 x 64 sequences"),
        (["--frobnicate"], "command line: got unrecognized arguments: --frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistyped_config_is_one_line(overrides: list[str], words: str) -> None:
    auto.register()
    with pytest.raises(USER_ERRORS) as error:
        run.planned_cells(overrides)
    line = one_line(error.value, [override for override in overrides if "=" in override])
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=nope"], "model: got 'nope', allowed auto, qwen2.5-0.5b"),  # Hydra refuses
        (["system=megatrain", "system.depth=0"], "system.depth: got 0, allowed"),  # the cell refuses
        (["--multirun", "system=megatrain", "system.depth=2,0"], "system.depth: got 0, allowed"),  # before the first cell runs
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_user_error_leaves_one_line_and_nothing_else(tmp_path: Path, overrides: list[str], words: str) -> None:
    done = sweep(tmp_path / "out", *overrides)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()
    assert not done.stdout or "--multirun" not in overrides, "a cell of the sweep was started"


def by_system(output: Path) -> dict[str, Row]:
    return {row.system: row for row in read_rows(output / "rows.jsonl")}


def test_measure_skip_and_mirror(tmp_path: Path) -> None:
    arguments = ["--multirun", "system=in_memory,megatrain", *SMALL]
    first = sweep(tmp_path, *arguments)
    assert first.returncode == 0, first.stderr + first.stdout
    rows = by_system(tmp_path)
    assert {row.status for row in rows.values()} == {"ok"}, [row.reason for row in rows.values()]
    assert rows["megatrain"].agrees is True
    assert all(len(row.losses) == 3 and len(row.step_s) == 2 for row in rows.values())
    assert all(
        row.peak_host_bytes and row.num_params and row.versions["torch"] and row.machine["host_bytes"] for row in rows.values()
    )
    second = sweep(tmp_path, *arguments)
    assert second.stdout.count("skipped") == 2
    assert len(read_rows(tmp_path / "rows.jsonl")) == 2
    histories = sorted(mirrored(folder) for folder in (tmp_path / "wandb").glob("offline-run-*"))
    assert histories == sorted(row.losses for row in rows.values())


def mirrored(folder: Path) -> list[float]:
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines if '"loss"' in line and '"history"' in line]
    return [find(record, "loss") for record in records]


def find(value: object, key: str) -> float | None:
    if isinstance(value, dict):
        if isinstance(value.get(key), (int, float)):
            return float(value[key])
        return next((found for item in value.values() if (found := find(item, key)) is not None), None)
    return None


def test_a_killed_cell_leaves_a_row_and_only_it_is_run_again(tmp_path: Path) -> None:
    slow = ["measure.warmup_steps=1", "measure.windows=1", "measure.steps_per_window=150"]
    arguments = ["--multirun", "system=in_memory,megatrain", *SMALL, *slow, "logging=none"]
    command = [sys.executable, "-m", "sweeps.run", *arguments, f"output_dir={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if "step 1/" in line:
                break
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        rest = parent.stdout.read()
    assert parent.returncode == 0, rest
    assert "not measured: in_memory (oom_host: the cell was killed with SIGKILL" in rest
    assert {name: row.status for name, row in by_system(tmp_path).items()} == {"in_memory": "oom_host", "megatrain": "ok"}
    again = sweep(tmp_path, *arguments)
    assert again.stdout.count("skipped") == 1
    assert [row.system for row in read_rows(tmp_path / "rows.jsonl")] == ["in_memory", "megatrain", "in_memory"]
    assert by_system(tmp_path)["in_memory"].status == "ok"
    assert "numerics were not checked" not in again.stdout, "the reference came last, and the rows before it are compared with it"
    assert re.search(r"MegaTrain.* yes", again.stdout)


def test_nonfinite_wont_fit_and_missing_deepspeed(tmp_path: Path) -> None:
    nan = sweep(tmp_path / "nan", "system=in_memory", *SMALL, "recipe.lr=1e38", "recipe.weight_decay=0", "logging=none")
    assert nan.returncode == 1
    assert by_system(tmp_path / "nan")["in_memory"].status == "nonfinite", nan.stdout
    large = sweep(tmp_path / "large", "system=in_memory", "model=qwen2.5-32b", "machine.host_bytes=1000000", "logging=none")
    row = by_system(tmp_path / "large")["in_memory"]
    assert (large.returncode, row.status) == (1, "wont_fit")
    assert row.reason.startswith("model: got qwen2.5-32b, which needs ")
    assert "allowed 1,000,000" in row.reason
    assert row.reason in large.stderr
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    arguments = ["--multirun", "system=zero3,in_memory", *SMALL, "logging=none"]
    missing = sweep(tmp_path / "missing", *arguments, env={"PYTHONPATH": str(tmp_path)})
    assert missing.returncode == 0
    assert {name: row.status for name, row in by_system(tmp_path / "missing").items()} == {
        "zero3": "unsupported",
        "in_memory": "ok",
    }


def test_interrupting_leaves_no_row_and_no_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sweeps.run", "system=in_memory", *SMALL, "measure.windows=9999", f"output_dir={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if "step 1/" in line:
                break
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=30)
    assert parent.returncode == 130
    assert errors.startswith("interrupted: ")
    assert len(errors.strip().splitlines()) == 1
    time.sleep(0.2)
    assert not Path(f"/proc/{child}").exists()
    assert not (tmp_path / "rows.jsonl").exists()
