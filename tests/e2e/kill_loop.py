"""Kills studies, uploads and reports at random moments and starts them again; then nothing may be
lost, torn, doubled or left running.

    python -m tests.e2e.kill_loop --kills 300 --seed 0      (two or three seconds a kill)
    python -m tests.e2e.kill_loop --of training --kills 1000       (tests/e2e/kill_training.py)

Of studies of two cells the parent, the cell or all die; then reports on the rows are killed, and
uploads of them. The commands are the real ones, in processes that are forked once their
libraries are there, so that a kill costs seconds less; cells are started as always, and each starts
a daemon as a compiler would be. What is found wrong ends the loop with an AssertionError.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pandas as pd

from analysis import __main__ as analysis
from analysis import rows as frames
from sweeps import run
from sweeps.rowfile import read_rows
from tests.e2e import kill_training
from tests.e2e.test_sweeps_cli import SMALL

ROOT = Path(__file__).resolve().parents[2]
MARK = "MEGATRAIN_KILL_LOOP"
"""Environment variable by which processes are known to have come from this loop."""
DAEMON = "import subprocess, sys\nif 'sweeps.cell' in sys.orig_argv:\n    subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
"""The sitecustomize of every process: a cell has a child in a session of its own."""
AXES = ["--multirun", "system=in_memory,megatrain", "logging=none"]
NUM_CELLS = 2
GONE_S = 2.0
"""In which every process of a killed cell or study is gone."""
SHARES = {"study": 0.2, "report": 0.65, "upload": 0.15}
"""Of the kills: a killed study costs the most seconds."""
SPAN_S = {"study": 10.0, "report": 1.5, "upload": 5.0}
"""Kills come within these seconds, about what the command takes."""
FIGURES = {".png": b"IEND\xaeB`\x82", ".pdf": b"%%EOF\n"}
"""How a whole one ends."""


def commanded(main: Callable[[], int], *arguments: str) -> int:
    """The pid of `main` in a process of its own, with that command line."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(BaseException):
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(quiet, descriptor)
        sys.argv = ["command", *arguments]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os._exit(main())
    os._exit(70)


def ours() -> dict[int, str]:
    """Command lines by pid of the processes that this loop's commands started and that live."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if marked and command and int(folder.name) != os.getpid():
                found[int(folder.name)] = command
    return found


def cells() -> dict[int, str]:
    """Those of `ours` that belong to cells or looks at cells, daemons and keepers among them."""
    words = ("sweeps.cell", "sweeps.outlook", "sleep 600")
    return {
        pid: command for pid, command in ours().items() if any(map(command.__contains__, words))
    }


def lives(pid: int, seconds: float) -> bool:
    """Whether a command is still there after that time; it is waited for where it is not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    return True


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Loop:
    """A folder that is measured, mirrored and drawn under fire."""

    def __init__(self, folder: Path, seed: int, patience_s: float) -> None:
        self.folder, self.random = folder / "study", random.Random(seed)
        self.rows_path, self.patience_s = self.folder / "rows.jsonl", patience_s
        self.kills = Counter[str]()
        self.lines: list[str] = []
        """Rows so far: none may go again."""
        self.figures: dict[str, bytes] = {}
        """Those of an undisturbed report."""

    def command(self, kind: str) -> int:
        """The pid of a new process that runs it."""
        if kind == "study":
            return commanded(run.main, *AXES, *SMALL, f"output_dir={self.folder}")
        if kind == "upload":
            return commanded(uploaded, str(self.rows_path))
        return commanded(lambda: analysis.main(["report", str(self.rows_path)]))

    def disturb(self, kind: str) -> bool:
        """Kill a command, or the cell that it runs, at a random moment; False where it ended
        before."""
        pid = self.command(kind)
        if not lives(pid, self.random.uniform(0.0, SPAN_S[kind])):
            return False
        who = self.random.choice(["parent", "cell", "all"]) if kind == "study" else "parent"
        if who == "cell" and (mine := cells()):
            starters = sorted(pid for pid, command in mine.items() if "sleep" not in command)
            kill(self.random.sample(starters, k=min(1, len(starters))))
            self.gone(mine)
            self.kills[kind] += 1
            self.look()
            if not lives(pid, self.random.uniform(0.0, SPAN_S[kind])):  # it goes on with the next
                return False
        kill([pid, *(ours() if who == "all" else [])])
        os.waitpid(pid, 0)
        self.gone()
        self.kills[kind] += 1
        self.look()
        return True

    def gone(self, killed: Collection[int] = ()) -> None:
        """Those processes of cells, or else all of them, end in time."""
        deadline = time.monotonic() + self.patience_s
        while left := [one for one in cells().items() if not killed or one[0] in killed]:
            assert time.monotonic() < deadline, f"outlived their cell or study: {left}"
            time.sleep(0.02)

    def finish(self, kind: str) -> None:
        """The same command once more, undisturbed, and what must hold then."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.command(kind), 0)[1])
        assert code == 0, f"{kind} ended with {code}"
        self.gone()
        self.look()
        {"study": self.measured, "report": self.look, "upload": self.mirrored}[kind]()

    def afresh(self, kind: str) -> None:
        """Remove what is whole, for there is nothing left to disturb."""
        self.finish(kind)
        if kind == "study":
            shutil.rmtree(self.folder)
            self.lines = []
        elif kind == "upload":
            shutil.rmtree(self.folder / "wandb")

    def look(self) -> None:
        """What must hold at any moment."""
        text = self.rows_path.read_text() if self.rows_path.exists() else ""
        lines = text.split("\n")[:-1]  # what follows the last newline is torn, and cut off later
        assert lines[: len(self.lines)] == self.lines, "a row was lost"
        self.lines = lines
        for path in self.folder.glob("report*"):
            if path.suffix in FIGURES:
                assert path.read_bytes().endswith(FIGURES[path.suffix]), f"{path.name} is torn"
            if self.figures and path.name in self.figures:
                assert path.read_bytes() == self.figures[path.name], f"{path.name} is another"

    def measured(self) -> None:
        """Each cell has its row once, and every line is one."""
        rows = read_rows(self.rows_path)
        assert len(rows) == len(self.lines)
        good = Counter(row.cell for row in rows if row.status == "ok")
        assert sorted(good.values()) == [1] * NUM_CELLS, good
        assert {row.status for row in rows} <= {"ok", "oom_host"}, rows

    def mirrored(self) -> None:
        """W&B's runs are the rows."""
        both = [frames.frame(path) for path in (self.rows_path, self.folder / "wandb")]
        one, other = (frame.drop(columns="source") for frame in both)
        pd.testing.assert_frame_equal(one, other)

    def unlocked(self) -> None:
        """Nobody holds a lock that is left."""
        for path in self.folder.rglob("*lock*"):
            if path.is_file():
                with path.open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def uploaded() -> int:
    """sweeps.upload; its library starts a service of its own, so it is imported by each process."""
    from sweeps import upload

    return upload.main(sys.argv[1:])


def run_loop(kills: int, seed: int, folder: Path, patience_s: float = GONE_S) -> str:
    """The whole loop in an empty folder; what was done, in one line."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(DAEMON)
    os.environ["PYTHONPATH"] = f"{folder / 'path'}:{ROOT}"
    shared, began = set(os.listdir("/dev/shm")), time.monotonic()
    loop = Loop(folder, seed, patience_s)
    for kind, part in SHARES.items():
        if kind == "report":
            loop.finish(kind)
            loop.figures = {path.name: path.read_bytes() for path in loop.folder.glob("report*")}
        while loop.kills[kind] < kills * part:
            if not loop.disturb(kind) and loop.kills[kind] < kills * part:
                loop.afresh(kind)
        loop.finish(kind)
    loop.unlocked()
    deadline = time.monotonic() + 10 * patience_s
    while left := ours():  # W&B's service and a study's report end by themselves
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    lost = set(os.listdir("/dev/shm")) - shared
    assert not lost, f"left in /dev/shm: {lost}"
    told = ", ".join(f"{count} of {kind}" for kind, count in loop.kills.items())
    took = f"{sum(loop.kills.values())} kills ({told}) in {time.monotonic() - began:.0f} s"
    return f"{took}: no row lost or doubled, figures whole, W&B equal, nothing left running"


def main() -> int:
    """Print one line; an AssertionError says what did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=("studies", "training"), default="studies")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=GONE_S, help="seconds to be gone in")
    options = parser.parse_args()
    os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            if options.of == "training":
                print(kill_training.run_loop(options.kills, options.seed, Path(folder)))
            else:
                print(run_loop(options.kills, options.seed, Path(folder), options.patience))
        finally:
            kill(ours())
    return 0


if __name__ == "__main__":
    sys.exit(main())
