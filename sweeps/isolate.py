"""A fresh process for every cell, and a verdict whatever becomes of it.

Invariant: nothing a cell does (crash, hang, SIGKILL, running out of memory) reaches the parent but as an `Outcome`;
a parent that stops takes its cell with it. The one place with a broad except.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.memory import DeviceSampler, Sampler

Event = Mapping[str, Any]
"""{"event": name, ...}: plan, predicted, phase, step, losses, done, heldout, failed, invalid from the cell; seen from a look at
many (sweeps.check); memory from the parent."""
POLL_S = 0.05


@dataclass(kw_only=True)
class Outcome:
    """What the parent knows of a cell when it has ended."""

    status: str = "error"
    reason: str = ""
    events: list[Event] = field(default_factory=list)
    """Everything the cell said, but progress."""
    peak_host_bytes: int | None = None
    peak_host: dict[str, int] = field(default_factory=dict)
    peak_device_nvml_bytes: int | None = None
    timed_out: bool = False
    """Whether it was killed because its time was up; what it had measured by then counts."""
    cell_s: float | None = None
    """Seconds that its process lived."""
    crowd_device_bytes: int | None = None
    """Device memory that others had, as sweeps.study saw it."""

    def last(self, name: str) -> Event:
        """The latest event of that name, or an empty one."""
        return next((event for event in reversed(self.events) if event["event"] == name), {})


def run_isolated(
    module: str,
    config: Mapping[str, Any],
    *,
    log: Path,
    timeout_s: float,
    device: DeviceSampler,
    on_event: Callable[[Event], None],
    env: Mapping[str, str] | None = None,
    starter: Sequence[str] = (),
) -> Outcome:
    """Run `python -m module` with `config` as JSON on its stdin, its output in `log`, until it ends or `timeout_s` passed.

    starter: a command that execs the rest of its command line (numactl, nice). ValueError when the cell says that its
    configuration is invalid.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    read_end, write_end = os.pipe()
    command = [*starter, sys.executable, "-m", module, "--events-fd", str(write_end)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    os.close(write_end)
    outcome = Outcome()
    sampler = Sampler(child.pid, device)
    try:
        _send(child, config)
        timed_out = _watch(child, read_end, sampler, outcome, on_event, started + timeout_s)
    finally:
        _kill(child)
        os.close(read_end)
    outcome.cell_s = time.monotonic() - started
    outcome.peak_host_bytes, outcome.peak_host = sampler.peak_host_bytes, sampler.peak_host
    outcome.peak_device_nvml_bytes = sampler.peak_device_bytes
    outcome.timed_out = timed_out
    _judge(outcome, child.returncode, timeout_s, log)
    return outcome


def _send(child: subprocess.Popen[bytes], config: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as stdin:  # a child that died at once is judged by its exit
        stdin.write(json.dumps(config).encode())


def _watch(
    child: subprocess.Popen[bytes],
    read_end: int,
    sampler: Sampler,
    outcome: Outcome,
    on_event: Callable[[Event], None],
    deadline: float,
) -> bool:
    """Pass events on and sample memory until the cell ends; True when the deadline came first."""
    selector, buffer = selectors.DefaultSelector(), b""
    selector.register(read_end, selectors.EVENT_READ)
    while True:
        if selector.select(POLL_S):
            chunk = os.read(read_end, 1 << 16)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] not in ("step", "phase"):
                    outcome.events.append(event)
                if event["event"] == "losses" and event["first_step"] == 0:  # every byte of training has been touched
                    sampler.hurry()
                on_event(event)
        elif child.poll() is not None:
            break  # a grandchild may hold the pipe open after the cell is gone
        if not outcome.last("done") and (now := sampler.poll()) is not None:  # what comes after is no part of the measurement
            on_event({"event": "memory", **now})
        if time.monotonic() > deadline:
            return True
    try:
        child.wait(timeout=max(0.1, min(30.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        return not outcome.last("done") and not outcome.last("failed")
    return False


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the cell's whole process group, and reap it."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left behind


def _judge(outcome: Outcome, returncode: int, timeout_s: float, log: Path) -> None:
    invalid = next((event for event in outcome.events if event["event"] == "invalid"), None)
    failed = outcome.last("failed")
    if invalid:
        raise ValueError(invalid["reason"])
    killed = f"killed after measure.timeout_s = {timeout_s:g} s; raise it, or see {log}" if outcome.timed_out else ""
    if outcome.last("done"):  # measured; what failed later, a trace, costs no number
        later = failed["reason"] if failed else killed
        outcome.status, outcome.reason = "ok", f"after the measurement: {later}" if later else outcome.reason
    elif failed:
        outcome.status, outcome.reason = failed["status"], failed["reason"]
    elif outcome.timed_out:
        outcome.status, outcome.reason = "timeout", killed
    elif returncode == -signal.SIGKILL:
        outcome.status, outcome.reason = (
            "oom_host",
            "the cell was killed with SIGKILL: out of host memory, or by hand; run again to retry",
        )
    else:
        how = f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit {returncode}"
        outcome.status, outcome.reason = "error", f"the cell ended with {how}: {tail(log)} (all of it in {log})"


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
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "CUDA error: out of memory" in text):
        return "oom_device", text.split(". If reserved")[0]
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return "oom_host", text or "MemoryError"
    return "error", f"{type(error).__name__}: {text}"


def guarded(work: Callable[[], None], emit: Callable[..., None]) -> int:
    """Inside the cell: run `work`, and say what it raised; the exit code."""
    try:
        work()
    except Exception as error:
        import traceback

        traceback.print_exc()  # into the cell's log
        status, reason = verdict(error)
        emit("failed", status=status, reason=reason)
        return 1
    return 0
