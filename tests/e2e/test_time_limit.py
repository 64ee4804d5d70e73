"""A command's time limit: what it leaves out, what it stops, what it keeps."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps import auto, study
from sweeps.command import command_of
from sweeps.isolate import Outcome
from sweeps.rows import Rows
from sweeps.session import UNFINISHED
from tests.e2e.test_sweeps_cli import ENVIRONMENT, ROOT, SMALL, started

pytestmark = pytest.mark.slow


def limited(output: Path, *overrides: str, left_s: float) -> subprocess.CompletedProcess[str]:
    """The command with so many seconds of its limit left."""
    command = [
        *started(left_s),
        *overrides,
        *SMALL,
        "logging=none",
        "time_limit_s=1000",
        f"output_dir={output}",
    ]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )


def test_a_cell_that_has_not_ended_is_stopped_and_has_no_row(tmp_path: Path) -> None:
    done = limited(tmp_path, "system=in_memory", "measure.windows=9999", left_s=5)
    assert done.returncode == UNFINISHED, done
    assert (
        done.stdout.count("stopped, no row: time_limit_s is up; the same command goes on") == 1
    ), done
    assert "not measured: in_memory (not run)" in done.stderr
    assert not (tmp_path / "rows.jsonl").exists()


def test_no_cell_is_begun_beyond_the_limit(tmp_path: Path) -> None:
    done = limited(
        tmp_path / "out", "--multirun", "system=megatrain", "system.depth=1,2", left_s=-1
    )
    assert done.returncode == UNFINISHED, done
    for label in ("[1/2] system.depth=1, megatrain", "[2/2] system.depth=2, megatrain"):
        assert (
            f"{label}: not begun: 0 s left of time_limit_s = 1000; the same command goes on"
            in done.stdout
        )
    assert "not measured: megatrain, 2 cells (not run)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_the_time_limit_cuts_off_counts_where_nothing_more_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cell had measured, and was giving its memory back; a held-out loss that is missing is
    measured again."""
    auto.register()
    measured = [
        "system=in_memory",
        *SMALL,
        "measure.windows=1",
        "logging=none",
        f"output_dir={tmp_path}",
    ]
    window = {"event": "losses", "first_step": 1, "seconds": 1.0, "num_tokens": 30, "losses": [7.0]}
    outcome = Outcome(
        events=[window],
        status="ok",
        reason="after the measurement: killed after ...",
        timed_out=True,
        cell_s=9.0,
    )
    monkeypatch.setattr(study, "run_isolated", lambda *_, **__: replace(outcome))
    (asked,) = command_of([*measured, "measure.heldout_tokens=256"]).cells or []
    with pytest.raises(study.TimeIsUpError):
        study.run_cell(asked, "", Rows(), time.monotonic() + 9)
    assert not asked.rows_path.exists()
    (cell,) = command_of([*measured, "measure.heldout_tokens=0"]).cells or []
    row = study.run_cell(cell, "", Rows(), time.monotonic() + 9)
    assert (row.status, row.reason, row.cell_s) == ("ok", "", None)
    other = replace(cell, seed=1, config={**cell.config, "seed": 1})
    assert "killed after" in study.run_cell(other, "", Rows()).reason
