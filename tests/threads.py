"""Ranks that are threads of one process: what they ask of each other goes through its memory.

Invariant: all meet at every call, twice: when each has shown its own and when each has read the
others'. One that raises lets the others go on to fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from engine import Ranks

T = TypeVar("T")
PATIENCE_S = 60.0


class ThreadRank(Ranks):
    """One of `count`, which share `barrier` and `shown`."""

    def __init__(
        self, index: int, count: int, barrier: threading.Barrier, shown: list[Any]
    ) -> None:
        super().__init__(index=index, count=count)
        self._barrier, self._shown = barrier, shown
        self.calls: list[tuple[str, int]] = []
        """(what was asked, of how many elements), in order."""

    def _meet(self, call: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """Copies of what every rank shows."""
        self.calls.append((call, mine.numel()))
        self._shown[self.index] = (call, mine)
        self._barrier.wait(PATIENCE_S)
        assert {what for what, _ in self._shown} == {call}, self._shown
        found = [tensor.clone() for _, tensor in self._shown]
        self._barrier.wait(PATIENCE_S)
        return found

    @property
    def joined(self) -> bool:
        return True

    def gather(self, flat: torch.Tensor) -> None:
        flat.copy_(torch.cat(self._meet("gather", flat[self.part(flat.numel())])))

    def exchange(self, flat: torch.Tensor, received: torch.Tensor) -> None:
        mine = self.part(flat.numel())
        received.copy_(torch.cat([theirs[mine] for theirs in self._meet("exchange", flat)]))

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet("stacked", values))


def on_ranks(count: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What `work` returns on each of them; what the first to fail raises."""
    barrier, shown = threading.Barrier(count), [None] * count

    def one(index: int) -> T:
        try:
            return work(ThreadRank(index, count, barrier, shown))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(one, index) for index in range(count)]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=_is_another_s):
        raise error
    return [future.result() for future in futures]


def _is_another_s(error: BaseException) -> bool:
    return isinstance(error, threading.BrokenBarrierError)
