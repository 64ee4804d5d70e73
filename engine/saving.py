"""Directories that appear whole or not at all, for all rooms."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write in: it is called `directory` when the block ends well, and is gone when
    it does not.

    ValueError where `directory` exists.
    """
    directory = Path(directory).absolute()
    if directory.exists():
        raise ValueError(
            f"save: {directory} exists, allowed a new directory; choose another name or remove it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    whole = scratch / "whole"  # mkdtemp's own mode is 0700 whatever the umask
    try:
        whole.mkdir()
        yield whole
        os.rename(whole, directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Return when a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
