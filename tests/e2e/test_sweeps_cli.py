"""The bench through its command line: user errors in one line, skips, kills, missing packages, the
W&B runs, the forecast."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, CompletedProcess

import pandas as pd
import pytest

from analysis import rows as frames
from sweeps import auto, command
from sweeps.errors import USER_ERRORS, one_line
from sweeps.result import Row
from sweeps.rowfile import read_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # the first test of the shared study waits for its four commands
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
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


def command_of(output: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "sweeps.run", *overrides, f"output_dir={output}"]


def started(left_s: float) -> list[str]:
    """`python -m sweeps.run` with so many seconds left of a limit of 1000, once it has imported
    what it needs, however slow the machine is."""
    code = f"import sys, time; from sweeps import run; sys.exit(run.main(time.monotonic() - 1000 + {left_s}))"
    return [sys.executable, "-c", code]


def sweep(output: Path, *overrides: str, **env: str) -> CompletedProcess[str]:
    command = command_of(output, *overrides)
    return subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def first_step_of(
    output: Path, *overrides: str, cell: int = 1
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A sweep whose cell of that number has done its first step, and that cell's process."""
    command = command_of(output, *overrides)
    # Under nohup or in a script's background, SIGINT is ignored, and what we start would inherit
    # that.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        preexec_fn=_interruptible,
    ) as parent:
        assert parent.stdout is not None
        firsts = (line for line in parent.stdout if "step 1/" in line)
        for _ in range(cell):
            next(firsts)
        (keeper,) = children(parent.pid)
        (cell_pid,) = children(keeper)
        yield parent, cell_pid


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=nope"], "model: got 'nope', allowed auto, checkpoint, dense-120b"),
        (["system=nope"], "system: got 'nope', allowed fsdp2, fsdp2_compiled, fsdp2_grad_op"),
        (["+experiment=nope"], "experiment: got 'nope', allowed fits, h200_"),
        (
            ["experiment=foo"],
            "with a plus; give +experiment=NAME, or choose a folder for a study of your own, "
            "output_dir=outputs/foo",
        ),
        (
            ["experiment=quickstart"],
            "experiment: got 'quickstart' without a plus, allowed with one; give "
            "+experiment=quickstart",
        ),
        (["ablation=nope"], "ablation: got 'nope', allowed batch_size, "),
        (
            ["--multirun", "system=zero3,published_megatrain", "system.checkout=/x"],
            "system.checkout: got '/x', allowed under another name; give machine.checkout",
        ),
        (
            ["system.dpeth=3"],
            "system.dpeth: got '3', an unknown field, allowed checkpoint_interval",
        ),
        (
            ["shape.batch_size=5", "shape.num_micro_batches=2"],
            "shape.num_micro_batches: got 2, allowed a divisor",
        ),
        (["shape.seq_len=9999"], "shape.seq_len: got 9999, allowed 1 to 2048"),
        (["time_limit_s=0"], "time_limit_s: got 0, allowed seconds > 0, or null"),
        (["time_limit_s=soon"], "time_limit_s: got 'soon', allowed a value of type float"),
        (
            ["--multirun", "hydra/sweeper=optuna", "time_limit_s=60"],
            "time_limit_s: got 60, allowed null with any sweeper",
        ),
        (
            ["--multirun", "hydra.launcher._target_=a.JoblibLauncher", "time_limit_s=60"],
            "sweeper or launcher but Hydra's own",
        ),
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
        (
            ["data.max_bytes=70000", "shape.seq_len=2048", "shape.batch_size=64"],
            "shape.seq_len: got 2048 x 64 sequences",
        ),
        (["--frobnicate"], "command line: got unrecognized arguments: --frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistyped_config_is_one_line(overrides: list[str], words: str) -> None:
    auto.register()
    with pytest.raises(USER_ERRORS) as error:
        command.command_of(overrides)
    line = one_line(error.value, [override for override in overrides if "=" in override])
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model=nope"],
            "model: got 'nope', allowed auto, checkpoint, dense-120b",
        ),  # Hydra refuses
        (
            ["system=megatrain", "system.depth=0"],
            "system.depth: got 0, allowed",
        ),  # the cell refuses
        (
            ["--multirun", "system=megatrain", "system.depth=2,0"],
            "system.depth: got 0, allowed",
        ),  # before the first cell runs
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_user_error_leaves_one_line_and_nothing_else(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    done = sweep(tmp_path / "out", *overrides)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()
    assert "--multirun" not in overrides or done.stdout == "adhoc: looking at 2 cells\n", (
        "a cell of the sweep was started"
    )


@dataclass(frozen=True, kw_only=True)
class Study:
    """One folder through four commands, and the rows in it after each."""

    output: Path
    killed: CompletedProcess[str]
    """in_memory and megatrain without W&B; in_memory is killed in its second step or soon after."""
    again: CompletedProcess[str]
    """The same with W&B."""
    joined: CompletedProcess[str]
    """Two more systems: zero3 first, which has no DeepSpeed here, and fsdp2 last."""
    idle: CompletedProcess[str]
    """The first command once more."""
    rows: list[list[Row]]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Shared, for every cell costs the seconds that torch and transformers take to import."""
    output, path = tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("path")
    (path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    timing = ["measure.warmup_steps=1", "measure.windows=2", "measure.steps_per_window=50"]
    both, rows = ["--multirun", "system=in_memory,megatrain", *SMALL, *timing], []

    def seen(done: CompletedProcess[str]) -> CompletedProcess[str]:
        rows.append(read_rows(output / "rows.jsonl"))
        return done

    with first_step_of(output, *both, "logging=none") as (parent, child):
        os.kill(child, signal.SIGKILL)
        told, errors = parent.communicate(timeout=280)
    killed = seen(CompletedProcess(parent.args, parent.returncode, told, errors))
    again = seen(sweep(output, *both))
    more = ["--multirun", "system=zero3,in_memory,megatrain,fsdp2", *SMALL, *timing]
    joined = seen(sweep(output, *more, PYTHONPATH=str(path)))
    return Study(
        output=output,
        killed=killed,
        again=again,
        joined=joined,
        idle=seen(sweep(output, *both)),
        rows=rows,
    )


def verdicts(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.system, row.status) for row in rows]


def test_a_killed_cell_leaves_a_row_and_the_next_is_measured(study: Study) -> None:
    assert study.killed.returncode == 0, study.killed
    assert (
        "not measured: in_memory (oom_host: the cell was killed with SIGKILL" in study.killed.stderr
    )
    assert verdicts(study.rows[0]) == [("in_memory", "oom_host"), ("megatrain", "ok")]


def test_only_the_killed_cell_is_run_again(study: Study) -> None:
    assert study.again.returncode == 0, study.again
    assert study.again.stdout.count("skipped") == 1
    assert verdicts(study.rows[1]) == [*verdicts(study.rows[0]), ("in_memory", "ok")]


def test_rows_before_the_reference_are_compared_with_it(study: Study) -> None:
    assert "numerics were not checked" not in study.again.stdout
    assert re.search(r"MegaTrain.* same", study.again.stdout)


def test_a_missing_package_costs_only_the_system_that_needs_it(study: Study) -> None:
    assert study.joined.returncode == 0, study.joined
    assert study.joined.stdout.count("skipped") == 2
    assert verdicts(study.rows[2]) == [
        *verdicts(study.rows[1]),
        ("zero3", "unsupported"),
        ("fsdp2", "ok"),
    ]
    assert study.rows[2][-1].agrees is True


def test_what_has_its_number_is_skipped(study: Study) -> None:
    assert study.idle.returncode == 0, study.idle
    assert study.idle.stdout.count("skipped") == 2
    assert study.rows[3] == study.rows[2]


def test_a_row_says_what_was_measured_and_where(study: Study) -> None:
    measured = [row for row in study.rows[-1] if row.status == "ok"]
    assert len(measured) == 3
    for row in measured:
        assert (len(row.losses), len(row.step_s)) == (101, 2)
        assert row.peak_host_bytes
        assert row.num_params
        assert row.versions["torch"]
        assert row.machine["host_bytes"]
        assert sum(row.step_s) * 50 < (row.cell_s or 0) < 280
        assert "time_limit_s" not in row.config


def test_a_study_says_what_is_left_of_it(study: Study) -> None:
    killed, again, idle = (done.stdout for done in (study.killed, study.again, study.idle))
    assert (
        "1 of 2 cells left; time left: unknown" in killed
    )  # what came before was read to find the first step
    assert "adhoc: 2 cells, 1 already measured; time left: unknown" in again
    assert "  system=in_memory  unknown\n  system=megatrain  measured\n" in again
    assert "cells left" not in idle


def test_runs_and_rows_give_the_same_frame(study: Study) -> None:
    """The first command fed no run, the second made up for what it skipped: uploading adds the
    killed cell's, and no other."""
    runs = study.output / "wandb"
    assert len(list(runs.glob("offline-run-*"))) == len(study.rows[-1]) - 1
    command = [sys.executable, "-m", "sweeps.upload", str(study.output)]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=120, check=True)
    assert len(list(runs.glob("offline-run-*"))) == len(study.rows[-1])
    frame, back = (
        frames.every_row(folder).drop(columns="source") for folder in (study.output, runs)
    )
    pd.testing.assert_frame_equal(back, frame)
    assert list(frame["status"]) == [row.status for row in study.rows[-1]]


def test_a_loss_that_is_not_finite_is_a_row(tmp_path: Path) -> None:
    done = sweep(
        tmp_path,
        "system=in_memory",
        *SMALL,
        "recipe.lr=1e38",
        "recipe.weight_decay=0",
        "logging=none",
    )
    assert done.returncode == 1
    assert verdicts(read_rows(tmp_path / "rows.jsonl")) == [("in_memory", "nonfinite")], done.stdout


def test_a_model_that_does_not_fit_is_a_row(tmp_path: Path) -> None:
    done = sweep(
        tmp_path,
        "system=in_memory",
        "model=qwen2.5-32b",
        "machine.host_bytes=1000000",
        "logging=none",
    )
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert (done.returncode, row.status) == (1, "wont_fit")
    assert row.reason.startswith("model: got qwen2.5-32b, which needs ")
    assert "allowed 1,000,000" in row.reason
    assert row.reason in done.stderr


def test_without_a_compiler_or_a_home_the_engine_is_unsupported(tmp_path: Path) -> None:
    nowhere = {
        "CXX": "no-such-compiler",
        "HOME": os.devnull,
        "XDG_CACHE_HOME": "",
        "TMPDIR": str(tmp_path),
    }
    done = sweep(tmp_path, "system=megatrain", *SMALL, "logging=none", **nowhere)
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert (done.returncode, row.status) == (1, "unsupported"), done
    assert row.reason.startswith(
        "CXX: got no-such-compiler (there is none), allowed a C++ compiler"
    )
    assert "\n" not in row.reason


def test_what_has_no_room_in_a_sweep_is_a_row_without_a_process(tmp_path: Path) -> None:
    systems = [
        "--multirun",
        "system=in_memory,fsdp2,megatrain",
        "model=qwen2.5-32b",
        "machine.host_bytes=1000000",
    ]
    done = sweep(tmp_path, *systems, "logging=none")
    rows = read_rows(tmp_path / "rows.jsonl")
    assert done.returncode == 1
    assert verdicts(rows) == [
        (system, "wont_fit") for system in ("in_memory", "fsdp2", "megatrain")
    ], done
    assert not (tmp_path / "logs").exists(), "a cell was started"
    for row in rows:
        assert row.num_params == 32_763_876_352
        assert row.plan["host"] or row.plan["device"]
        assert "allowed 1,000,000" in row.reason


def test_a_killed_study_goes_on_where_it_was_in_rounds_reported_as_one(tmp_path: Path) -> None:
    """in_memory once, the engine in every round. SIGKILL, which nothing can clean up after, reaches
    the study in its last cell."""
    axes = [
        "--multirun",
        "system=in_memory,megatrain",
        "measure.repeat=1,2",
        "measure.repeated=[megatrain]",
        "measure.windows=100",
    ]
    with first_step_of(tmp_path, *axes, *SMALL, "logging=none", cell=3) as (parent, child):
        parent.kill()
    assert ends(child), "the cell outlived its study"
    before = read_rows(tmp_path / "rows.jsonl")
    assert verdicts(before) == [("in_memory", "ok"), ("megatrain", "ok")]
    done = sweep(tmp_path, *axes, *SMALL, "logging=none")
    assert done.stdout.count("skipped") == 2
    rows = read_rows(tmp_path / "rows.jsonl")
    assert rows[:2] == before
    assert verdicts(rows) == [("in_memory", "ok"), ("megatrain", "ok"), ("megatrain", "ok")], done
    assert [row.config["measure"]["repeat"] for row in rows] == [1, 1, 2]
    assert len({row.cell for row in rows}) == 3
    assert rows[1].losses == rows[2].losses
    assert rows[2].agrees
    assert "[3/3] measure.repeat=2, megatrain" in done.stdout
    assert len(re.findall(r"^.*MegaTrain .*same", done.stdout, re.MULTILINE)) == 1
    for row in rows:
        assert row.tflops_6p_causal is not None
        assert row.tflops_6p is not None
        assert row.tflops_6p < row.tflops_6p_causal < (row.tflops_paper or 0)
        assert sum(row.host_split.values()) == row.peak_host_bytes


def test_interrupting_leaves_no_row_and_no_cell(tmp_path: Path) -> None:
    with first_step_of(tmp_path, "system=in_memory", *SMALL, "measure.windows=9999") as (
        parent,
        child,
    ):
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert errors.startswith("interrupted: ")
    assert len(errors.strip().splitlines()) == 1
    assert ends(child)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("module", ["run", "upload"])
def test_interrupting_the_imports_is_one_line(tmp_path: Path, module: str) -> None:
    """However long they take, and though a library may swallow exceptions meanwhile."""
    slow = "import importlib.abc, sys, time\nclass Slow(importlib.abc.MetaPathFinder):\n"
    slow += (
        "    def find_spec(self, name, *_):\n        if name in ('psutil', 'sweeps.identity'):\n"
    )
    slow += "            print('importing', flush=True)\n            try:\n                time.sleep(60)\n"
    slow += "            except KeyboardInterrupt:\n                pass\n"
    (tmp_path / "sitecustomize.py").write_text(f"{slow}sys.meta_path.insert(0, Slow())\n")
    env = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", f"sweeps.{module}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=_interruptible
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "importing\n"
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=60)
    assert (parent.returncode, errors) == (130, "interrupted: run the same command again\n")


INTERRUPTED = {
    "report": ("analysis", "every row is there, the report was not finished"),
    "upload": ("sweeps.upload", "the cell's row is there"),
    "look": ("sweeps.outlook", "no cell was running"),
}


@pytest.mark.parametrize(("module", "told"), INTERRUPTED.values(), ids=INTERRUPTED)
def test_an_interrupt_says_what_is_there(tmp_path: Path, module: str, told: str) -> None:
    slow = f"import sys, time\nif {module!r} in sys.orig_argv:\n    open('{tmp_path}/here', 'w')\n"
    (tmp_path / "sitecustomize.py").write_text(f"{slow}    time.sleep(600)\n")
    axes = ["--multirun", "measure.repeat=1,2"] if module == "sweeps.outlook" else []
    mirrored = "logging=wandb" if module == "sweeps.upload" else "logging=none"
    command = command_of(tmp_path / "out", *axes, "system=in_memory", mirrored, *SMALL)
    env = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=_interruptible
    ) as parent:
        deadline = time.monotonic() + 200
        while not (tmp_path / "here").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert errors == f"interrupted: {told}; run the same command again to go on\n"


def ends(child: int, seconds: float = 10.0) -> bool:
    """Whether a process is gone within that time."""
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{child}").exists()
