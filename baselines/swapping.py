"""The folder on a local disk that a rival puts optimizer state into.

Invariant: nothing is written or removed before the disk is known to have room; everything lies in
one folder of this process, which goes with it, and of other folders only those of our dead
processes go, whichever system they ran.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from baselines.system import Unsupported
from engine import SwapFolder, left_behind

FULL_BYTES = 64 << 20
"""A disk with less than this free is what stopped a step."""


def root_of(nvme_path: str | None) -> Path:
    """The folder that machine.nvme_path names. Unsupported, in one line, where there is none."""
    root = Path(nvme_path or "").expanduser()
    if nvme_path is None or not root.is_dir():
        got = "nothing" if nvme_path is None else "what is no folder"
        raise Unsupported(
            f"machine.nvme_path: got {got}, allowed a folder on a local disk; make one and "
            "give machine.nvme_path=PATH"
        )
    return root.resolve()


def claimed(root: Path, prefix: str, needed: int) -> SwapFolder:
    """A new folder in `root`, whose name begins with `prefix`, on a disk with `needed` bytes free.

    What dead processes left there counts as free and is removed. Unsupported, in one line, where
    there is no room; then all is as it was.
    """
    with left_behind(root) as folders:
        free = shutil.disk_usage(root).free + sum(folder.num_bytes() for folder in folders)
        if needed > free:
            raise Unsupported(
                f"machine.nvme_path: the disk has {free:,} bytes free and needs {needed:,}; "
                "free some or name another"
            )
        for folder in folders:
            folder.remove()
    return SwapFolder.new(root, prefix)


def full(root: Path) -> OSError | None:
    """What is wrong, in one line, where the disk is full."""
    free = shutil.disk_usage(root).free
    if free >= FULL_BYTES:
        return None
    return OSError(f"machine.nvme_path: the disk is full ({free:,} bytes free); free some")


def given_back(folder: SwapFolder) -> None:
    """Remove the folder and let it go."""
    folder.remove()
    folder.release()
