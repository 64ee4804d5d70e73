"""A fresh process for every cell, and a verdict whatever becomes of it.

Invariant: whatever a cell does (crash, hang, SIGKILL, no memory, bytes that are no event) reaches
the parent as an `Outcome` alone; once that is there, nothing that the cell started is alive. A
parent that stops, in whatever way, takes both with it (sweeps/keeper.py). This is the one place
with a broad except.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sweeps import keeper
from sweeps.events import MAX_BYTES, event_of
from sweeps.memory import DeviceSampler, Pace, Sampler, pace

Event = Mapping[str, Any]
"""{"event": name, ...}: those of sweeps/events.py from the cell, memory from the parent."""
POLL_S = 0.05


@dataclass(kw_only=True)
class Outcome:
    """What the parent knows of a cell when it has ended."""

    status: str = "error"
    reason: str = ""
    events: list[Event] = field(default_factory=list)
    """Everything the cell said except progress."""
    peak_host_bytes: int | None = None
    peak_host: dict[str, int] = field(default_factory=dict)
    peak_rank_host_bytes: int | None = None
    """Of the largest rank, where there are several."""
    peak_device_nvml_bytes: int | None = None
    pace: Pace = field(default_factory=Pace)
    """How the device ran, from the first timed window to the last."""
    timed_out: bool = False
    """Whether it was killed because its time was up; what it had measured by then counts."""
    cell_s: float | None = None
    """Seconds that its process lived."""
    crowd_device_bytes: int | None = None
    """Device memory that others held, as sweeps.study saw it."""
    resumed: dict[str, float] = field(default_factory=dict)
    """What became of the state that it saved, as sweeps.again saw it."""

    def last(self, name: str) -> Event:
        """The latest event of that name, or an empty one."""
        return next(reversed(self.all(name)), {})

    def all(self, name: str) -> list[Event]:
        """Every event of that name, in order."""
        return [event for event in self.events if event["event"] == name]


def run_isolated(
    module: str,
    config: Mapping[str, Any],
    *,
    log: Path,
    timeout_s: float,
    device: DeviceSampler,
    on_event: Callable[[Event], None],
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    num_ranks: int = 1,
) -> Outcome:
    """Run `python -m module` until it ends or `timeout_s` passed; `config` is JSON on its stdin.

    log: where its output goes. wrapper: a command that execs the rest of its command line (numactl,
    nice). num_ranks: processes that it starts and that are its children, where there are several.
    ValueError when the cell says that its configuration is invalid.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started, outcome = time.monotonic(), Outcome()
    kept = Kept(
        [*wrapper, sys.executable, "-m", module], config, log, {**os.environ, **(env or {})}
    )
    try:
        sampler = Sampler(kept.pid, device, num_ranks=num_ranks)
        outcome.timed_out = _watch(kept, sampler, outcome, on_event, started + timeout_s)
    finally:
        exit_code = kept.end()
    outcome.cell_s = time.monotonic() - started
    outcome.peak_host_bytes, outcome.peak_host = sampler.peak_host_bytes, sampler.peak_host
    outcome.peak_rank_host_bytes = sampler.peak_rank_bytes
    outcome.peak_device_nvml_bytes = sampler.peak_device_bytes
    outcome.pace = pace(*sampler.spells)
    _judge(outcome, exit_code, timeout_s, log)
    return outcome


class Kept:
    """A cell that was started under a keeper: its pid, and the end of the pipe that its events
    leave on."""

    def __init__(
        self, command: Sequence[str], config: Mapping[str, Any], log: Path, env: Mapping[str, str]
    ) -> None:
        self._others = keeper.descendants()
        self._socket, theirs = socket.socketpair()
        self.events, pipe = os.pipe()
        keep = [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), str(pipe)]
        with theirs, os.fdopen(pipe, "wb"), log.open("wb") as output, _stdin(config) as stdin:
            self.keeper = subprocess.Popen(
                [*keep, *command, "--events-fd", str(pipe)],
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), pipe),
                start_new_session=True,
                env=env,
            )
        keeper.adopt_orphans(True)  # those of a keeper that somebody kills
        self._lines = self._socket.makefile("rb")
        self.pid = int(self._lines.readline() or self.keeper.pid)

    def end(self) -> int:
        """End it and all that it started; its exit code, or the negative number of its signal."""
        self._socket.shutdown(socket.SHUT_WR)
        self.keeper.wait()
        keeper.end_descendants(besides=self._others)
        keeper.adopt_orphans(False)
        os.close(self.events)
        with self._socket, self._lines as lines:
            return int(lines.readline() or self.keeper.returncode)


def _stdin(config: Mapping[str, Any]) -> BinaryIO:
    """A file in memory, which holds nobody up: a cell that hangs would not empty a pipe."""
    file = os.fdopen(os.memfd_create("config"), "w+b")
    file.write(json.dumps(config).encode())
    file.seek(0)
    return file


def _watch(
    kept: Kept,
    sampler: Sampler,
    outcome: Outcome,
    on_event: Callable[[Event], None],
    deadline: float,
) -> bool:
    """Pass events on and sample memory until the cell ends, or sends what is none; True when the
    deadline came first."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(kept.events, selectors.EVENT_READ)
        while True:
            if selector.select(POLL_S):
                chunk = os.read(kept.events, 1 << 16)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in (*lines, *([buffer] if len(buffer) > MAX_BYTES else [])):
                    if not _take(line, sampler, outcome, on_event):
                        return False
            elif kept.keeper.poll() is not None:
                break
            # What comes after the measurement is no part of it.
            if not outcome.last("done") and (now := sampler.poll()) is not None:
                on_event({"event": "memory", **now})
            if time.monotonic() > deadline:
                return True
    try:
        kept.keeper.wait(timeout=max(0.1, min(30.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        return not outcome.last("done") and not outcome.last("failed")
    return False


def _take(
    line: bytes, sampler: Sampler, outcome: Outcome, on_event: Callable[[Event], None]
) -> bool:
    """Pass one event on; False for what is none, which is the cell's failure."""
    try:
        event = event_of(line)
    except ValueError as error:
        outcome.events.append({"event": "failed", "status": "error", "reason": str(error)})
        return False
    if event["event"] not in ("step", "phase"):
        outcome.events.append(event)
    if event["event"] == "losses" and event["first_step"] == 0:  # all of training was touched
        sampler.hurry()
    if event["event"] == "phase":  # between windows nothing is timed
        sampler.watch_pace(event["name"] == "windows")
    on_event(event)
    return True


def _judge(outcome: Outcome, exit_code: int, timeout_s: float, log: Path) -> None:
    # Where several ranks fail, the later ones do because of the first.
    failed, invalid = next(iter(outcome.all("failed")), {}), outcome.last("invalid")
    killed = (
        f"{_waited_for(outcome)}killed after process.timeout_s = {timeout_s:g} s; raise it, or see "
        f"{log}"
        if outcome.timed_out
        else ""
    )
    # One that ended without a word comes before what the others said then.
    spoke = {event.get("rank") for event in outcome.all("failed")}
    silent = [event for event in outcome.all("rank_ended") if event["rank"] not in spoke]
    who = f"rank {silent[0]['rank']}" if silent else "the cell"
    exit_code = int(silent[0]["exit_code"]) if silent else exit_code
    measured = any(event["event"] == "losses" and event["seconds"] for event in outcome.events)
    if outcome.last("done") and measured:  # what failed later, a trace, costs no number
        later = failed["reason"] if failed else killed
        outcome.status, outcome.reason = (
            "ok",
            f"after the measurement: {later}" if later else outcome.reason,
        )
    elif invalid:
        raise ValueError(invalid["reason"])
    elif failed and not silent:
        outcome.status, outcome.reason = failed["status"], failed["reason"]
    elif outcome.timed_out:
        outcome.status, outcome.reason = "timeout", killed
    elif exit_code == -signal.SIGKILL:
        outcome.status, outcome.reason = (
            "oom_host",
            f"{who} was killed with SIGKILL: out of host memory, or by hand; run again to retry",
        )
    else:
        how = f"exit {exit_code}" if exit_code >= 0 else f"signal {_signal(-exit_code)}"
        outcome.status, outcome.reason = (
            "error",
            f"{who} ended with {how}: {tail(log)} (all of it in {log})",
        )


def _waited_for(outcome: Outcome) -> str:
    """Which ranks hung, by how many collectives each had begun when time ran out: fewer than those
    that waited for it, or it could not say."""
    said = outcome.all("rank_at")
    begun = {event["rank"]: event["collectives"] for event in said}
    num = said[0]["of"] if said else 0
    late = [rank for rank in range(num) if begun.get(rank, -1) < max(begun.values())]
    names = " and ".join(f"rank {rank}" for rank in late)
    return f"{names} of {num} hung, and the others waited for it; " if late else ""


def _signal(number: int) -> str:
    """A signal's name; those of real time have none."""
    return next((known.name for known in signal.Signals if known == number), str(number))


def tail(log: Path, limit: int = 300) -> str:
    """The last words of a log in one line."""
    lines = log.read_bytes()[-8192:].decode(errors="replace").split("\n") if log.exists() else []
    words = [line.strip() for line in lines if line.strip()]
    return (words[-1] if words else "no output")[:limit]


def verdict(error: BaseException) -> tuple[str, str]:
    """(status, one-line reason) of what a cell raised."""
    import torch

    from baselines.system import Unsupported
    from engine import NonFiniteLossError

    text = " ".join(str(error).split())[:500]
    if isinstance(error, NonFiniteLossError):
        return "nonfinite", text
    if isinstance(error, Unsupported):
        return "unsupported", text
    if isinstance(error, ImportError) or "InvalidCxxCompiler" in f"{type(error).__name__} {text}":
        return "unsupported", f"not installed here, or without this: {type(error).__name__}: {text}"
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "CUDA error: out of memory" in text
    ):
        return "oom_device", text.split(". If reserved")[0]
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return "oom_host", text or "MemoryError"
    return "error", f"{type(error).__name__}: {text}"


def guarded(work: Callable[[], None], emit: Callable[..., None]) -> int:
    """Inside the cell: run `work`, and say what it raised; the exit code."""
    try:
        work()
    except Exception as error:
        report(error, emit)
        return 1
    return 0


def report(error: Exception, emit: Callable[..., None]) -> None:
    """Say what was raised: a verdict, and in the cell's log where."""
    import traceback

    traceback.print_exception(error)
    status, reason = verdict(error)
    emit("failed", status=status, reason=reason)
