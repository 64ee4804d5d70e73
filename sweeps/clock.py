"""The clock of the bench: monotonic wall seconds between two calls.

Invariant: it never synchronises a device; the caller drains first, so what it reads is finished work.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; tests put a counted one in its place."""

    def __call__(self) -> float:
        """Seconds since some fixed moment."""


class Stopwatch:
    """Seconds between `start` and `stop`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._started: float | None = None

    def start(self) -> None:
        """Begin a window."""
        assert self._started is None, "the window is already running"
        self._started = self._clock()

    def stop(self) -> float:
        """End the window; its seconds."""
        assert self._started is not None, "no window is running"
        elapsed, self._started = self._clock() - self._started, None
        return elapsed
