"""The engine's compiled code: found in a cache that is this user's alone, or built there.

Invariant: what is loaded was built from its source by this user and is whole. The folder and the
file belong to the user, nobody else may write them, and the file ends with the digest of all that
is before it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
)
NAME = "megatrain-bench"
"""Name of the folder."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class Source:
    """One C++ file of csrc, which is one library."""

    name: str
    """The file's, without its suffix."""
    made: str
    """What is built with it, as a sentence's subject."""
    otherwise: str
    """What to do where there is no compiler, after "install g++, or"."""

    @property
    def path(self) -> Path:
        """The file."""
        return Path(__file__).parent / "csrc" / f"{self.name}.cpp"


ADAMW = Source(
    name="adamw",
    made="AdamW",
    otherwise="set system.torch_adamw=true (the same bits, several times slower)",
)


class KernelError(RuntimeError):
    """There is no kernel and none can be built; the message says why and what to do, in one
    line."""


def cache_directory() -> Path:
    """Where compiled kernels are kept, a folder of this user alone: in $XDG_CACHE_HOME or ~/.cache.

    Where that cannot be had, it is in the temporary directory, and a warning says so. Raises
    ValueError, one line, where that cannot be had either.
    """
    try:
        wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME
    except RuntimeError:  # a user without a home
        wanted = Path(os.devnull) / NAME
    if _is_private(wanted):
        return wanted
    found = Path(tempfile.gettempdir()) / f"{NAME}-{os.geteuid()}"
    if not _is_private(found):
        raise ValueError(
            f"XDG_CACHE_HOME: got {wanted.parent} and then {found.parent}, allowed a folder that "
            f"you can write and where {NAME} is yours alone; name one"
        )
    _tell(wanted, found)
    return found


@cache
def _tell(wanted: Path, found: Path) -> None:
    """Once a process."""
    warnings.warn(
        f"{wanted} is not yours alone to write: kernels are kept in {found}", stacklevel=3
    )


def _is_private(folder: Path) -> bool:
    """Whether this user owns the folder, made here if need be, and no other can write or replace
    it."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        around, link, status = folder.parent.stat(), folder.lstat(), folder.stat()
        if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
            return False  # anybody could put another in its place
        if {link.st_uid, status.st_uid} != {os.geteuid()}:
            return False
        if status.st_mode & OTHERS_WRITE:  # of an older version, under a generous umask
            folder.chmod(0o700)
        return not folder.stat().st_mode & OTHERS_WRITE and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


@cache
def native() -> ctypes.CDLL:
    """AdamW's compiled kernel. Raises KernelError."""
    return built(ADAMW)


def built(source: Source) -> ctypes.CDLL:
    """The library, built once per source, compiler and flags. Raises KernelError."""
    asked = os.environ.get("CXX", "g++")
    compiler = shutil.which(asked)
    if compiler is None:
        raise _error(source, asked, "there is none")
    made_of = source.path.read_bytes() + " ".join((compiler, *FLAGS)).encode()
    key = hashlib.sha256(made_of).hexdigest()[:16]
    library = cache_directory() / f"{source.name}-{key}-{os.uname().machine}.so"
    try:
        if not _is_whole(library):
            _build(source, compiler, library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        why = said[-1].strip()[:200] if said else f"exit {error.returncode}"
        raise _error(source, asked, why) from None
    except OSError as error:
        raise KernelError(
            f"{source.path.name}, compiled, could not be kept or loaded ({error}); set "
            "XDG_CACHE_HOME to a folder of yours on a local disk"
        ) from error


def _error(source: Source, compiler: str, why: str) -> KernelError:
    return KernelError(
        f"CXX: got {compiler or 'nothing'} ({why}), allowed a C++ compiler with OpenMP, which "
        f"{source.made} is built with; install g++, or {source.otherwise}"
    )


def _is_whole(library: Path) -> bool:
    """Whether the file is this user's, written by nobody else, and ends with its digest."""
    try:
        descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        status, content = os.fstat(descriptor), file.read()
    mine = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
    size = hashlib.sha256().digest_size
    return mine and hashlib.sha256(content[:-size]).digest() == content[-size:]


def _build(source: Source, compiler: str, library: Path) -> None:
    """Compile beside where the library is to lie and move it there whole, one process at a time.

    What a killed builder left behind, its compiler's own files among it, is removed first. Raises
    CalledProcessError.
    """
    with _Lock(library.parent / "building"):
        if _is_whole(library):  # by whoever had the lock before
            return
        for left_behind in library.parent.glob("tmp*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            fresh, whole = Path(scratch, "fresh.so"), Path(scratch, "whole.so")
            subprocess.run(
                [compiler, *FLAGS, str(source.path), "-o", str(fresh)],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "TMPDIR": scratch},
            )
            content = fresh.read_bytes()
            with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content + hashlib.sha256(content).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, library)


class _Lock:
    """A file's lock, which ends with its holder's process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
