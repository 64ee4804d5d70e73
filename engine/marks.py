"""Begin and end of operations, taken as they are submitted, for timelines; and how long a stream
waited.

Invariant: device and host share one origin, a moment at which nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from engine.timeline import Interval

MOST_PENDING = 1 << 12
"""Waits whose events are kept before those that are over are added up."""


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Waits:
    """Seconds that a stream had nothing to do but wait for other lanes, by events on both sides of
    each wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def around(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Count what the stream is told to wait for inside."""
        start = self._mark(stream)
        yield
        self._pending.append((start, self._mark(stream)))
        if len(self._pending) >= MOST_PENDING:
            self._settle()

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        if not self._free:
            return _event(stream)
        event = self._free.pop()
        event.record(stream)
        return event

    def _settle(self) -> None:
        """Add up what is over, in the order it was submitted."""
        over = 0
        for start, end in self._pending:
            if not end.query():  # type: ignore[no-untyped-call]
                break
            self._seconds += start.elapsed_time(end) / 1e3
            self._free += [start, end]
            over += 1
        del self._pending[:over]

    @property
    def seconds(self) -> float:
        """Of all waits that are over."""
        self._settle()
        return self._seconds


@dataclass(kw_only=True, eq=False)
class Marks:
    """Begin and end of operations since it was made: events on device lanes, the host's clock on
    the host's."""

    origin: torch.cuda.Event
    started_s: float
    _device: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _host: list[Interval] = field(default_factory=list)

    @classmethod
    def begin(cls, device: torch.device) -> Marks:
        """Set the origin, once the device is idle."""
        torch.cuda.synchronize(device)
        origin = _event(torch.cuda.current_stream(device))
        origin.synchronize()
        return cls(origin=origin, started_s=time.perf_counter())

    @contextmanager
    def on_device(self, lane: str, label: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Mark what is enqueued on `stream` inside."""
        start = _event(stream)
        yield
        self._device.append((lane, label, start, _event(stream)))

    @contextmanager
    def on_host(self, lane: str, label: str) -> Iterator[None]:
        """Mark what the calling thread does inside."""
        start = time.perf_counter() - self.started_s
        yield
        end = time.perf_counter() - self.started_s
        self._host.append(Interval(lane=lane, label=label, start_s=start, end_s=end))

    def intervals(self) -> list[Interval]:
        """All of it, in seconds since the origin; the device must be idle."""

        def since(event: torch.cuda.Event) -> float:
            return float(self.origin.elapsed_time(event)) / 1e3

        device = [
            Interval(lane=lane, label=label, start_s=since(start), end_s=since(end))
            for lane, label, start, end in self._device
        ]
        return device + self._host
