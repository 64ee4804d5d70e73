"""How this room writes a file: whole or not at all.

Invariant: a file that is there was written to its end, at whatever moment its writer was killed or the
disk became full; and a killed writer leaves at most one file in a folder, which the next one takes over.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"
"""The file in the same folder that is written first; one writer at a time has it."""


def write(path: Path, data: bytes) -> None:
    """Put `data` there in place of what was; OSError, which names the path, where that cannot be done."""
    target = Path(os.path.realpath(path))
    partial = target.with_name(PARTIAL)
    try:
        descriptor = _locked(partial)
        try:
            os.ftruncate(descriptor, 0)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(descriptor)
            os.replace(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _locked(partial: Path) -> int:
    """That file, open and locked by this process."""
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                return descriptor
        os.close(descriptor)  # the writer before has renamed it
