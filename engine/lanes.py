"""Lanes of work with explicit waits: CUDA streams and a CPU worker, or their serial stand-in.

Invariant: work submitted to one lane runs in order; between lanes nothing is ordered but by a wait
on a ticket. Recorded intervals of device and host share one origin, a moment at which nothing runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from engine.cores import keep_to
from engine.marks import Marks, Waits
from engine.recipe import NonFiniteLossError
from engine.step import COMPUTE, CPU, HOST_LANES, Op
from engine.timeline import Interval

Task = Callable[[], None]


@dataclass(kw_only=True, eq=False)
class Ticket:
    """One submitted piece of work, to wait for."""

    label: str
    event: torch.cuda.Event | None = None
    """Recorded behind it on a device lane, where another lane will wait."""
    done: threading.Event | None = None
    """Set behind it on a host lane."""


class CopyStream:
    """A stream for copies that belong to no step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enqueue(self, task: Task) -> torch.cuda.Event:
        """Run `task` here, behind nothing but earlier ones; the event is recorded behind it."""
        with torch.cuda.stream(self._stream):
            task()
        event: torch.cuda.Event = self._stream.record_event()
        return event


def hold_until(event: torch.cuda.Event) -> None:
    """What this thread's stream does next waits for the event."""
    torch.cuda.current_stream().wait_event(event)


Item = tuple[Task, list[Ticket], Ticket]


class CudaLanes:
    """Device lanes are CUDA streams, host lanes a worker thread each."""

    def __init__(
        self, device: torch.device, lanes: Sequence[str], cores: Sequence[int] = ()
    ) -> None:
        """cores: those that workers and the optimizer's threads are kept to; () is all."""
        self.device, self._cores = device, cores
        self.waited_s = 0.0
        self.idle = Waits()
        """Of the compute lane."""
        self._streams = {lane: self._stream(lane) for lane in lanes if lane not in HOST_LANES}
        self._error: BaseException | None = None
        self._marks: Marks | None = None
        hosts = [lane for lane in lanes if lane in HOST_LANES]
        self._queues: dict[str, queue.SimpleQueue[Item | None]] = {
            lane: queue.SimpleQueue() for lane in hosts
        }
        self._workers = [
            threading.Thread(target=self._work, args=(lane,), name=f"{lane}-lane", daemon=True)
            for lane in hosts
        ]
        for worker in self._workers:
            worker.start()

    def _stream(self, lane: str) -> torch.cuda.Stream:
        """Compute shares the current stream, so that what callers enqueue there is ordered with
        it."""
        if lane == COMPUTE:
            return torch.cuda.current_stream(self.device)
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def submit(self, op: Op, task: Task, waits: Sequence[Ticket]) -> Ticket:
        """Run `task` on the operation's lane after every ticket in `waits`. A device lane that
        waits for a host lane makes this thread wait, and counts the seconds."""
        if op.lane in self._queues:
            ticket = Ticket(label=op.label, done=threading.Event())
            self._queues[op.lane].put((task, list(waits), ticket))
            return ticket
        stream = self._streams[op.lane]
        counted = op.lane == COMPUTE and waits
        with self.idle.around(stream) if counted else nullcontext():
            for wait in waits:
                if wait.done is not None:
                    self._wait_host(wait.done)
                else:
                    assert wait.event is not None, f"{op.label} waits for {wait.label}, silent"
                    stream.wait_event(wait.event)
        mark = self._marks.on_device(op.lane, op.label, stream) if self._marks else nullcontext()
        with torch.cuda.stream(stream), mark:
            task()
        event = None
        if op.signals:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return Ticket(label=op.label, event=event)

    def _wait_host(self, done: threading.Event) -> None:
        if not done.is_set():
            started = time.perf_counter()
            done.wait()
            self.waited_s += time.perf_counter() - started
        if self._error is not None:
            self.drain()  # which raises it, once nothing of the failed step runs any more

    def _work(self, lane: str) -> None:
        torch.cuda.set_device(self.device)
        keep_to(self._cores)
        while (item := self._queues[lane].get()) is not None:
            task, waits, ticket = item
            assert ticket.done is not None
            try:
                for wait in waits:
                    if wait.event is not None:
                        wait.event.synchronize()
                    elif wait.done is not None:
                        wait.done.wait()
                if self._runs(lane):
                    with self._marks.on_host(lane, ticket.label) if self._marks else nullcontext():
                        task()
            except BaseException as error:
                if self._error is None or isinstance(self._error, NonFiniteLossError):
                    self._error = error
            finally:
                ticket.done.set()

    def _runs(self, lane: str) -> bool:
        """Whether work is still done there. A step that is not finite gives its updates up, but
        drives get what the step before left to write, and what was read unchanged."""
        if self._error is None:
            return True
        return lane != CPU and isinstance(self._error, NonFiniteLossError)

    def start_recording(self) -> None:
        """Mark the origin of both clocks while nothing runs."""
        self._marks = Marks.begin(self.device)

    def stop_recording(self) -> None:
        """Mark nothing any more, and forget what was marked."""
        self._marks = None

    def recorded(self) -> list[Interval]:
        """Device lanes by the events around each operation, host lanes by the host's clock."""
        marks, self._marks = self._marks, None
        assert marks is not None, "start_recording comes first"
        return marks.intervals()

    def drain(self) -> None:
        """Wait for the workers, then for every stream; after a NonFiniteLossError, which it raises,
        lanes work again."""
        if self._workers:
            lasts = [Ticket(label="drain", done=threading.Event()) for _ in self._queues]
            for waiting, last in zip(self._queues.values(), lasts, strict=True):
                waiting.put((lambda: None, [], last))
            for last in lasts:
                assert last.done is not None
                last.done.wait()
        for stream in self._streams.values():
            stream.synchronize()
        error = self._error
        if isinstance(error, NonFiniteLossError):
            self._error = None  # no update of that step was taken, and nothing waits in a queue
        if error is not None:
            raise error

    def close(self) -> None:
        """End the workers, then wait for every stream: after an exception copies may still touch
        the host arena."""
        if self._workers:
            for waiting in self._queues.values():
                waiting.put(None)
            for worker in self._workers:
                worker.join()
            self._workers = []
            for stream in self._streams.values():
                with suppress(RuntimeError):  # a device that failed runs nothing more
                    stream.synchronize()


class SerialLanes:
    """The stand-in on the CPU: one thread, which runs work as it is submitted."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._intervals: list[Interval] | None = None

    def submit(self, op: Op, task: Task, waits: Sequence[Ticket]) -> Ticket:
        """Run now: whatever there is to wait for has been done."""
        self.run(op, task)
        return Ticket(label=op.label)

    def run(self, op: Op, task: Task) -> None:
        """Do it, and keep when."""
        start = time.perf_counter()
        task()
        if self._intervals is not None:
            end = time.perf_counter()
            interval = Interval(lane=op.lane, label=op.label, start_s=start, end_s=end)
            self._intervals.append(interval)

    def drain(self) -> None:
        """Nothing is ever pending."""

    def start_recording(self) -> None:
        """Keep intervals from now on."""
        self._intervals = []

    def stop_recording(self) -> None:
        """Keep no intervals any more, and forget those that were kept."""
        self._intervals = None

    def recorded(self) -> list[Interval]:
        """What ran, by the host's clock, one after another."""
        found, self._intervals = self._intervals, None
        assert found, "start_recording comes first"
        first = found[0].start_s
        return [replace(i, start_s=i.start_s - first, end_s=i.end_s - first) for i in found]

    def close(self) -> None:
        """Nothing to stop."""


Lanes = CudaLanes | SerialLanes
