"""The bench: composes cells, has each measured, reports. Hydra's flags, launchers and sweepers
work.

Invariant: every cell of a sweep is composed and checked before the first one runs, its system's own
options too; what a user can get wrong ends in one line on stderr and exit code 2
(HYDRA_FULL_ERROR=1 shows the traceback).

    python -m sweeps.run +experiment=quickstart                     # what `make bench` runs
    python -m sweeps.run system=megatrain system.depth=3
    python -m sweeps.run --multirun system=megatrain system.depth=1,2,3 shape=quick
    python -m sweeps.run +tune=zero3                                # sweeps/tuner.py
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeps import auto
from sweeps.cluster import Submission
from sweeps.command import command_of, compose_cell, left_out
from sweeps.command_line import mend_streams
from sweeps.errors import USER_ERRORS, one_line, overrides_in
from sweeps.outlook import require_memory
from sweeps.session import Session

REPORTED_WITH = ("matplotlib", "pandas", "rich", "scipy", "tabulate")
"""Packages without which the report after the last cell could not be made."""


def _by_hydra(argv: Sequence[str], session: Session) -> None:
    """Have Hydra show something, or run the cells with another launcher or sweeper."""
    sys.argv[1:] = argv

    @hydra.main(config_path=str(auto.CONF), config_name="config", version_base="1.3")
    def job(cfg: DictConfig) -> float:
        return _job(cfg, session)

    job()


def _job(cfg: DictConfig, session: Session) -> float:
    """Tokens/s of a cell that Hydra runs, which a search maximises: 0 without a number."""
    config = HydraConfig.get()
    choices = config.runtime.choices
    try:
        cell = compose_cell(cfg)
        if left_out(cell, choices.get("system")):
            return 0.0
        require_memory([cell])
        number = int(config.job.num) + 1 if config.mode == RunMode.MULTIRUN else 1
        row = session.run(cell, f"[{number}]", trial=bool(choices.get("tune")))
        return (row and row.tokens_per_s) or 0.0
    except USER_ERRORS as error:
        if _full_error():
            raise
        if choices.get("tune") and isinstance(
            error, ValueError
        ):  # two knobs that do not go together
            print(f"refused: {one_line(error)}", flush=True)
            return 0.0
        fail(error)  # SystemExit passes Hydra, which would run the other jobs before it raised this


def _submit(submission: Submission) -> int:
    job = submission.submit()
    print(
        f"job {job.job_id}: {submission.limit_s / 60:.0f} minutes a start; it says in "
        f"{job.paths.stdout} what it does",
        flush=True,
    )
    return 0


def _full_error() -> bool:
    return os.environ.get("MEGATRAIN_FULL_ERROR") == "1"


def _require_report() -> None:
    for package in REPORTED_WITH:
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"command line: got no package {package}, allowed with it, for the report; run pip "
                "install -e ."
            )


def fail(error: BaseException) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(one_line(error, overrides_in(sys.argv[1:])), file=sys.stderr, flush=True)
    sys.exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _process_began() -> float:
    """When this process began, on time.monotonic's clock."""
    try:
        return time.monotonic() - (time.time() - psutil.Process().create_time())
    except (psutil.Error, OSError):  # no /proc
        return time.monotonic()


def _settle_process() -> None:
    """Streams that can be written to, signals that stop a cell, and Hydra's errors for us."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        os.environ["MEGATRAIN_FULL_ERROR"] = "1"
    mend_streams()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands us its errors instead of printing them
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGINT, _interrupt)
    auto.register()


def main(began: float | None = None) -> int:
    """Validate, run, report; the exit code.

    It is 0 when at least one cell has its number, 75 where the time limit left cells out. began:
    when the command began, on time.monotonic's clock; None is when its process did.
    """
    _settle_process()
    session = Session(_process_began() if began is None else began)
    try:
        _require_report()
        command = command_of(sys.argv[1:])
        if command.submission:
            return _submit(command.submission)
        session.plan(command.cells)
        if command.by_hydra:
            if not command.tune or session.begin():
                _by_hydra(command.argv, session)
        else:
            for cell in session.cells:
                session.run(cell)
        return session.finish(command)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if _full_error():
            raise
        fail(error)
    except KeyboardInterrupt as interrupt:
        state = str(interrupt) or "no cell was running"
        print(f"interrupted: {state}; run the same command again to go on", file=sys.stderr)
        return 130
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main())
