"""Lanes of work with explicit waits: CUDA streams and a CPU worker, or their recording twin on the CPU.

Invariant: work submitted to one lane runs in order; between lanes nothing is ordered but by a wait on a
ticket. The twin keeps exactly that promise and no more: it can delay and interleave lanes at random, so a
missing wait becomes a wrong number on a machine without a GPU.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from engine.marks import Marks
from engine.recipe import NonFiniteLossError
from engine.timeline import Interval

COMPUTE_LANE, CPU_LANE = "compute", "cpu"


@dataclass(kw_only=True, eq=False)
class Ticket:
    """One submitted piece of work, to wait for."""

    lane: str
    label: str = ""
    event: torch.cuda.Event | None = None
    done: threading.Event | None = None


class Lanes(Protocol):
    """The small interface of streams.py."""

    waited_s: float
    """Seconds that the submitting thread waited for the CPU lane."""

    def submit(
        self, lane: str, work: Callable[[], None], waits: Sequence[Ticket], *, signals: bool = False, label: str = ""
    ) -> Ticket:
        """Run `work` on `lane` after every ticket in `waits`; `signals` says that another lane will wait for it."""

    def drain(self) -> None:
        """Return when all lanes are idle; re-raise the first error of the CPU lane, a NonFiniteLossError once."""

    def start_recording(self) -> None:
        """Keep begin and end of everything submitted from now on; call it when drained."""

    def recorded(self) -> list[Interval]:
        """What ran since `start_recording`, which this ends, in seconds since then; call it when drained."""

    def close(self) -> None:
        """Stop the worker and return when nothing runs any more; idempotent, raises nothing."""


class CudaLanes:
    """Device lanes are CUDA streams, the CPU lane is one worker thread."""

    def __init__(self, device: torch.device, lanes: Sequence[str]) -> None:
        self.device = device
        self.waited_s = 0.0
        self._streams = {lane: self._stream(lane) for lane in lanes if lane != CPU_LANE}
        self._error: BaseException | None = None
        self._marks: Marks | None = None
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], list[Ticket], Ticket] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = threading.Thread(target=self._work, name="cpu-lane", daemon=True)
        self._worker.start()

    def _stream(self, lane: str) -> torch.cuda.Stream:
        """Compute shares the current stream, so that what callers enqueue there is ordered with it."""
        if lane == COMPUTE_LANE:
            return torch.cuda.current_stream(self.device)
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def submit(
        self, lane: str, work: Callable[[], None], waits: Sequence[Ticket], *, signals: bool = False, label: str = ""
    ) -> Ticket:
        """Enqueue; a device lane that waits for the CPU lane makes this thread wait, and counts the seconds."""
        if lane == CPU_LANE:
            ticket = Ticket(lane=lane, label=label, done=threading.Event())
            self._queue.put((work, list(waits), ticket))
            return ticket
        stream = self._streams[lane]
        for wait in waits:
            if wait.done is not None:
                self._wait_host(wait.done)
            else:
                assert wait.event is not None, f"{label} waits for {wait.label}, which signals nobody"
                stream.wait_event(wait.event)
        with torch.cuda.stream(stream), self._marks.on_device(lane, label, stream) if self._marks else nullcontext():
            work()
        event = None
        if signals:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return Ticket(lane=lane, label=label, event=event)

    def _wait_host(self, done: threading.Event) -> None:
        if not done.is_set():
            started = time.perf_counter()
            done.wait()
            self.waited_s += time.perf_counter() - started
        if self._error is not None:
            self.drain()  # which raises it, once nothing of the failed step runs any more

    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        while (item := self._queue.get()) is not None:
            work, waits, ticket = item
            assert ticket.done is not None
            try:
                for wait in waits:
                    if wait.event is not None:
                        wait.event.synchronize()
                if self._error is None:
                    with self._marks.on_host(CPU_LANE, ticket.label) if self._marks else nullcontext():
                        work()
            except BaseException as error:
                self._error = self._error or error
            finally:
                ticket.done.set()

    def start_recording(self) -> None:
        """Mark the origin of both clocks while nothing runs."""
        self._marks = Marks.begin(self.device)

    def recorded(self) -> list[Interval]:
        """Device lanes by the events around each operation, the CPU lane by the host's clock."""
        marks, self._marks = self._marks, None
        assert marks is not None, "start_recording comes first"
        return marks.intervals()

    def drain(self) -> None:
        """Wait for the worker, then for every stream; after a NonFiniteLossError, which it raises, lanes work again."""
        if self._worker is not None:
            last = Ticket(lane=CPU_LANE, done=threading.Event())
            self._queue.put((lambda: None, [], last))
            assert last.done is not None
            last.done.wait()
        for stream in self._streams.values():
            stream.synchronize()
        error = self._error
        if isinstance(error, NonFiniteLossError):  # no update of that step was taken, and none waits in the queue
            self._error = None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the worker thread, then wait for every stream: after an exception copies may still touch the host arena."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None
            for stream in self._streams.values():
                with suppress(RuntimeError):  # a device that failed runs nothing more
                    stream.synchronize()


@dataclass(kw_only=True)
class TwinLanes:
    """The CPU twin: one thread, every submission recorded.

    Without `seed`, work runs as it is submitted. With it, work is held back until `drain` and then runs in a
    random order that respects lane order and waits and nothing else.
    """

    seed: int | None = None
    recording: bool = False
    log: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    """(lane, label, labels waited for) in submission order, kept where `recording`."""
    waited_s: float = 0.0
    _intervals: list[Interval] | None = None
    _pending: dict[str, deque[tuple[Callable[[], None], list[Ticket], Ticket]]] = field(default_factory=dict)

    def submit(
        self, lane: str, work: Callable[[], None], waits: Sequence[Ticket], *, signals: bool = False, label: str = ""
    ) -> Ticket:
        """Run now, or hold back."""
        if self.recording:
            self.log.append((lane, label, tuple(wait.label for wait in waits)))
        ticket = Ticket(lane=lane, label=label, done=threading.Event())
        if self.seed is None:
            self._run(lane, label, work)
            assert ticket.done is not None
            ticket.done.set()
        else:
            self._pending.setdefault(lane, deque()).append((work, list(waits), ticket))
        return ticket

    def drain(self) -> None:
        """Run what is held back, one random runnable lane at a time; after an error the rest is given up."""
        try:
            self._run_held_back()
        except BaseException:
            for _, _, ticket in (item for held in self._pending.values() for item in held):
                assert ticket.done is not None
                ticket.done.set()
            self._pending.clear()
            raise

    def _run_held_back(self) -> None:
        choice = random.Random(self.seed)
        while any(self._pending.values()):
            ready = [lane for lane, held in self._pending.items() if held and all(_is_done(w) for w in held[0][1])]
            assert ready, "deadlock: every lane waits for another"
            lane = choice.choice(ready)
            # Runs of one lane, so that a lane can get far ahead of the others.
            for _ in range(choice.randint(1, 8)):
                if not self._pending[lane] or not all(_is_done(w) for w in self._pending[lane][0][1]):
                    break
                work, _, ticket = self._pending[lane].popleft()
                assert ticket.done is not None
                ticket.done.set()  # there is one thread: nobody sees it before the work is done, even where that raises
                self._run(lane, ticket.label, work)

    def _run(self, lane: str, label: str, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        if self._intervals is not None:
            self._intervals.append(Interval(lane=lane, label=label, start_s=start, end_s=time.perf_counter()))

    def start_recording(self) -> None:
        """Keep intervals from now on: one after another, for the twin has one thread."""
        self._intervals = []

    def recorded(self) -> list[Interval]:
        """What ran, by the host's clock."""
        found, self._intervals = self._intervals, None
        assert found, "start_recording comes first"
        first = found[0].start_s
        return [replace(i, start_s=i.start_s - first, end_s=i.end_s - first) for i in found]

    def close(self) -> None:
        """Forget what is held back."""
        self._pending.clear()


def _is_done(ticket: Ticket) -> bool:
    return ticket.done is not None and ticket.done.is_set()
