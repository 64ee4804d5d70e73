"""The adversary of the engine's lanes: work is held back and interleaved at random, freed slots
hold NaN.

Invariant: it keeps exactly what the lanes promise and no more (order within a lane, and waits), so
that a missing wait becomes a wrong number on a machine without a GPU.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import MegaTrain, NonFiniteLossError
from engine.lanes import SerialLanes, Task, Ticket
from engine.step import COMPUTE, CPU, Op


class TwinLanes(SerialLanes):
    """One thread. Without `seed`, work runs as it is submitted. With it, work is held back until
    `drain` and then runs in a random order that respects lane order and waits and nothing else."""

    def __init__(self, *, seed: int | None = None, recording: bool = False) -> None:
        super().__init__()
        self.seed, self.recording = seed, recording
        self.log: list[tuple[str, str, tuple[str, ...]]] = []
        """(lane, label, labels waited for) in submission order, kept where `recording`."""
        self._pending: dict[str, deque[tuple[Op, Task, list[Ticket], Ticket]]] = {}

    def submit(self, op: Op, task: Task, waits: Sequence[Ticket]) -> Ticket:
        """Run now, or hold back."""
        if self.recording:
            self.log.append((op.lane, op.label, tuple(wait.label for wait in waits)))
        done = threading.Event()
        ticket = Ticket(label=op.label, done=done)
        if self.seed is None:
            self.run(op, task)
            done.set()
        else:
            self._pending.setdefault(op.lane, deque()).append((op, task, list(waits), ticket))
        return ticket

    def drain(self) -> None:
        """Run what is held back, one random runnable lane at a time; after an error the rest is
        given up, but after a step that is not finite the CPU's part of it alone, in its turn."""
        try:
            self._run_held_back()
        except NonFiniteLossError:
            given_up = ((op, _nothing, *rest) for op, _, *rest in self._pending.get(CPU, ()))
            self._pending[CPU] = deque(given_up)
            self._run_held_back()
            raise
        except BaseException:
            for *_, ticket in (item for held in self._pending.values() for item in held):
                _finish(ticket)
            self._pending.clear()
            raise

    def _run_held_back(self) -> None:
        choice = random.Random(self.seed)
        while any(self._pending.values()):
            ready = [lane for lane in self._pending if self._can_run(lane)]
            assert ready, "deadlock: every lane waits for another"
            lane = choice.choice(ready)
            # Runs of one lane, so that a lane can get far ahead of the others.
            for _ in range(choice.randint(1, 8)):
                if not self._can_run(lane):
                    break
                op, task, _, ticket = self._pending[lane].popleft()
                _finish(
                    ticket
                )  # one thread: nobody sees it before the work is done, even where that raises
                self.run(op, task)

    def _can_run(self, lane: str) -> bool:
        held = self._pending[lane]
        return bool(held) and all(
            wait.done is not None and wait.done.is_set() for wait in held[0][2]
        )

    def close(self) -> None:
        """Forget what is held back."""
        self._pending.clear()


def _nothing() -> None:
    """In place of work that is given up."""


def _finish(ticket: Ticket) -> None:
    assert ticket.done is not None
    ticket.done.set()


def poisoned(engine: MegaTrain) -> MegaTrain:
    """The engine, set up, with every slot full of NaN from the end of the computation that used
    it."""
    executor = engine.executor
    for kind, handler in executor.handlers.items():
        executor.handlers[kind] = _poisoning(engine, handler)
    return engine


def _poisoning(engine: MegaTrain, handler: Callable[[Op, Any], None]) -> Callable[[Op, Any], None]:
    def then_poison(op: Op, s: Any) -> None:
        handler(op, s)
        if op.lane == COMPUTE and op.slot >= 0 and op.kind.value.startswith("compute "):
            engine.executor.memory.slots[op.slot].fill_(torch.nan)

    return then_poison
