"""What a machine does in a second, given or probed.

Invariant: the probe leaves nothing behind; what it allocated is free again when it returns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import torch

from engine.adamw import AdamW, Pass
from engine.disk import Drives
from engine.master import BlockState
from engine.ranks import Ranks
from engine.recipe import Recipe
from engine.store import Arena, free_pinned_cache

UPDATED = 24 << 26
"""Parameters per kind of update, in whole rounds; half a second in all. The mean of 9 rounds of
1 << 26 varied by 30% from one process to the next on one machine."""
SMALLEST_BLOCK, LARGEST_BLOCK = 1 << 26, 1 << 28
"""Parameters of the block that is updated: as many as a layer of the model has, within these. At
times every update takes milliseconds more than its bytes, and a block of 1 << 26 once read half the
rate of the run's layers, which are four times as large."""
COPY_ROUNDS, COPY_SECONDS = 8, 0.25
"""Rounds of a product or a copy at least, and for how long: the best counts. The best of 8 rounds,
0.06 s, was once 40% too slow: an H100's copies that did 51 to 55 GB/s in the step that followed."""
PROBE_SIZE = 8192
PROBE_BYTES = 1 << 28
MANY_THREADS = 32
"""Where there are no more, AdamW is probed with all; else with half of them too. Beside 64 cores 62
threads were probed to update weights at 9.0 G params/s and 32 at 10.9, at which a run is planned
that is faster than with the first (docs/log.md, 205)."""
DISK_BYTES = 1 << 30
DISK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does in a second."""

    matmul_flops: float
    """Floating-point operations of a large bf16 matrix product on the device."""
    adamw_params: float
    """Parameters that the CPU's AdamW updates, in one pass."""
    weights_params: float
    """Parameters of the first of two passes: master and weight."""
    moments_params: float
    """Parameters of the second: the moments."""
    h2d_bytes: float
    """Bytes from pinned host memory to the device."""
    d2h_bytes: float
    """Bytes from the device to pinned host memory."""
    device_bytes: float
    """Bytes of device memory read and written."""
    peer_bytes: float = 0.0
    """Bytes that each of several devices gets from the others; 0 where one alone was looked at."""
    disk_read_bytes: float = 0.0
    """Bytes read from the drives while as many are written; 0 where none was looked at."""
    disk_write_bytes: float = 0.0
    """Bytes written meanwhile."""
    evict_bytes: float = 0.0
    """Bytes from the device to pinned host memory while the CPU's AdamW runs; 0 where none was
    looked at."""
    adamw_threads: float = 0.0
    """Threads, not a rate: those with which AdamW did this; 0 where nobody said."""


def measure(
    device: torch.device,
    threads: Sequence[int],
    layer_numel: int,
    *,
    pinned: bool = True,
    use_native: bool = True,
) -> Rates:
    """Probe the rates of this machine; two or three seconds, 0.8 GiB of device and 1.1 to 3.8 GiB
    of host memory for that time.

    threads: numbers of them to probe AdamW with; the fastest counts. layer_numel: parameters of a
    layer of the model, as many as AdamW is probed on. pinned: whether the link is probed from
    pinned memory. use_native: as AdamW's.
    """
    try:
        return _probe(device, threads, layer_numel, pinned, use_native)
    finally:
        torch.cuda.empty_cache()
        free_pinned_cache()


def _probe(
    device: torch.device, threads: Sequence[int], layer_numel: int, pinned: bool, use_native: bool
) -> Rates:
    a = torch.randn(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=device)
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=pinned)
    here, there = (torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def whole(work: Callable[[], object]) -> Callable[[], None]:
        def all_of_it() -> None:
            work()
            torch.cuda.synchronize(device)

        return all_of_it

    optimizer = AdamW(Recipe(), num_threads=threads[0], use_native=use_native)
    numel = block_numel(layer_numel)
    updates = _updates(numel, optimizer)
    adamw, first, second = _with_fastest(threads, optimizer, numel, updates)
    store = whole(lambda: host.copy_(here, non_blocking=True))
    return Rates(
        matmul_flops=2 * PROBE_SIZE**3 / _fastest(whole(lambda: torch.matmul(a, a))),
        adamw_params=adamw,
        weights_params=first,
        moments_params=second,
        h2d_bytes=PROBE_BYTES / _fastest(whole(lambda: here.copy_(host, non_blocking=True))),
        d2h_bytes=PROBE_BYTES / _fastest(store),
        evict_bytes=PROBE_BYTES / _beside(updates[1], store),
        device_bytes=2 * PROBE_BYTES / _fastest(whole(lambda: there.copy_(here))),
        adamw_threads=optimizer.num_threads,
    )


def block_numel(layer_numel: int) -> int:
    """Parameters of the block that AdamW is probed on, for a layer of so many."""
    return min(max(SMALLEST_BLOCK, layer_numel), LARGEST_BLOCK)


def _updates(numel: int, optimizer: AdamW) -> list[Callable[[], None]]:
    """A block's update in one pass, its weights' and its moments'; all of the same block."""
    weight, gradient = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(2))
    extra = torch.zeros(numel, dtype=torch.int16)
    state = BlockState(weight=weight, extra=extra, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    update = partial(optimizer.step, state, gradient, step=0, scale=1.0)
    return [partial(update, taken=taken) for taken in (Pass.BOTH, Pass.WEIGHTS, Pass.MOMENTS)]


def _with_fastest(
    threads: Sequence[int], optimizer: AdamW, numel: int, updates: Sequence[Callable[[], None]]
) -> list[float]:
    """The rates of the number of threads whose updates take the shortest time together, which the
    optimizer is left with."""
    found = dict[int, list[float]]()
    for count in threads:
        optimizer.num_threads = count
        found[count] = _params_per_s(numel, updates)
    optimizer.num_threads = min(threads, key=lambda count: sum(1 / rate for rate in found[count]))
    return found[optimizer.num_threads]


def _params_per_s(numel: int, updates: Sequence[Callable[[], None]]) -> list[float]:
    """The rate of each update in the mean, neither at its fastest nor in the median: a run meets
    whatever else the machine does.

    In a thread of its own, as in a run: this one keeps its team too, and where OpenMP has more
    threads than cores, those that wait for the others sleep instead of spinning.
    """
    with ThreadPoolExecutor(1) as lane:
        seconds = lane.submit(_in_turns, updates, UPDATED // numel).result()
    return [numel / statistics.mean(times) for times in seconds]


def disk_rates(folders: Sequence[Path]) -> tuple[float, float]:
    """Bytes a second read from and written to the drives at once, as a step does it; DISK_SECONDS
    and a few, for many drives are faster at first, and twice DISK_BYTES of room for that time."""
    here, there = Arena([DISK_BYTES] * 2, pinned="none").pieces
    drives = Drives(folders, 2 * DISK_BYTES)
    count, read_s, written_s = 0, 0.0, 0.0
    try:
        drives.write(0, here)  # a file system does more for bytes that were never written
        drives.write(DISK_BYTES, there)
        with ThreadPoolExecutor(1) as other:
            while written_s < DISK_SECONDS:
                started = time.perf_counter()
                writing = other.submit(drives.write, DISK_BYTES, there)
                drives.read(0, here)
                read_s += time.perf_counter() - started
                writing.result()
                written_s += time.perf_counter() - started
                count += 1
    finally:
        drives.close()
    return count * DISK_BYTES / read_s, count * DISK_BYTES / written_s


def peer_rate(device: torch.device, ranks: Ranks) -> float:
    """Bytes a second that a rank gets of a block whose parts are on all; where the others are not
    there, what one device gets of the next, or 0 where there is none."""
    if not ranks.joined and torch.cuda.device_count() < 2:
        return 0.0
    here = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    there = here
    if not ranks.joined:
        there = here.to(torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count()))

    def once() -> None:
        ranks.gather(here) if ranks.joined else here.copy_(there)
        torch.cuda.synchronize(device)

    received = PROBE_BYTES * (ranks.count - 1) / ranks.count if ranks.joined else PROBE_BYTES
    return received / _fastest(once)


def _fastest(work: Callable[[], object]) -> float:
    until, seconds = time.perf_counter() + COPY_SECONDS, list[float]()
    while not seconds or time.perf_counter() < until:
        seconds += _in_turns([work], COPY_ROUNDS)[0]
    return min(seconds)


def _beside(other: Callable[[], object], work: Callable[[], object]) -> float:
    """Mean seconds of `work` while a thread does `other` over and over."""
    begun, done, seconds = Event(), Event(), list[float]()

    def over_and_over() -> None:
        try:
            while not done.is_set():
                other()
                begun.set()
        finally:
            begun.set()

    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(over_and_over)
        try:
            begun.wait()
            until = time.perf_counter() + COPY_SECONDS
            while not seconds or time.perf_counter() < until:
                seconds += _in_turns([work], COPY_ROUNDS)[0]
        finally:
            done.set()
        beside.result()
    return statistics.mean(seconds)


def _in_turns(works: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each run of each, one after the other, round after round; a first round does not
    count."""
    times: list[list[float]] = [[] for _ in works]
    for counts in (False, *[True] * rounds):
        for work, samples in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            if counts:
                samples.append(time.perf_counter() - started)
    return times
