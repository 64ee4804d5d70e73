"""Nothing that a cell started outlives it, nor the study, whichever of them is killed, and how."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps import keeper
from sweeps.isolate import Outcome, run_isolated
from sweeps.memory import NoDevice
from tests.e2e.test_sweeps_cli import ENVIRONMENT, ROOT, command_of

pytestmark = pytest.mark.slow

CELL = """
import os, subprocess, sys, time
own_group = subprocess.Popen(["sleep", "600"], process_group=0)
own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
orphan = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], text=True)
open("pids.new", "w").write(f"{os.getpid()} {own_group.pid} {own_session.pid} {orphan}")
os.rename("pids.new", "pids")
"""
"""A cell with children as ninja's compilers are, in groups and sessions of their own, and one whose
own parent has ended."""
STUDY = """
import pathlib, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has children ignore
from sweeps.isolate import run_isolated
from sweeps.memory import NoDevice
run_isolated("fake_cell", {}, log=pathlib.Path("log"), timeout_s=600, device=NoDevice(),
             on_event=lambda event: None)
"""


def there(pids: list[int]) -> list[int]:
    """Those that live."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def end(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether they are gone within that time; two seconds are promised, where there is a core."""
    deadline = time.monotonic() + seconds
    while there(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = there(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def awaited(found: Callable[[], list[int]]) -> list[int]:
    deadline = time.monotonic() + 60
    while not (pids := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pids


def pids_in(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    (folder / "fake_cell.py").write_text(CELL + end)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    monkeypatch.chdir(folder)


def ran(folder: Path, timeout_s: float) -> Outcome:
    return run_isolated(
        "fake_cell",
        {},
        log=folder / "log",
        timeout_s=timeout_s,
        device=NoDevice(),
        on_event=lambda event: None,
    )


ENDS = {
    "ends": ("sys.exit(3)", "error"),
    "is killed": ("os.kill(os.getpid(), 9)", "oom_host"),
    "hangs": ("time.sleep(600)", "timeout"),
    "loses its keeper": ("os.kill(os.getppid(), 9); time.sleep(600)", "oom_host"),
    "sends no event": (
        "os.write(int(sys.argv[2]), b'what?' + bytes([10])); time.sleep(600)",
        "error",
    ),
}


@pytest.mark.parametrize(("how", "status"), ENDS.values(), ids=ENDS)
def test_what_a_cell_started_is_gone_when_its_outcome_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, status: str
) -> None:
    written(tmp_path, monkeypatch, how)
    before = keeper.descendants()
    outcome = ran(tmp_path, timeout_s=4.0 if status == "timeout" else 60.0)
    pids = pids_in(tmp_path)
    left = there(pids)
    assert end(pids)
    assert not left
    assert len(pids) == 4
    assert outcome.status == status, outcome
    assert keeper.descendants() == before


def test_others_of_the_study_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, "")
    with subprocess.Popen(["sleep", "600"]) as other:
        ran(tmp_path, timeout_s=60.0)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_killed_study_takes_everything_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    written(tmp_path, monkeypatch, "time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", STUDY]) as study:
        pids = awaited(lambda: pids_in(tmp_path))
        assert there(pids) == pids
        study.send_signal(number)
    assert end(pids)


def running(word: str, parent: int) -> list[int]:
    """Processes below one with that word in their command."""
    below, found = {parent}, []
    for name in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
            command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) in below:
            below.add(int(name))
            found += [int(name)] if word.encode() in command and b"-I" not in command else []
    return found


def test_a_look_at_cells_dies_with_its_study(tmp_path: Path) -> None:
    """However long it would have looked; a command that is given again has the machine to
    itself."""
    slow = "import sys, time\nif 'sweeps.outlook' in sys.orig_argv: time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    command = command_of(tmp_path, "--multirun", "system=in_memory,megatrain", "model=tiny")
    path = {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT | path, stdout=subprocess.DEVNULL
    ) as study:
        pids = awaited(lambda: running("sweeps.outlook", study.pid))
        study.kill()
    assert end(pids)
