"""The one owner of the files of rows: reads each once, knows what is measured, and appends.

Invariant: a row is on disk, whole and fsynced, before anything mirrors it; where the disk has no
room for it, it is printed and kept elsewhere; two studies may append to one file and lose no row.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from sweeps import environment
from sweeps.config import Cell
from sweeps.groups import Machine
from sweeps.identity import kind
from sweeps.result import BENCH_VERSION, RETRIED, Row
from sweeps.rowfile import NOTHING_READ, Read, row_of_line, whole

TAIL = 1 << 16
"""Bytes that the end of a file of rows is read by, back to the last newline."""
ROOM, ROOM_A_STEP = 1 << 16, 64
"""Bytes that are kept free for a row, and for each of its steps: several times what rows take."""


class Rows:
    """The files of rows that a command uses. It parses every line once, however often it asks."""

    def __init__(self) -> None:
        self._files = dict[Path, Read]()

    def of(self, cell: Cell) -> list[Row]:
        """The rows of the cell's file; none where there is no file yet. ValueError as
        `read_rows`."""
        path = cell.rows_path
        if not path.exists():
            return []
        read = self._files.get(path.absolute(), NOTHING_READ).again(path)
        self._files[path.absolute()] = read
        return [*read.rows, *read.last]

    def latest(self, cell: Cell) -> Row | None:
        """The last row of the cell on this kind of machine."""
        mine = (row for row in reversed(self.of(cell)) if row.identity == cell.identity)
        return next((row for row in mine if _of_here(row, cell)), None)

    def standing(self, cell: Cell) -> Row | None:
        """The row of the cell that another run would not change, if it has one."""
        row = self.latest(cell)
        if row is None or row.bench_version != BENCH_VERSION or row.status in RETRIED:
            return None
        if row.status == "ok" and _asked_less(row, cell):
            return None
        return None if row.status == "oom_device" and row.crowd_device_bytes else row

    def is_labelled(self, row: Row, cell: Cell) -> bool:
        """Whether this measurement is there under the name of the cell's own study."""
        mine = (one for one in self.of(cell) if one.cell == cell.hash)
        named = [one for one in mine if one.experiment == cell.experiment]
        return any((one.started_at, one.machine) == (row.started_at, row.machine) for one in named)

    def append(self, path: Path, row: Row) -> None:
        """Append. OSError where that fails: the row is on stderr then, and where the error says."""
        line = row.to_json().encode()
        try:
            row_of_line(line, "the row")  # what nobody could read would cost the rows around it
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, line)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"{error}; {_saved(row, line)}", str(path)) from error
        except OSError as error:
            message = f"{error.strerror}; {_saved(row, line)}: append it to the file"
            raise OSError(error.errno, message, str(path)) from error


def _asked_less(row: Row, cell: Cell) -> bool:
    """Whether the cell asks for more windows, or for more after them, than the row was asked."""
    given, measure = row.config.get("measure", {}), cell.measure
    stopped = row.reason.startswith("stopped after") and given.get("stop_below")
    evaluated = ("heldout_tokens", "heldout_every_window", "exact_match")
    return (stopped and not measure.stop_below) or any(
        getattr(measure, name) > (given.get(name) or 0) for name in evaluated
    )


def comparable(row: Row, cell: Cell) -> bool:
    """Whether this bench measured the row on this kind of machine, as it would the cell."""
    return row.bench_version == BENCH_VERSION and _of_here(row, cell)


def _of_here(row: Row, cell: Cell) -> bool:
    return not row.machine or kind(row.machine) == _here(cell.machine.device)


@lru_cache(maxsize=2)
def _here(device: str) -> str:
    return kind(environment.machine(Machine(device=device), None))


@contextmanager
def room_for_row(cell: Cell) -> Iterator[None]:
    """Keep room for the cell's row, in a file without a name, which a kill takes along.

    OSError where the disk has none.
    """
    path = cell.rows_path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, ROOM + ROOM_A_STEP * cell.measure.num_steps)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # it reserves nothing there
                message = f"{error.strerror}: no room for a row"
                raise OSError(error.errno, message, str(path)) from None
        yield


def _append(path: Path, line: bytes) -> None:
    """Write `line` and a newline at the end of the file, all of it or nothing.

    A last line without its newline that is whole gets one. One that is not, since its writer was
    killed, is moved to PATH.torn: no reader could tell it from a row.
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
    """Put a row that could not be appended into a temporary file and on stderr; say where it is."""
    where = "printed above"
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="row-", suffix=".jsonl")
        os.close(descriptor)
        _write(Path(name), line + b"\n")
        where += f" and kept in {name}"
    with suppress(OSError):
        print(line.decode(), file=sys.stderr, flush=True)
    return f"the row of cell {row.cell} is {where}"
