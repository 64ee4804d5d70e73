"""Ten kills of each loop of tests/e2e/kill_loop.py, which is a command for hundreds."""

import subprocess
import sys

import pytest

from tests.e2e.test_sweeps_cli import ENVIRONMENT, ROOT

KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_lose_tear_double_and_leave_nothing() -> None:
    """Two seconds to be gone in are for a machine with a free core; here others may have it."""
    command = [sys.executable, "-m", "tests.e2e.kill_loop", f"--kills={KILLS}", "--patience=30"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert int(line.split(" kills ")[0]) >= KILLS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_under_fire_ends_as_one_that_was_never_stopped() -> None:
    command = [sys.executable, "-m", "tests.e2e.kill_loop", "--of=training", f"--kills={KILLS}"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert int(line.split(" kills ")[0]) >= KILLS
