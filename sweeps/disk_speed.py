"""How fast drives are read and written by the simplest loop there is, and how near the engine's
`Drives` comes to it.

Invariant: both move the same memory to and from files of the same size on the same drives past the
page cache, in turns, round after round, and a write counts when it is on the drive. The first round
does not count: a file system does more for bytes that were never written. What is written goes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.disk import STRIPE_BYTES, Drives
from engine.kernel import KernelError
from engine.swap import SwapFolder
from sweeps.host_memory import affordable

ROUNDS = 3
IN_FLIGHT = (4, 16)
"""Threads of the loop on each drive; the faster of the two is the ceiling."""
Work = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """What folders reached together in one direction; without numbers where `reason` says why."""

    name: str
    """The folders, and `read` or `write`."""
    loop_gb_per_s: float | None = None
    """Decimal, of the simplest loop."""
    at_a_time: int | None = None
    """Requests that the loop then had in hand on each drive: that of IN_FLIGHT which was faster."""
    drives_gb_per_s: float | None = None
    reason: str | None = None


def measure(folders: Sequence[Path], num_bytes: int, rounds: int = ROUNDS) -> list[DiskSpeed]:
    """Each folder by itself and, of several, all together; twice `num_bytes` of each is needed for
    as long as it takes."""
    num_bytes = affordable(1, num_bytes) // STRIPE_BYTES * STRIPE_BYTES
    sets = [[folder] for folder in folders] + ([list(folders)] if len(folders) > 1 else [])
    return [speed for some in sets for speed in _measure(some, num_bytes, rounds)]


def _measure(folders: Sequence[Path], num_bytes: int, rounds: int) -> list[DiskSpeed]:
    name = " + ".join(map(str, folders))
    try:
        with contextlib.closing(Drives(folders, num_bytes * len(folders))) as drives:
            if drives.caveat is not None:
                return [DiskSpeed(name=name, reason=drives.caveat)]
            with _files(folders, num_bytes) as descriptors:
                found = _in_turns(drives, descriptors, num_bytes, rounds)
    except (OSError, KernelError) as error:
        return [DiskSpeed(name=name, reason=str(error))]
    return [
        DiskSpeed(
            name=f"{name}, {does}",
            loop_gb_per_s=max(loops),
            at_a_time=IN_FLIGHT[loops.index(max(loops))],
            drives_gb_per_s=ours,
        )
        for does, (ours, *loops) in found.items()
    ]


def _in_turns(
    drives: Drives, descriptors: Sequence[int], num_bytes: int, rounds: int
) -> dict[str, list[float]]:
    """`write` and `read` -> GB/s of the drives, then of the loop with each of IN_FLIGHT."""
    memory = mmap.mmap(-1, num_bytes)  # page-aligned
    tensor = torch.frombuffer(memory, dtype=torch.uint8).random_(0, 256)
    offsets = range(0, drives.num_bytes, num_bytes)

    def ours(move: Callable[[int, torch.Tensor], None]) -> None:
        for offset in offsets:
            move(offset, tensor)
        drives.sync()

    loop = partial(_loop, descriptors, memoryview(memory))
    works: dict[str, list[Work]] = {
        "write": [partial(ours, drives.write), *(partial(loop, os.pwritev, n) for n in IN_FLIGHT)],
        "read": [partial(ours, drives.read), *(partial(loop, os.preadv, n) for n in IN_FLIGHT)],
    }
    found = {}
    for does, contestants in works.items():
        seconds = [[_seconds(work) for work in contestants] for _ in range(rounds + 1)][1:]
        medians = map(statistics.median, zip(*seconds, strict=True))
        found[does] = [drives.num_bytes / median / 1e9 for median in medians]
    return found


def _seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _loop(
    descriptors: Sequence[int],
    memory: memoryview,
    move: Callable[[int, list[memoryview], int], int],
    num_threads: int,
) -> None:
    """Each file from its beginning to its end, a stripe at a time, by threads of its own."""

    def work(descriptor: int, offsets: Iterator[int]) -> None:
        for offset in offsets:
            moved = move(descriptor, [memory[offset : offset + STRIPE_BYTES]], offset)
            if moved != STRIPE_BYTES:
                raise OSError(f"{moved} bytes were moved and not {STRIPE_BYTES}")

    with ThreadPoolExecutor(num_threads * len(descriptors)) as pool:
        jobs = []
        for descriptor in descriptors:
            offsets = iter(range(0, len(memory), STRIPE_BYTES))  # which the file's threads share
            jobs += [pool.submit(work, descriptor, offsets) for _ in range(num_threads)]
        for job in jobs:
            job.result()
    for descriptor in descriptors:
        os.fdatasync(descriptor)


@contextlib.contextmanager
def _files(folders: Sequence[Path], num_bytes: int) -> Iterator[list[int]]:
    """A file in each folder, past the page cache; what a kill leaves goes as `Drives`' own does."""
    found = []
    with contextlib.ExitStack() as undo:
        for folder in folders:
            own = SwapFolder.new(folder)
            undo.callback(own.release)
            undo.callback(own.remove)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
            found.append(os.open(own.path / "loop", flags, 0o600))
            undo.callback(os.close, found[-1])
            os.posix_fallocate(found[-1], 0, num_bytes)
        yield found
