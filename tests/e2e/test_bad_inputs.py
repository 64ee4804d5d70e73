"""Every line of the table of bad inputs: no traceback, exit code 2, one line that says where,
nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import bad_inputs

ROOT = Path(__file__).resolve().parents[2]
CASES = bad_inputs.cases()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test waits for all of them


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    rows = min((ROOT / "analysis" / "results").rglob("*.jsonl"))
    command = [sys.executable, "-m", "tests.e2e.bad_inputs", str(rows)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_table_is_long_and_says_nothing_twice() -> None:
    assert len(CASES) >= 300
    assert len({(program, arguments) for program, arguments, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{program} {arguments}" for program, arguments, _ in CASES]
)
def test_a_bad_input_is_one_line(tried: list[dict[str, Any]], number: int) -> None:
    _, _, words = CASES[number]
    got = tried[number]
    assert len(got["stderr"].splitlines()) == 1, got["stderr"][-2000:]
    assert words in got["stderr"]
    assert got["code"] == 2
    assert got["left"] == []
