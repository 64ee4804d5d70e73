"""Submits a study to a cluster as one job, through submitit, with the fields of Hydra's launcher.

    python -m sweeps.run +ablation=depth hydra/launcher=slurm hydra.launcher.partition=NAME
    python -m sweeps.run +ablation=depth hydra/launcher=local                    # here, to try it

Invariant: a job is a study, never a cell, because rows of one machine in one go can be compared. A
job that is stopped, or whose time is up, is queued again and goes on with the cells that are left.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

KINDS = {"SlurmLauncher": "slurm", "LocalLauncher": "local"}
"""Class of a launcher -> submitit's name of what it submits to."""
SHARED = (
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
    "stderr_to_stdout",
)
"""Fields of a launcher that submitit calls the same everywhere."""
UNFINISHED = 75
"""Exit code of a command whose time limit left cells out (sweeps/session.py)."""
SIGNAL_DELAY_S = 30
"""submitit's, where the launcher has no such field."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A study that is to be a job."""

    kind: str
    """slurm or local."""
    launcher: Mapping[str, Any]
    """The launcher's fields."""
    argv: Sequence[str]
    """What the job gives sweeps.run."""
    rows: Sequence[Path]
    """Files that it adds rows to."""

    @property
    def limit_s(self) -> float:
        """Seconds that one start has, until it is warned."""
        delay = float(self.launcher.get("signal_delay_s", SIGNAL_DELAY_S))
        return max(1.0, 60.0 * float(self.launcher["timeout_min"]) - delay)

    def submit(self) -> Any:
        """submitit's job. ValueError, one line, where the cluster takes none."""
        import submitit

        launcher = dict(self.launcher)
        folder, retries = launcher.pop("submitit_folder"), launcher.pop("max_num_timeout", None)
        first = {} if retries is None else {f"{self.kind}_max_num_timeout": retries}
        shared = {key: value for key, value in launcher.items() if value is not None}
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # sbatch's words are in the error too
                executor = submitit.AutoExecutor(folder=folder, cluster=self.kind, **first)
                executor.update_parameters(
                    **{k if k in SHARED else f"{self.kind}_{k}": v for k, v in shared.items()}
                )
                return executor.submit(Job(self.argv, self.rows))
        except Exception as error:  # submitit's own, sbatch's, and of a field's type
            words = " ".join(str(error).split())
            raise ValueError(
                f"hydra.launcher: got {words}, allowed what {self.kind} takes; correct it"
            ) from error


@dataclass
class Job:
    """What the job runs: a command that goes on where it was, until nothing is left."""

    argv: Sequence[str]
    rows: Sequence[Path]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __call__(self) -> None:
        """RuntimeError where the command failed, or its time is too short for one more cell."""
        before = self._num_bytes()
        command = [sys.executable, "-m", "sweeps.run", *self.argv]
        self.process = subprocess.Popen(command, preexec_fn=_ignore_warning)
        code = self.process.wait()
        if code == UNFINISHED and self._num_bytes() > before:
            os.kill(os.getpid(), _warning())  # submitit calls `checkpoint` and has it queued again
        if code == UNFINISHED:
            raise RuntimeError("no cell ended within hydra.launcher.timeout_min; raise it")
        if code:
            raise RuntimeError(f"sweeps.run ended with {code}; its log says why")

    def checkpoint(self) -> Any:
        """What is queued when this one must stop: the same, for rows are kept as they come."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None and self.process.returncode is None:
            # `__call__`, which this interrupts, waits in `wait` and holds its lock
            os.kill(self.process.pid, signal.SIGTERM)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Job(self.argv, self.rows))

    def _num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.rows if path.exists())


def kind_of(launcher: DictConfig) -> str | None:
    """What a launcher of Hydra's submits to; None for one that runs cells by itself."""
    return KINDS.get(str(launcher._target_).rpartition(".")[2])


def fields_of(launcher: DictConfig, host_bytes: int | None) -> dict[str, Any]:
    """The launcher's fields; its memory is that of the plan, or all that the machine has.

    host_bytes: memory that the cells plan with, None for all.
    """
    plain: Any = OmegaConf.to_container(launcher, resolve=True)
    found: dict[str, Any] = plain
    kind = KINDS[found.pop("_target_").rpartition(".")[2]]
    if kind == "slurm":
        if found["mem_gb"] is None:
            found["mem"] = f"{-(-host_bytes // 2**30)}G" if host_bytes else "0"
        if found["cpus_per_task"] is None:
            found["srun_args"] = ["--cpu-bind=none"]  # else it is bound to one core
    return found


def _warning() -> signal.Signals:
    return signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]


def _ignore_warning() -> None:
    """Slurm warns every process of a job, and the command is stopped by this one."""
    signal.signal(_warning(), signal.SIG_IGN)
