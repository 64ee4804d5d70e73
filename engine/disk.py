"""A range of bytes on one drive or several, read and written past the page cache: the tier below
host memory.

Invariant: a read gives what was last written there, or raises; after the first error nothing is
read or written again. What a run puts on a drive goes when it is closed; what a killed one left
goes at the next start in the same folder, and nothing else ever does. csrc/disk.cpp moves the
bytes; its calls release the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine.kernel import Source, built
from engine.layout import round_up
from engine.sizes import PAGE
from engine.swap import SwapFolder, left_behind

DISK = Source(name="disk", made="disk I/O", otherwise="leave the optimizer's state in host memory")
STRIPE_BYTES = 4 << 20
"""What one drive has in a row, and the most that a thread moves at a time."""
READ, WRITE, SYNC = range(3)
TRUNCATED, CLOSED = -1, -2
"""Codes of csrc/disk.cpp; all others are an errno's."""
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
GONE = frozenset((errno.ENODEV, errno.ENXIO, errno.EBADF, errno.ENOENT, errno.ESTALE))


class _Failure(ctypes.Structure):
    """Mirrors struct Failure of csrc/disk.cpp."""

    _fields_ = (
        ("code", ctypes.c_int32),
        ("drive", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    )


@dataclass(frozen=True, kw_only=True)
class _File:
    """One drive's part."""

    path: Path
    descriptor: int
    num_bytes: int
    direct: bool
    """Whether it is read and written past the page cache."""


class Drives:
    """Preallocated files, one a folder, over which a range of bytes is striped.

    Several threads may read and write at once, different bytes each; their requests share the
    drives piece by piece, so that none waits for the whole of another. Whatever goes wrong raises
    OSError, one line that names the file and what to do, and so does every later call.

    Attributes `read_bytes`, `written_bytes`, `read_s` and `write_s` count what calls moved and the
    seconds they took, which overlap where threads call at once.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        num_bytes: int,
        *,
        num_threads: int = 16,
        direct: bool = True,
        stripe_bytes: int = STRIPE_BYTES,
    ) -> None:
        """Remove what killed runs left in `folders`, and reserve `num_bytes`, which are zero until
        they are written.

        num_threads: of each drive, the requests that it has in hand. direct: whether the page cache
        is avoided where the file system can. stripe_bytes: a multiple of 4096.

        Raises KernelError where csrc/disk.cpp cannot be built, and OSError, one line, where a
        folder cannot be written or has no room; then nothing is left behind.
        """
        assert folders, "no folder"
        assert min(num_bytes, num_threads, stripe_bytes) > 0
        assert stripe_bytes % PAGE == 0
        self._library = _native()
        self.num_bytes = round_up(num_bytes, PAGE)
        self.read_bytes = self.written_bytes = 0
        self.read_s = self.write_s = 0.0
        self._lock = threading.Lock()
        sizes = _sizes(self.num_bytes, len(folders), stripe_bytes)
        with contextlib.ExitStack() as undo:
            for folder in folders:
                _remove_leftovers(folder)
            _require_room(folders, sizes)
            self._files = [
                _made(folder, size, direct=direct, undo=undo)
                for folder, size in zip(folders, sizes, strict=True)
            ]
            self._pool = self._opened(stripe_bytes, num_threads)
            self._undo = undo.pop_all()

    def _opened(self, stripe_bytes: int, num_threads: int) -> int:
        """The pool of csrc/disk.cpp."""
        files, count = self._files, len(self._files)
        descriptors = (ctypes.c_int32 * count)(*(file.descriptor for file in files))
        sizes = (ctypes.c_int64 * count)(*(file.num_bytes for file in files))
        direct = (ctypes.c_int32 * count)(*(file.direct for file in files))
        pool: int | None = self._library.disk_open(
            count, descriptors, sizes, direct, stripe_bytes, num_threads
        )
        if pool is None:
            raise OSError(
                f"{files[0].path}: {count * num_threads} threads to read and write it cannot be "
                "had; raise the limit of processes (ulimit -u)"
            )
        return pool

    @property
    def direct(self) -> bool:
        """Whether every drive is read and written past the page cache."""
        return all(file.direct for file in self._files)

    @property
    def caveat(self) -> str | None:
        """What it costs where it is not, in one line."""
        return _through_cache([f.path.parent.parent for f in self._files if not f.direct])

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a tensor with the bytes from `offset` on; on OSError what it holds is garbage.

        into: contiguous, of any dtype, on the CPU; its address, its bytes and `offset` are
        multiples of 4096.
        """
        seconds = self._move(READ, offset, into)
        with self._lock:
            self.read_bytes += into.nbytes
            self.read_s += seconds

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Put a tensor's bytes where `read` finds them; conditions as there. `sync` makes them
        last."""
        seconds = self._move(WRITE, offset, source)
        with self._lock:
            self.written_bytes += source.nbytes
            self.write_s += seconds

    def _move(self, kind: int, offset: int, tensor: torch.Tensor) -> float:
        """Seconds it took."""
        address, num_bytes = tensor.data_ptr(), tensor.nbytes
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        assert not any(n % PAGE for n in (address, num_bytes, offset)), "not whole pages"
        assert 0 <= offset <= offset + num_bytes <= self.num_bytes, "beyond the end"
        failure, started = _Failure(), time.perf_counter()
        self._library.disk_move(self._pool, kind, address, offset, num_bytes, failure)
        self._require_none(failure)
        return time.perf_counter() - started

    def sync(self) -> None:
        """Return when all that was written is on the drives."""
        failure = _Failure()
        self._library.disk_sync(self._pool, failure)
        self._require_none(failure)

    def _require_none(self, failure: _Failure) -> None:
        if failure.code:
            error = OSError(_told(self._files[failure.drive], failure))
            error.errno = failure.code if failure.code > 0 else None
            raise error

    def close(self) -> None:
        """Remove the files; idempotent. A call under way on another thread fails, and so does
        every later one."""
        with self._lock:
            self._library.disk_close(self._pool)
            self._undo.close()


@cache
def _native() -> ctypes.CDLL:
    """csrc/disk.cpp. Raises KernelError."""
    library = built(DISK)
    pool, failure = ctypes.c_void_p, ctypes.POINTER(_Failure)
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    int32s, int64s = ctypes.POINTER(int32), ctypes.POINTER(int64)
    library.disk_open.restype = pool
    library.disk_open.argtypes = (int32, int32s, int64s, int32s, int64, int32)
    library.disk_move.argtypes = (pool, int32, ctypes.c_void_p, int64, int64, failure)
    library.disk_sync.argtypes = (pool, failure)
    library.disk_close.argtypes = (pool,)
    library.disk_fault.argtypes = (pool, int32, int64, int64, int64)
    return library


def _sizes(num_bytes: int, count: int, stripe_bytes: int) -> list[int]:
    """Bytes of each file, at least a page, when stripe s is one of file s % count."""
    rows, rest = divmod(num_bytes, count * stripe_bytes)
    last = (min(max(rest - i * stripe_bytes, 0), stripe_bytes) for i in range(count))
    return [max(rows * stripe_bytes + size, PAGE) for size in last]


def _remove_leftovers(folder: Path) -> None:
    with left_behind(folder) as found:
        for own in found:
            _removed(own)


def _require_room(folders: Sequence[Path], sizes: Sequence[int]) -> None:
    """OSError where a disk is too small for all that is to lie on it, before anything does."""
    wanted = Counter[int]()
    for folder, size in zip(folders, sizes, strict=True):
        try:
            disk, free = os.stat(folder).st_dev, shutil.disk_usage(folder).free
        except OSError as error:
            raise _refused(folder, error) from error
        wanted[disk] += size
        if wanted[disk] > free:
            raise _no_room(folder, wanted[disk], free)


def _made(folder: Path, num_bytes: int, *, direct: bool, undo: contextlib.ExitStack) -> _File:
    """A file of that many bytes in a folder of our own in `folder`; `undo` removes it."""
    path = folder
    try:
        own = SwapFolder.new(folder)
        undo.callback(own.release)
        undo.callback(_removed, own)
        path = own.path / "state"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)
        descriptor, is_direct = _open(path, direct)
    except OSError as error:
        if error.errno in FULL:
            raise _no_room(path, num_bytes, shutil.disk_usage(folder).free) from error
        raise _refused(folder, error) from error
    undo.callback(os.close, descriptor)
    return _File(path=path, descriptor=descriptor, num_bytes=num_bytes, direct=is_direct)


def _removed(own: SwapFolder) -> None:
    """What a drive that is gone or read-only keeps, the next start removes."""
    with contextlib.suppress(OSError):
        own.remove()


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache: some file systems refuse to when it is
    opened, and some when it is read."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if direct:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags | os.O_DIRECT)
            try:
                with mmap.mmap(-1, PAGE) as page:
                    os.preadv(descriptor, [page], 0)
                    os.pwritev(descriptor, [page], 0)
                return descriptor, True
            except OSError:
                os.close(descriptor)
    descriptor = os.open(path, flags)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing beyond what is asked for
    return descriptor, False


def caveat_of(folders: Sequence[Path]) -> str | None:
    """What must be said of drives in these folders before they are there, one line: where the page
    cache cannot be avoided. A page is written to find out."""
    return _through_cache([folder for folder in folders if not _is_direct(folder)])


def _is_direct(folder: Path) -> bool:
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(PAGE)
        descriptor, direct = _open(Path(file.name), True)
        os.close(descriptor)
        return direct
    return True  # unknown: what is wrong is said when the state is put there


def _through_cache(folders: Sequence[Path]) -> str | None:
    if not folders:
        return None
    named = ", ".join(map(str, folders))
    return f"{named}: through the page cache, which copies every byte once more"


def _no_room(where: Path, needed: int, free: int) -> OSError:
    return OSError(
        f"{where}: {needed:,} bytes are needed and the disk has {free:,} free; "
        "free some or name another folder"
    )


def _refused(folder: Path, error: OSError) -> OSError:
    return OSError(
        f"{folder}: no file of ours can be made there ({error.strerror}); name a folder on a local "
        "disk that you can write"
    )


def _told(file: _File, failure: _Failure) -> str:
    """The one line."""
    code, does = failure.code, {READ: "reading", WRITE: "writing", SYNC: "syncing"}[failure.kind]
    if code == CLOSED:
        return f"{file.path}: it is closed, and its bytes are gone; resume from a saved state"
    at = "" if failure.kind == SYNC else f" {failure.bytes:,} bytes at {failure.offset:,}"
    if code == TRUNCATED:
        why = f"it has no longer its {file.num_bytes:,} bytes"
        remedy = "keep others off the folder"
    else:
        why, remedy = os.strerror(code), "see the kernel's log for the drive or name another folder"
        if code in FULL:
            remedy = "free some of the disk or name another folder"
        elif code in GONE:
            remedy = "the drive is gone, mount it again or name another folder"
    return f"{file.path}: {does}{at}: {why}; {remedy}, and resume from the last saved state"
