"""THE loop: the only code that decides which seconds count, the same for every system.

Invariant: warm-up, drain; then each window is start, K steps, drain, stop. Inside a window nothing
is read back, so nothing but the system itself can synchronise; batches are made before the clock
starts. Text that is not trained on is evaluated before the first step and between windows, on
nobody's clock. Ranks begin a window together, and its seconds are the slowest's.
"""

from __future__ import annotations

import json
import math
import operator
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from baselines import distributed
from baselines.system import TrainingSystem, Unsupported
from engine import Batch, NonFiniteLossError
from sweeps.groups import Measure

Emit = Callable[..., None]
"""emit(event, **fields): progress to whoever watches; must return at once."""


def measure(
    system: TrainingSystem,
    batches: Iterator[Batch],
    spec: Measure,
    emit: Emit,
    clock: Callable[[], float] = time.perf_counter,
    heldout: Sequence[Batch] = (),
    saves: Saves | None = None,
) -> dict[str, float]:
    """Train `spec.num_steps` steps of a system that is set up, and time the windows among them;
    what the system counted until the last ended.

    What it saw leaves as `losses` events, one for the warm-up and one a window: first_step; losses,
    mean per label token, nats; gradient_norms, [] where the system does not tell; seconds, None for
    the warm-up; num_tokens, those with a label; counters, what the system counted meanwhile; of a
    window also `steady_s`, seconds from where the device was through with its first step to where
    it was with its last, and `steady_tokens`, those with a label between: what is carried in is as
    much as what is carried out, so no drain is in it. None and 0 in a window of one step. A
    first window slower than `spec.stop_below` is the last. heldout: what is evaluated before the
    first step and after every window, as `Curve` says. saves: what saves a state beside each.

    Raises NonFiniteLossError, after the step's window was reported, when a loss is NaN or infinite.
    """
    curve = Curve(system, heldout, emit)
    curve.look()
    emit("phase", name="warm-up")
    warmup = [next(batches) for _ in range(spec.warmup_steps)]
    pending, _ = _enqueue(system, warmup, 0, emit, clock)
    system.drain()
    counted = dict(system.counters())
    _read(pending, 0, emit, seconds=None, num_tokens=0, counters=counted)
    curve.trained(warmup, 0.0)
    for window in range(spec.windows):
        emit("phase", name="windows")
        first_step = spec.warmup_steps + window * spec.steps_per_window
        steps = [next(batches) for _ in range(spec.steps_per_window)]
        pending, seen = _window(system, steps, first_step, emit, clock, saves)
        if saves:
            emit("phase", name="saving")  # the window's clock and power end here
            saves.finish()
        before, counted = counted, dict(system.counters())
        counters = {name: value - before.get(name, 0.0) for name, value in counted.items()}
        _read(pending, first_step, emit, **seen, counters=counters)
        too_slow = window == 0 and seen["num_tokens"] < spec.stop_below * seen["seconds"]
        if saves:
            saves.end(last=too_slow or window + 1 == spec.windows)
        curve.trained(steps, seen["seconds"])
        curve.look()
        if too_slow:
            break
    return counted


def _window(
    system: TrainingSystem,
    steps: Sequence[Batch],
    first: int,
    emit: Emit,
    clock: Callable[[], float],
    saves: Saves | None,
) -> tuple[list[Pending], dict[str, Any]]:
    """One window under the clock: what its steps left behind, and what was seen of it."""
    distributed.slowest(0.0)  # all are here
    started = clock()
    if saves:
        saves.begin()
    pending, ends = _enqueue(system, steps, first, emit, clock)
    system.drain()
    return pending, {
        "seconds": distributed.slowest(clock() - started),
        "num_tokens": sum(batch.num_tokens for batch in steps),
        "steady_s": distributed.slowest(_between(ends[0], ends[-1])) if ends[1:] else None,
        "steady_tokens": sum(batch.num_tokens for batch in steps[1:]),
    }


class Saves:
    """A state that is saved beside each window and removed after it; the last stays, for another
    process to resume."""

    def __init__(self, system: Any, folder: Path, *, room: int) -> None:
        """room: bytes of host memory for copies of what is saved."""
        self._system, self._folder, self._room = system, folder, room
        remove_state(folder)  # one of a cell that was killed

    def reserve(self) -> None:
        """Once the system is set up: take the memory of copies, where it makes any."""
        if hasattr(self._system, "reserve"):
            self._system.reserve(room=self._room)

    def begin(self) -> None:
        """Save; a system that cannot do so beside training has done it when this returns."""
        if hasattr(self._system, "save_beside"):
            self._system.save_beside(self._folder, room=self._room)
        else:
            self._system.save(self._folder)

    def finish(self) -> None:
        """Wait for what is still being written, which is no part of the window."""
        if hasattr(self._system, "saved"):
            self._system.saved()

    def end(self, *, last: bool) -> None:
        """After a window: remove it, but the last."""
        if not last:
            remove_state(self._folder)


def remove_state(folder: Path) -> None:
    """A saved state, and what was written of one by a process that was killed."""
    for path in (folder, *folder.parent.glob(f".{folder.name}-*")):
        shutil.rmtree(path, ignore_errors=True)


class Curve:
    """The loss on held-out batches as training goes on, an `evaluated` event a look: step, tokens
    (those with a label that were trained on so far), seconds (of the timed windows so far), loss.

    A system that cannot says so once, in a `not_evaluated` event.
    """

    def __init__(self, system: TrainingSystem, batches: Sequence[Batch], emit: Emit) -> None:
        self._system, self._batches, self._emit = system, list(batches), emit
        self._step, self._tokens, self._seconds = 0, 0, 0.0

    def trained(self, steps: Sequence[Batch], seconds: float) -> None:
        """Count what was trained since the last look."""
        self._step += len(steps)
        self._tokens += sum(batch.num_tokens for batch in steps)
        self._seconds += seconds

    def look(self) -> None:
        """Evaluate; nothing where there is no batch."""
        if not self._batches:
            return
        self._emit("phase", name="evaluation")
        try:
            losses = [float(self._evaluate(batch)) for batch in self._batches]
        except Unsupported as error:
            self._batches = []
            self._emit("not_evaluated", reason=f"no held-out curve: {error}")
            return
        self._system.drain()
        sizes = [batch.num_tokens for batch in self._batches]
        loss = sum(map(operator.mul, losses, sizes)) / sum(sizes)
        seen = {"step": self._step, "tokens": self._tokens, "seconds": self._seconds}
        self._emit("evaluated", **seen, loss=loss)

    def _evaluate(self, batch: Batch) -> torch.Tensor:
        evaluate: Any = getattr(self._system, "evaluate", None)
        if evaluate is None:
            raise Unsupported("the system evaluates no batch without training on it")
        loss: torch.Tensor = evaluate(batch)
        return loss


Pending = tuple[torch.Tensor, torch.Tensor | None]
"""A step's loss and gradient norm, where they were left; no norm where the system does not tell."""
End = Any
"""Where a step ended: an event behind it on its device's current stream, which nobody waits for, or
the clock's seconds."""


def _enqueue(
    system: TrainingSystem,
    steps: Sequence[Batch],
    first: int,
    emit: Emit,
    clock: Callable[[], float],
) -> tuple[list[Pending], list[End]]:
    """One train_step a batch, and where each ended; losses and gradient norms stay where they are.
    The progress event is one short write to a pipe."""
    pending, ends = [], []
    for number, batch in enumerate(steps, first):
        loss = system.train_step(batch)
        ends.append(_end(loss.device, clock))
        pending.append((loss, getattr(system, "gradient_norm", None)))
        emit("step", step=number)
    return pending, ends


def _end(device: torch.device, clock: Callable[[], float]) -> End:
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _between(first: End, last: End) -> float:
    """Seconds; the device must have reached both."""
    timed = isinstance(first, torch.cuda.Event)
    return float(first.elapsed_time(last) / 1e3 if timed else last - first)


def _read(
    pending: Sequence[Pending],
    first: int,
    emit: Emit,
    **seen: Any,
) -> None:
    losses = [float(loss) for loss, _ in pending]
    norms = [float(norm) for _, norm in pending if norm is not None]
    if losses:
        known = norms if len(norms) == len(losses) else []
        emit("losses", first_step=first, losses=losses, gradient_norms=known, **seen)
    for number, loss in enumerate(losses, first):
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"step {number}: the loss is {loss}; lower recipe.lr or look at the data"
            )


def trace(system: TrainingSystem, batches: Iterator[Batch], num_steps: int, path: Path) -> None:
    """Chrome trace of `num_steps` further steps, never timed: profiling slows what it looks at."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    )
    steps = [next(batches) for _ in range(num_steps)]
    profiler: Any = profile(activities=activities)
    with profiler:
        for batch in steps:
            system.train_step(batch)
        system.drain()
    if distributed.rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))


def record(system: Any, batches: Iterator[Batch], num_steps: int, path: Path) -> None:
    """One steady step's work on each lane, recorded and, on a GPU, predicted: JSON for
    `analysis.figures.step`.

    system: one with `record` and `predict`, the engine. Intervals are [lane, label, start in
    seconds, end in seconds].
    """
    found = {"measured": system.record([next(batches) for _ in range(max(3, num_steps))])}
    if distributed.rank():
        return
    if system.device.type == "cuda":
        found["predicted"] = system.predict()
    plain = {
        kind: {
            "step_s": timeline.step_s,
            "intervals": [[i.lane, i.label, i.start_s, i.end_s] for i in timeline.intervals],
        }
        for kind, timeline in found.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(plain) + "\n")
    partial.replace(path)
