"""One cell is measured by one process at a time: a lock in the output folder, which names its
holder.

Invariant: the kernel holds the lock and gives it up when its holder ends, however that ends; the
file is there only so long, or until the next one takes it over from a holder that was killed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

POLL_S = 0.2


class LockTimeoutError(Exception):
    """The deadline came before the lock."""


@contextmanager
def held(path: Path, deadline: float, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of that file; `waiting` is called once with the process that has it, in words.

    deadline: on time.monotonic's clock; LockTimeoutError where another process has it by then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    has_waited = False
    while (descriptor := _taken(path)) is None:
        if not has_waited:
            waiting(_holder(path))
            has_waited = True
        if time.monotonic() > deadline:
            raise LockTimeoutError
        time.sleep(POLL_S)
    try:
        with suppress(OSError):  # a full disk has room for the lock, and none for its holder's name
            started = datetime.now(UTC).isoformat(timespec="seconds")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} since {started}\n".encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _taken(path: Path) -> int | None:
    """The open file with its lock; None where another process has that."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its last holder removed it meanwhile


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip() or "another process"
    return "another process"
