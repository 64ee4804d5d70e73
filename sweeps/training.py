"""One long run: steps, evaluations, saved states, a log of one line a step.

Invariant: whenever it is stopped, by a signal or without one, the same command goes on from the
last state that was saved, and what comes then (losses, parameters, the log) is bit for bit what
would have come. Nothing is read from the device before it is there, so that watching costs nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines.system import TrainingSystem, Unsupported
from engine import NonFiniteLossError, Recipe
from sweeps.config import DTYPES, Cell
from sweeps.data import Stream
from sweeps.generations import Generations, Position, one_line
from sweeps.groups import Word
from sweeps.heldout import batches_of

Count = int | None
Share = float | None
AHEAD = 2
"""Steps that may be under way whose losses have not been read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """How long a run is, and what is done beside its steps (conf/train.yaml)."""

    steps: Count = None
    epochs: Share = None
    save_every: int = 500
    keep: int = 2
    room: Count = None
    evaluate_every: int = 0
    evaluate_tokens: int = 65536
    export: Word = None
    export_dtype: Word = None

    def __post_init__(self) -> None:
        least = {"steps": 1, "save_every": 0, "keep": 1, "room": 0, "evaluate_every": 0}
        for name, lowest in (least | {"evaluate_tokens": 1}).items():
            value = getattr(self, name)
            if value is None and name in ("steps", "room"):
                continue
            if type(value) is not int or value < lowest:
                raise ValueError(
                    f"train.{name}: got {value!r}, allowed an integer >= {lowest}; correct it"
                )
        number = isinstance(self.epochs, (int, float)) and not isinstance(self.epochs, bool)
        if self.epochs is not None and not (number and 0 < self.epochs < math.inf):
            raise ValueError(f"train.epochs: got {self.epochs!r}, allowed a number > 0; correct it")
        if (self.steps is None) == (self.epochs is None):
            got = "neither steps nor epochs" if self.steps is None else "steps and epochs"
            raise ValueError(f"train.steps: got {got}, allowed one of the two; give train.steps=N")
        if self.export is not None and not (isinstance(self.export, str) and self.export.strip()):
            raise ValueError(
                f"train.export: got {self.export!r}, allowed the path of a new folder; give one"
            )
        if self.export_dtype not in (None, *DTYPES):
            raise ValueError(
                f"train.export_dtype: got {self.export_dtype!r}, allowed {', '.join(DTYPES)}, or "
                "null; choose one of these"
            )

    def num_steps(self, stream: Stream[Any]) -> int:
        """Optimizer steps of the whole run; the last epoch's last step may reach into the next."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * len(stream.epoch(0)) / stream.shape.batch_size))


class Log:
    """One JSON line an event, appended; what lies beyond a saved state is cut off when a run goes
    on from it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(num_bytes, path.stat().st_size))

    def write(self, **fields: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()

    def settled(self) -> int:
        """Bytes so far, which are on the disk."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


class Readings:
    """Losses and gradient norms on their way to the host, behind the steps that made them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._coming: deque[tuple[int, int, torch.Tensor, Any]] = deque()

    def add(self, step: int, num_tokens: int, loss: torch.Tensor, norm: Any) -> None:
        """Enqueue the copies of a step's loss and norm (a 0-dim tensor, or None)."""
        unknown = torch.full_like(loss, math.nan)
        norm = unknown if norm is None else torch.as_tensor(norm, dtype=loss.dtype)
        both = torch.stack((loss.detach(), norm.to(loss.device, non_blocking=True)))
        copied = None
        if self._cuda:
            both = torch.empty(2, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._coming.append((step, num_tokens, both, copied))

    def ready(self, *, ahead: int) -> Iterator[tuple[int, int, float, float]]:
        """(step, label tokens, loss, norm or NaN) of those that are there, in order; waits while
        more than `ahead` are not."""
        while self._coming:
            step, num_tokens, both, copied = self._coming[0]
            if copied is not None and len(self._coming) <= ahead and not copied.query():
                return
            if copied is not None:
                copied.synchronize()
            self._coming.popleft()
            loss, norm = both.tolist()
            yield step, num_tokens, loss, norm


class Training:
    """A run of one system that is set up, from where it is to its last step or to `stop`."""

    def __init__(
        self,
        system: TrainingSystem,
        cell: Cell,
        train: Train,
        stream: Stream[Any],
        states: Generations,
        *,
        room: int,
        shown: Callable[[str], None],
        deadline: float = math.inf,
    ) -> None:
        """room: bytes of host memory for copies of states. shown: takes what is to be said of the
        last step. deadline: on time.monotonic's clock, when all must be saved."""
        self.system, self.cell, self.train, self.stream = system, cell, train, stream
        self.recipe: Recipe = cell.recipe
        self.num_steps, self.states, self.room = train.num_steps(stream), states, room
        self.stop, self._shown = "", shown
        """Why the run is to end after the step that it is in; "" to go on."""
        self.unsaved = ""
        """Why the last state could not be saved; "" where it was."""
        self.at, self._readings = Position(data=stream.state()), Readings(cell.spec().device)
        self._heldout = batches_of(stream, train.evaluate_tokens) if train.evaluate_every else []
        self._rate: deque[tuple[float, int]] = deque(maxlen=20)
        self._saves, self._deadline, self._save_s = train.save_every, deadline, 0.0
        self._save_began: float | None = None
        self.log = self._begun(cell.output_dir / "log.jsonl")

    def _begun(self, log: Path) -> Log:
        """Go on from the newest saved state, if there is one; the log as it was then."""
        started = time.perf_counter()
        if (position := self.states.resume(self.system)) is not None:
            self.at = position
            self.stream.seek(position.data)
            seconds = time.perf_counter() - started
            self._say(f"going on after step {position.step:,} (state read in {seconds:.1f} s)")
        return Log(log, self.at.log_bytes)

    def run(self) -> bool:
        """Train to the end; False where `stop` came first. What was done is saved in both cases,
        unless `unsaved` says why not."""
        if self.at.step == 0:
            self._evaluate()
        while self.at.step < self.num_steps and not self.stop and self._in_time():
            self._step()
            due = self._saves and self.at.step % self._saves == 0
            if self._evaluates():
                self._evaluate()
            if due and self.at.step < self.num_steps and not self.stop:
                self._save()
            self._settle()
        if self.at.step:
            self._save()
            self._settle(wait=True)
        return self.at.step >= self.num_steps

    def _evaluates(self) -> bool:
        every = self.train.evaluate_every
        return bool(self._heldout) and (self.at.step % every == 0 or self.at.step == self.num_steps)

    def _in_time(self) -> bool:
        """Whether a state could still be written after another step, and the one that is being
        written before it; else that is why it stops."""
        if time.monotonic() + self._save_s * (1 + self.states.writing) > self._deadline:
            self.stop = "time_limit_s is up"
            return False
        return True

    def _step(self) -> None:
        started = time.perf_counter()
        batch = next(self.stream)
        loss = self.system.train_step(batch)
        norm = getattr(self.system, "gradient_norm", None)
        self._readings.add(self.at.step, batch.num_tokens, loss, norm)
        self._read(ahead=AHEAD, started=started)
        seconds = self.at.seconds + time.perf_counter() - started
        self.at = dataclasses.replace(
            self.at, step=self.at.step + 1, data=self.stream.state(), seconds=seconds
        )

    def _drain(self) -> None:
        """Wait for the steps that are under way, which is time of training."""
        started = time.perf_counter()
        self.system.drain()
        self._read(ahead=0, started=started)
        seconds = self.at.seconds + time.perf_counter() - started
        self.at = dataclasses.replace(self.at, seconds=seconds)

    def _read(self, *, ahead: int, started: float) -> None:
        """Log the steps whose losses are there. started: when the training did that is not yet in
        `at.seconds`."""
        for step, num_tokens, loss, norm in self._readings.ready(ahead=ahead):
            if not math.isfinite(loss):
                raise NonFiniteLossError(
                    f"step {step}: the loss is {loss}; lower recipe.lr or look at the data"
                )
            tokens = self.at.tokens + num_tokens
            self.at = dataclasses.replace(self.at, tokens=tokens)
            line = {"step": step + 1, "loss": loss, "lr": self.recipe.lr_at(step)}
            line |= {} if math.isnan(norm) else {"gradient_norm": norm}
            seconds = self.at.seconds + time.perf_counter() - started
            self.log.write(**line, tokens=tokens, seconds=round(seconds, 3))
            self._show(step + 1, loss, num_tokens)

    def _show(self, step: int, loss: float, num_tokens: int) -> None:
        self._rate.append((time.perf_counter(), num_tokens))
        text = f"step {step:,}/{self.num_steps:,}  loss {loss:.4f}"
        if len(self._rate) > 1:
            seconds = self._rate[-1][0] - self._rate[0][0]
            tokens = sum(count for _, count in list(self._rate)[1:])
            left = (self.num_steps - step) * seconds / (len(self._rate) - 1)
            text += f"  {tokens / seconds:,.0f} tokens/s  {duration(left)} left"
        self._shown(text)

    def _evaluate(self) -> None:
        """Loss on held-out text, which is no time of training."""
        if not self._heldout:
            return
        self._drain()
        started = time.perf_counter()
        sizes = [batch.num_tokens for batch in self._heldout]
        losses = [float(self.system.evaluate(batch)) for batch in self._heldout]
        loss = sum(map(operator.mul, losses, sizes)) / sum(sizes)
        took = time.perf_counter() - started
        place = {"step": self.at.step, "tokens": self.at.tokens}
        spent = {"seconds": round(self.at.seconds, 3), "evaluation_s": round(took, 3)}
        self.log.write(**place, heldout_loss=loss, **spent)
        self._say(f"step {self.at.step:,}: held-out loss {loss:.4f} ({took:.1f} s)")
        self._rate.clear()

    def _save(self) -> None:
        """Save the state of now. Where that fails training goes on, and the next one is tried."""
        self._drain()
        self._settle(wait=True)
        self._save_began = time.perf_counter()
        try:
            self.at = dataclasses.replace(self.at, log_bytes=self.log.settled())
            self.states.begin(self.system, self.at, room=self.room)
            self.unsaved = ""
        except Unsupported as error:
            self._saves, self.unsaved = 0, one_line(error)
            self._warn(f"{self.unsaved}; this run cannot be gone on with")
        except OSError as error:
            self._not_saved(error)
        self._time_save()
        self._rate.clear()

    def _settle(self, *, wait: bool = False) -> None:
        try:
            self.states.settle(self.system, wait=wait)
        except OSError as error:
            self._not_saved(error)
        self._time_save()

    def _time_save(self) -> None:
        """Note how long a state took until it was on the disk, once it is."""
        if self._save_began is not None and not self.states.writing:
            self._save_s = max(self._save_s, time.perf_counter() - self._save_began)
            self._save_began = None

    def _not_saved(self, error: OSError) -> None:
        self.unsaved = one_line(error)
        self._warn(f"step {self.at.step:,}: not saved: {self.unsaved}")

    def close(self) -> None:
        """Close the log; idempotent."""
        self.log.close()

    def _say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def _warn(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """In the two largest units: 3 d 4 h, 12 min 5 s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((i for i, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
