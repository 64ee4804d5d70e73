"""Intervals of work on lanes over one steady step: simulated from a schedule and its costs, or
recorded on the machine.

Invariant: a predicted and a measured timeline are the same thing, so that one picture and one
arithmetic serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.step import COMPUTE, Kind, Op

ROUNDS, DISK_ROUNDS = 4, 16
"""Steps to simulate; from the third on a step repeats the one before. With state on disk it takes
longer until the drives lag behind as far as they may."""
FIRST = f"{Kind.EMBED.value} "
"""Label with which a step begins."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One operation on its lane; seconds."""

    lane: str
    label: str
    """Kind, fate and block of the operation."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step: from the start of its embedding to the start of the next one's, whatever step the
    work belongs to."""

    step_s: float
    intervals: tuple[Interval, ...]

    def busy_s(self, lane: str) -> float:
        """Seconds that a lane works in this step."""
        return _length(_merged(i for i in self.intervals if i.lane == lane))

    def hidden_share(self, lane: str) -> float | None:
        """Share of a lane's work that runs while the compute lane works; None where it does
        nothing."""
        mine, computing = (
            _merged(i for i in self.intervals if i.lane == name) for name in (lane, COMPUTE)
        )
        if not mine:
            return None
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in mine for b in computing)
        return both / _length(mine)


def simulate(ops: Sequence[Op], seconds: Callable[[Op], float]) -> Timeline:
    """The steady step of a schedule whose operations take `seconds`: each starts when its lane and
    its waits are done."""
    on_disk = any(op.kind is Kind.READ_STATE for op in ops)
    return last_step(_run(ops, seconds, DISK_ROUNDS if on_disk else ROUNDS))


def window_s(ops: Sequence[Op], seconds: Callable[[Op], float], num_steps: int) -> float:
    """Seconds of so many steps from one drain to the next: the first waits for no update, the last
    one's are waited for."""
    return max(interval.end_s for interval in _run(ops, seconds, num_steps))


def _run(ops: Sequence[Op], seconds: Callable[[Op], float], num_steps: int) -> list[Interval]:
    durations, free = [seconds(op) for op in ops], dict.fromkeys((op.lane for op in ops), 0.0)
    found: list[Interval] = []
    before: list[float] = []
    for _ in range(num_steps):
        ends: list[float] = []
        for op, duration in zip(ops, durations, strict=True):
            awaited = [
                (ends if offset == 0 else before)[index]
                for offset, index in op.waits
                if offset == 0 or before
            ]
            start = max([free[op.lane], *awaited])
            free[op.lane] = start + duration
            ends.append(start + duration)
            found.append(
                Interval(lane=op.lane, label=op.label, start_s=start, end_s=start + duration)
            )
        before = ends
    return found


def last_step(intervals: Sequence[Interval]) -> Timeline:
    """The last whole step among the intervals of several. Raises ValueError where fewer than two
    begin."""
    starts = sorted(i.start_s for i in intervals if i.label.startswith(FIRST))
    if len(starts) < 2:
        raise ValueError(
            f"timeline: got {len(starts)} steps, allowed at least 2; record more steps"
        )
    start, end = starts[-2:]
    inside = (
        replace(i, start_s=max(i.start_s, start) - start, end_s=min(i.end_s, end) - start)
        for i in intervals
        if i.end_s > start and i.start_s < end and i.end_s > i.start_s
    )
    return Timeline(
        step_s=end - start, intervals=tuple(sorted(inside, key=lambda i: (i.lane, i.start_s)))
    )


def _merged(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted((i.start_s, i.end_s) for i in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(pieces: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in pieces)
