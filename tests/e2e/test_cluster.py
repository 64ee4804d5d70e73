"""A study as a job of submitit's local executor: requeued, beside another, refused."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hydra.errors import MissingConfigException

from sweeps import auto
from sweeps.cluster import Job
from sweeps.command import command_of
from sweeps.errors import one_line
from sweeps.result import Row
from sweeps.rowfile import read_rows
from tests.e2e.test_sweeps_cli import SMALL

pytestmark = pytest.mark.slow
PATIENCE_S = 180.0
COMMAND = [sys.executable, "-m", "sweeps.run", "--multirun", *SMALL]


def submitted(folder: Path, *overrides: str) -> int:
    """The pid of a job that runs on when the command has ended."""
    mine = ["hydra/launcher=local", f"output_dir={folder}", "logging=none", *overrides]
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be the job's too
        subprocess.run([*COMMAND, *mine], stdout=output, stderr=output, check=False)
        output.seek(0)
        told = output.read()
    found = re.match(r"job (\d+): \d+ minutes a start", told)
    assert found, told
    return int(found[1])


def commanded(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *overrides], capture_output=True, text=True, check=False)


def rows_of(folder: Path) -> list[Row]:
    path = folder / "rows.jsonl"
    return read_rows(path) if path.exists() else []


def ended(job: int, folder: Path) -> str:
    """What the job said until it ended."""
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(job) and psutil.Process(job).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, said(job, folder)
        time.sleep(0.1)
    return said(job, folder)


def said(job: int, folder: Path) -> str:
    return (folder / ".jobs" / str(job) / f"{job}_0_log.out").read_text()


def warn(job: int) -> None:
    """As Slurm does before it stops a job: every process of it hears the signal."""
    (task,) = psutil.Process(job).children()
    for process in [task, *task.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a cell may have ended meanwhile
            process.send_signal(signal.SIGUSR2)


def test_a_job_that_is_stopped_is_queued_again_and_ends_whole(tmp_path):
    job = submitted(tmp_path, "system=in_memory,megatrain")
    deadline = time.monotonic() + PATIENCE_S
    while not rows_of(tmp_path):
        assert time.monotonic() < deadline, said(job, tmp_path)
        time.sleep(0.05)
    warn(job)
    log = ended(job, tmp_path)
    assert f"Requeued job {job}" in log
    assert "skipped, " in log
    rows = rows_of(tmp_path)
    assert sorted(row.system for row in rows) == ["in_memory", "megatrain"]
    assert {row.status for row in rows} == {"ok"}


def test_two_jobs_at_once_lose_no_row(tmp_path):
    jobs = [submitted(tmp_path, f"system={name}") for name in ("in_memory", "megatrain")]
    for job in jobs:
        ended(job, tmp_path)
    assert sorted(row.system for row in rows_of(tmp_path)) == ["in_memory", "megatrain"]


def test_a_start_that_ends_no_cell_is_not_queued_again(tmp_path):
    """It would be for ever."""
    argv = [*SMALL, "system=in_memory", f"output_dir={tmp_path}", "time_limit_s=1", "logging=none"]
    with pytest.raises(RuntimeError, match="no cell ended within"):
        Job(argv, [tmp_path / "rows.jsonl"])()


def test_a_failed_command_fails_its_job(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 2"):
        Job(["system=nobody"], [tmp_path / "rows.jsonl"])()


def test_the_job_does_the_rest_of_the_command_within_its_time(tmp_path):
    auto.register()
    told = ["--multirun", "system=in_memory,megatrain", f"output_dir={tmp_path}"]
    launcher = ["hydra/launcher=slurm", "hydra.launcher.timeout_min=10"]
    job = command_of([*launcher, *told]).submission
    assert job is not None
    assert job.argv == [*told, "time_limit_s=540"]
    assert (job.kind, job.rows) == ("slurm", [tmp_path / "rows.jsonl"])
    assert job.launcher["additional_parameters"] == {"exclusive": True}
    assert (job.launcher["mem"], job.launcher["srun_args"]) == ("0", ["--cpu-bind=none"])
    given = ["machine.host_bytes=16000000000", "time_limit_s=60", "process.num_gpus=8"]
    job = command_of([*launcher, *told, *given, "hydra.launcher.cpus_per_task=8"]).submission
    assert job is not None
    assert job.argv == [*told, *given]
    assert job.launcher["mem"] == "15G"
    assert "srun_args" not in job.launcher


def test_what_the_cluster_refuses_is_one_line(tmp_path, monkeypatch):
    """sbatch's words are Slurm 22's."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun"):
        script = tmp_path / "bin" / name
        script.write_text(
            "#!/bin/sh\necho sbatch: error: invalid partition specified: $0 >&2\nexit 1\n"
        )
        script.chmod(0o755)
    words = ["system=in_memory", "hydra/launcher=slurm", f"output_dir={tmp_path / 'out'}"]
    monkeypatch.setenv("PATH", str(tmp_path))
    told = commanded(*words)
    assert told.returncode == 2
    assert "hydra.launcher: got Could not detect" in told.stderr
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    told = commanded(*words)
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert line.startswith("hydra.launcher: got sbatch: error: invalid partition specified")


def test_a_launcher_that_is_not_installed_is_named():
    error = MissingConfigException("", "hydra/launcher/submitit_slurm", ["basic"])
    assert one_line(error) == (
        "hydra/launcher: got 'submitit_slurm', which is not installed, allowed basic; pip install "
        "'megatrain-bench[cluster]'"
    )
