"""Host memory bandwidth by the simplest kernels that stream through it, and how anything that
streams is timed.

Invariant: kernels that are compared use the same threads and take turns, round after round, so that
whatever else the machine does meets all alike. What a kernel walks through is far larger than the
caches (0.5 GiB and more by default), and was first touched by torch's threads in parallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from engine.kernel import KernelError, native
from sweeps.memory import host_bytes

NUM_ELEMENTS = 1 << 26
"""Elements of an array: 256 MiB in fp32."""
ROUNDS = 21


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Something that streams through 1-D arrays of one length."""

    name: str
    bytes_per_element: int
    """Read and written, as the source says it; traffic that only the caches add is not counted."""
    run: Callable[[], object]
    updated: Sequence[torch.Tensor]
    """Read and written."""
    passed: Sequence[torch.Tensor]
    """Only read, or only written."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a kernel reached; without numbers where `reason` says why it did not run."""

    name: str
    bytes_per_element: int | None = None
    g_elements_per_s: float | None = None
    gb_per_s: float | None = None
    """Decimal."""
    reason: str | None = None


def affordable(bytes_per_element: int, num_elements: int = NUM_ELEMENTS) -> int:
    """`num_elements`, or as many as half of the free memory holds."""
    free = min(int(psutil.virtual_memory().available), host_bytes())
    return min(num_elements, free // 2 // bytes_per_element)


def streams(num_elements: int, num_threads: int) -> list[Kernel]:
    """The simplest kernels there are, fp32, 12 x `num_elements` bytes held; the fastest is the
    machine's ceiling.

    A store to a line that is in no cache reads the line first (write-allocate), unless the
    library's stores bypass the caches. So `c = a + b` moves 16 bytes an element and is credited
    with 12, and a copy moves 12 and is credited with 8. The kernels in place have to read what they
    write, as AdamW has, and lose nothing. Torch's have one or two arrays in hand at once; the
    native one walks through four as the engine's AdamW does (left out where there is no compiler).
    """
    whole = torch.empty(3 * (num_elements // 4 * 4)).fill_(
        1.0
    )  # in thirds for torch, in quarters for the native one
    a, b, c = whole.chunk(3)
    kernels = [
        Kernel(
            name="a *= s",
            bytes_per_element=8,
            run=lambda: whole.mul_(1.0),
            updated=[whole],
            passed=[],
        ),
        Kernel(
            name="a += s * b",
            bytes_per_element=12,
            run=lambda: a.add_(b, alpha=0.5),
            updated=[a],
            passed=[b],
        ),
        Kernel(
            name="c = b", bytes_per_element=8, run=lambda: c.copy_(b), updated=[], passed=[b, c]
        ),
        Kernel(
            name="c = a + b",
            bytes_per_element=12,
            run=lambda: torch.add(a, b, out=c),
            updated=[],
            passed=[a, b, c],
        ),
    ]
    with contextlib.suppress(KernelError):
        library = native()
        kernels.append(
            Kernel(
                name="a, b, c, d *= s, native",
                bytes_per_element=8,
                run=scale_four(library, whole.chunk(4), 1.0, num_threads=num_threads),
                updated=[whole],
                passed=[],
            )
        )
    return kernels


def scale_four(
    library: ctypes.CDLL, arrays: Sequence[torch.Tensor], factor: float, *, num_threads: int
) -> Callable[[], object]:
    """The native kernel on four fp32 arrays of one length, in place."""
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    numel, scale, threads = (
        ctypes.c_int64(arrays[0].numel()),
        ctypes.c_float(factor),
        ctypes.c_int(num_threads),
    )
    return lambda: library.scale_four(numel, *pointers, scale, threads)


def in_turns(kernels: Sequence[Kernel], rounds: int = ROUNDS) -> list[Speed]:
    """Median speed of each over `rounds`. A turn is two runs, of which the second counts.

    The first wakes the kernel's own threads and outlasts the others', which spin for milliseconds
    before they sleep.
    """
    seconds: list[list[float]] = [[] for _ in kernels]
    for _ in range(rounds):
        for kernel, samples in zip(kernels, seconds, strict=True):
            kernel.run()
            started = time.perf_counter()
            kernel.run()
            samples.append(time.perf_counter() - started)
    return [
        _speed(kernel, statistics.median(samples))
        for kernel, samples in zip(kernels, seconds, strict=True)
    ]


def _speed(kernel: Kernel, seconds: float) -> Speed:
    num_elements = [*kernel.updated, *kernel.passed][0].numel()
    rate = num_elements / seconds / 1e9
    size = kernel.bytes_per_element
    return Speed(
        name=kernel.name, bytes_per_element=size, g_elements_per_s=rate, gb_per_s=rate * size
    )
