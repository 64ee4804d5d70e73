"""Directories that appear whole or not at all, and are known to be so later, for all rooms."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
"""File of a sealed directory: the bytes and the SHA-256 of every other one."""


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


def seal(directory: Path) -> None:
    """Write the manifest of all files below `directory`, and return when they are on the disk."""
    everything = sorted(directory.rglob("*"))
    files = [path for path in everything if path.is_file()]
    found = {str(p.relative_to(directory)): [p.stat().st_size, digest(p)] for p in files}
    (directory / MANIFEST).write_text(json.dumps(found, indent=1))
    for path in (*everything, directory / MANIFEST, directory):
        sync(path)


def require_sealed(directory: Path) -> None:
    """ValueError, one line, that names the first file that is not as it was when it was sealed."""
    try:
        known = json.loads((directory / MANIFEST).read_text())
        wrong = next((name for name in known if not _is_as(directory / name, *known[name])), None)
    except (OSError, ValueError, TypeError, AttributeError):
        wrong = MANIFEST
    if wrong is not None:
        raise ValueError(
            f"resume: {directory / wrong} is not the file that was saved; copy the state whole or "
            "take another"
        )


def _is_as(path: Path, num_bytes: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes and digest(path) == sha256
