"""What each operation of a repeating sequence must wait for on other lanes, from what it reads and
writes.

Invariant: no wait is missing and none is redundant, in the steady state; a first round may ignore
the waits that reach back, because an order implied within one round never leads through the round
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Access = tuple[str, frozenset[str], frozenset[str]]
"""(lane, resources read, resources written) of one operation."""
Waits = tuple[tuple[int, int], ...]
"""(round offset 0 or -1, index) pairs."""


def derive(operations: Sequence[Access]) -> list[Waits]:
    """The waits of each operation, given in issue order, once the sequence repeats."""
    tracker, size = _Tracker(), len(operations)
    rounds = [[tracker.place(*operation) for operation in operations] for _ in range(3)]
    waits = [tuple((index // size - 2, index % size) for index in found) for found in rounds[2]]
    assert all(offset >= -1 for found in waits for offset, _ in found), (
        "a wait reaches back more than one round"
    )
    return waits


@dataclass
class _Tracker:
    """Finds the waits of each operation: conflicts with earlier ones, less those that are already
    implied.

    An operation must follow the last writer of what it reads, and the last writer and all later
    readers of what it writes. Clocks say which operations of each lane a finished operation
    implies. Trying the latest candidate first leaves no redundant wait, because an operation can
    only imply earlier ones.
    """

    clocks: list[dict[str, int]] = field(default_factory=list)
    last_on: dict[str, int] = field(default_factory=dict)
    writer: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    lanes: list[str] = field(default_factory=list)

    def place(self, lane: str, reads: frozenset[str], writes: frozenset[str]) -> list[int]:
        """Record an operation as issued next; return the absolute indices that it must wait for."""
        index = len(self.clocks)
        candidates = {self.writer[r] for r in reads | writes if r in self.writer}
        candidates.update(reader for r in writes for reader in self.readers.get(r, ()))
        clock = dict(self.clocks[self.last_on[lane]]) if lane in self.last_on else {}
        waits = []
        for candidate in sorted(candidates, reverse=True):
            if clock.get(self.lanes[candidate], -1) < candidate:
                waits.append(candidate)
                for other, seen in self.clocks[candidate].items():
                    clock[other] = max(clock.get(other, -1), seen)
        clock[lane] = index
        self.clocks.append(clock)
        self.lanes.append(lane)
        self.last_on[lane] = index
        for r in writes:
            self.writer[r], self.readers[r] = index, []
        for r in reads - writes:
            self.readers.setdefault(r, []).append(index)
        return waits
