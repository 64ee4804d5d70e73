"""Where a cell's progress and its row go: the console, the JSONL, W&B.

Invariant: a row is on disk, whole and fsynced, before anything mirrors it, and where the disk has no room for it, it is printed
and kept elsewhere; a mirror that fails says so in one line and changes nothing; two studies may append to one file and lose no row.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from sweeps.config import Cell
from sweeps.result import Row, row_of_line, whole

TAIL = 1 << 16
"""Bytes that the end of a file of rows is read by, back to the last newline."""
ROOM, ROOM_A_STEP = 1 << 16, 64
"""Bytes that are kept free for a row, and for each of its steps: several times what rows take."""


class Sink(Protocol):
    """Told of a cell's start, of its events while it works, and of its row."""

    def start(self, cell: Cell) -> None:
        """The cell's process is about to start."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of sweeps.isolate."""

    def row(self, row: Row) -> None:
        """The cell has ended."""

    def close(self) -> None:
        """No more will come, row or not; idempotent."""


class NullSink:
    """The no-op twin."""

    def start(self, cell: Cell) -> None:
        """Nothing."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class JsonlSink(NullSink):
    """One line a row, appended under a lock and fsynced; room for it is reserved before the cell starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._room = ExitStack()

    def start(self, cell: Cell) -> None:
        """Reserve room, in a file without a name, which a kill takes along. OSError where there is none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = self._room.enter_context(tempfile.TemporaryFile(dir=self.path.parent))  # noqa: SIM115
            os.posix_fallocate(file.fileno(), 0, ROOM + ROOM_A_STEP * cell.measure.num_steps)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that reserves nothing
                raise OSError(error.errno, f"{error.strerror}: no room for a row", str(self.path)) from None

    def row(self, row: Row) -> None:
        """Append. OSError where that cannot be done: then the row is on stderr, and where its message says."""
        line = row.to_json().encode()
        self.close()
        try:
            row_of_line(line, "the row")  # what nobody could read would cost the rows around it
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"{error}; {_saved(row, line)}", str(self.path)) from error
        except OSError as error:
            told = f"{error.strerror}; {_saved(row, line)}: append it to the file"
            raise OSError(error.errno, told, str(self.path)) from error

    def close(self) -> None:
        """Give the room free."""
        self._room.close()


def append(path: Path, line: bytes) -> None:
    """Write `line` and a newline at the end of the file, all of it or nothing; OSError where that fails.

    A last line without its newline that is whole gets one. One that is not, its writer was killed, is moved to PATH.torn: no
    reader could tell it from a row.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        end = os.fstat(descriptor).st_size
        tail = _tail(descriptor, end)
        if tail and not whole(tail):
            _write(path.with_name(f"{path.name}.torn"), tail + b"\n")
            end -= len(tail)
            os.ftruncate(descriptor, end)
        try:
            _write_all(descriptor, (b"\n" if whole(tail) else b"") + line + b"\n")
            os.fsync(descriptor)
            if not end:
                _sync_name(path)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def _tail(descriptor: int, end: int) -> bytes:
    """What follows the last newline before `end`."""
    tail = b""
    while end and b"\n" not in tail:
        start = max(0, end - TAIL)
        tail = os.pread(descriptor, end - start, start) + tail
        end = start
    return tail.rpartition(b"\n")[2]


def _sync_name(path: Path) -> None:
    """A new file is on disk when its folder is."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _saved(row: Row, line: bytes) -> str:
    """Put a row that could not be appended into a temporary file and on stderr; says where it is."""
    where = "printed above"
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="row-", suffix=".jsonl")
        os.close(descriptor)
        _write(Path(name), line + b"\n")
        where += f" and kept in {name}"
    with suppress(OSError):
        print(line.decode(), file=sys.stderr, flush=True)
    return f"the row of cell {row.cell} is {where}"


class WandbSink(NullSink):
    """Feeds the row to W&B from the JSONL, in a process of its own: its noise, its hangs and its errors stay there."""

    def __init__(self, rows_path: Path, mode: str, project: str, timeout_s: float = 120.0) -> None:
        self._command = [sys.executable, "-m", "sweeps.upload", str(rows_path), f"mode={mode}", f"project={project}"]
        self._timeout_s = timeout_s

    def row(self, row: Row) -> None:
        """Mirror the last row of the cell; one line on stderr when W&B would not."""
        try:
            done = subprocess.run(
                [*self._command, f"cell={row.cell}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"wandb: row {row.cell} not mirrored ({type(error).__name__}); the JSONL has it", file=sys.stderr)
            return
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            print(f"wandb: row {row.cell} not mirrored ({last[:200]}); the JSONL has it", file=sys.stderr)


def wandb_sink(rows_path: Path, mode: str, project: str) -> Sink:
    """The mirror, or its twin when disabled."""
    return NullSink() if mode == "disabled" else WandbSink(rows_path, mode, project)


class Progressed:
    """What the console knows of a cell: the last event of each kind, in words."""

    def __init__(self, cell: Cell) -> None:
        self.num_steps, self.measure = cell.measure.num_steps, cell.measure
        self.step, self.phase = 0, "start"
        self.loss = self.tokens_per_s = None
        self.host_bytes = self.device_bytes = None
        self._step_s: float | None = None
        self._first_step_at: float | None = None

    def update(self, event: Mapping[str, Any]) -> None:
        """Take one event in."""
        kind = event["event"]
        if kind == "phase":
            self.phase = event["name"]
        elif kind == "memory":
            self.host_bytes, self.device_bytes = event["host_bytes"], event["device_bytes"]
        elif kind == "step":
            now = time.monotonic()
            self._first_step_at = self._first_step_at or now
            self.step = event["step"] + 1
            if self.step > 1:
                self._step_s = (now - self._first_step_at) / (self.step - 1)
        elif kind == "losses":
            self.loss = event["losses"][-1]
            if event["seconds"]:
                self.tokens_per_s = event["num_tokens"] / event["seconds"]

    def text(self) -> str:
        """step i/n, loss, tokens/s, memory, time left: only what is known."""
        parts = [f"step {self.step}/{self.num_steps}" if self.step else self.phase]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s else []
        parts += [f"host {self.host_bytes / 1e9:.2f} GB"] if self.host_bytes else []
        parts += [f"device {self.device_bytes / 1e9:.2f} GB"] if self.device_bytes else []
        if self._step_s is not None:
            parts.append(f"{self._step_s * (self.num_steps - self.step):.0f} s left")
        return "  ".join(parts)


class ConsoleSink:
    """A live line on a terminal; on anything else a plain line at each phase and each window."""

    def __init__(self, label: str, console: Console | None = None) -> None:
        self._label, self._console = label, console or Console(highlight=False, soft_wrap=True)
        self._progressed: Progressed | None = None
        self._bar: Progress | None = None
        self._started = time.monotonic()

    def start(self, cell: Cell) -> None:
        """Show which cell."""
        self._progressed, self._started = Progressed(cell), time.monotonic()
        self._console.print(
            f"{self._label} {cell.system}: {cell.model.name} {cell.dtype}, {cell.shape.batch_size} x {cell.shape.seq_len} tokens, "
            f"{cell.measure.num_steps} steps on {cell.machine.device}"
        )
        if self._console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("start", total=cell.measure.num_steps)
            self._bar.start()

    def event(self, event: Mapping[str, Any]) -> None:
        """Show what changed."""
        assert self._progressed is not None
        self._progressed.update(event)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._progressed.step, description=self._progressed.text())
        elif event["event"] == "losses" or (event["event"] == "phase" and not self._progressed.step):
            self._console.print(f"  {time.monotonic() - self._started:6.1f} s  {self._progressed.text()}")

    def row(self, row: Row) -> None:
        """Show the verdict."""
        self.close()
        took = f"{time.monotonic() - self._started:.0f} s"
        if row.status != "ok":
            self._console.print(f"  {row.status}: {row.reason} ({took})", markup=False)
            return
        agrees = {True: "agrees with the reference", False: "differs from the reference", None: "no reference"}[row.agrees]
        self._console.print(
            f"  ok: {row.tokens_per_s:,.0f} tokens/s, loss {row.losses[0]:.4f} to {row.losses[-1]:.4f}, {agrees} ({took})"
        )
        if row.reason:
            self._console.print(f"  {row.reason}", markup=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
