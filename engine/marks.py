"""Begin and end of operations, taken as they are submitted, for timelines.

Invariant: device and host share one origin, a moment at which nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from engine.timeline import Interval


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(kw_only=True, eq=False)
class Marks:
    """Begin and end of operations since it was made: events on device lanes, the host's clock on
    the CPU lane."""

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
