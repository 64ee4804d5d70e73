"""Begin and end of operations, taken as they are submitted: events on device lanes, the host's clock on the CPU lane.

Invariant: both clocks share one origin, a moment at which nothing runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.timeline import Interval


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(kw_only=True, eq=False)
class Marks:
    """Marks around operations since it was made."""

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

    @contextlib.contextmanager
    def on_device(self, lane: str, label: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Mark what is enqueued on `stream` inside."""
        start = _event(stream)
        yield
        self._device.append((lane, label, start, _event(stream)))

    @contextlib.contextmanager
    def on_host(self, lane: str, label: str) -> Iterator[None]:
        """Mark what the calling thread does inside."""
        start = time.perf_counter() - self.started_s
        yield
        self._host.append(Interval(lane=lane, label=label, start_s=start, end_s=time.perf_counter() - self.started_s))

    def intervals(self) -> list[Interval]:
        """All of it, in seconds since the origin; the device must be idle."""
        since = self.origin.elapsed_time
        device = [
            Interval(lane=lane, label=label, start_s=since(start) / 1e3, end_s=since(end) / 1e3)
            for lane, label, start, end in self._device
        ]
        return device + self._host
