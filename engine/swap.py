"""Folders of ours on a disk that others share, made by a process that holds their lock while it
lives.

Invariant: a folder goes only if it holds our marker, the marker is this user's, and its lock could
be taken. A lock is the file's own, so it is seen from other containers on the disk too, where the
numbers of processes mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MARKER = "megatrain-bench"
"""File in every folder of ours; whoever made the folder holds its lock to the end of its life."""
PREFIX = "megatrain-disk-"
"""How the names of our folders begin, whichever system's; no other is ever looked into."""


class SwapFolder:
    """A folder of ours whose lock this process holds."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def new(cls, root: Path) -> SwapFolder:
        """A new one in `root`, called after nothing but PREFIX: its marker appears locked.

        OSError where the disk takes no folder or has no locks.
        """
        with contextlib.ExitStack() as unfinished:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            unfinished.callback(shutil.rmtree, path, ignore_errors=True)
            unlocked = path / f".{MARKER}"
            descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            unfinished.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # some disks have no locks
            unlocked.rename(path / MARKER)
            unfinished.pop_all()
        return cls(path, descriptor)

    @classmethod
    def taken(cls, path: Path) -> SwapFolder | None:
        """The folder of a dead process, now held by this one; None for any other."""
        try:
            descriptor = os.open(path / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and status.st_nlink and not path.is_symlink():
                return cls(path, descriptor)
        except OSError:  # its maker lives, or the disk has no locks
            pass
        os.close(descriptor)
        return None

    def num_bytes(self) -> int:
        """What removing it would free."""
        files = (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)
        return sum(file.lstat().st_blocks * 512 for file in files)

    def remove(self) -> None:
        """All of it, the marker last: what a kill leaves of it can be told still."""
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != MARKER:
                entry.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        """Let the lock go."""
        os.close(self._descriptor)


@contextlib.contextmanager
def left_behind(root: Path) -> Iterator[list[SwapFolder]]:
    """The folders in `root` that dead processes left, held while the block lasts."""
    found = [one for path in sorted(root.glob(f"{PREFIX}*")) if (one := SwapFolder.taken(path))]
    try:
        yield found
    finally:
        for folder in found:
            folder.release()


def free_bytes(folders: Sequence[Path]) -> int:
    """The most that there is room for when it is spread evenly over `folders`, of which some may
    lie on one disk; what dead processes left in them counts as free.

    OSError for a folder that is not there. folders: one at least.
    """
    disks = [os.stat(folder).st_dev for folder in folders]
    free = {os.stat(folder).st_dev: shutil.disk_usage(folder).free for folder in folders}
    for folder in {folder.resolve(): folder for folder in folders}.values():
        with left_behind(folder) as found:
            free[os.stat(folder).st_dev] += sum(one.num_bytes() for one in found)
    return len(disks) * min(free[disk] // disks.count(disk) for disk in disks)
