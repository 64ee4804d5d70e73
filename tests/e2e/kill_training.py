"""Kills a long run at random moments of training, saving and resuming and starts it again; then its
log and its weights must be, bit for bit, those of a run that nobody stopped.

    python -m tests.e2e.kill_loop --of training --kills 1000      (about a second a kill)

Every start has another placement, in memory and on disk, depth, master, number of streams and
interval of saving, none of which may change a bit. In between the disk is full or read-only, the newest state is torn, and the
clock is set back. What is found wrong ends the loop with an AssertionError.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sweeps import train

STEPS, NUM_BLOCKS = 40, 4
RUN = [
    "system=megatrain",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_attention_heads=2",
    "shape=quick",
    "shape.seq_len=16",
    "recipe.schedule=cosine",
    "recipe.warmup_steps=5",
    "data.max_bytes=65536",
    "logging=none",
    f"train.steps={STEPS}",
    "train.export_dtype=float32",
    "train.evaluate_every=8",
    "train.evaluate_tokens=64",
]
VARIED = {
    "system.depth": (1, 2, 3),
    "system.streams": (1, 2, 3),
    "system.master": ("split", "fp32"),
    "system.gradient_slabs": (0, 2),
    "system.keep_activations": (0, 1, 2),
    "system.device_optimizer": (0, 1, 4),
    "system.disk_blocks": (0, 0, 2, 3),
    "train.save_every": (2, 3, 5),
    "train.room": ("null", 0),
}
"""What a start may change."""
SPAN_S = (0.1, 2.5)
"""A kill comes within these seconds."""
PATIENCE_S = 120.0
TORN = "torn"
"""Mark in a state that was torn; it goes with the state."""
DISK = 64 << 20
FAULTS = {
    "kill": 70,
    "SIGTERM": 8,
    "torn file": 10,
    "full disk": 6,
    "read-only": 3,
    "clock": 3,
}
"""What is done to a start, and how often; but for a read-only disk, it is killed too."""
NEWNS = 0x20000
"""CLONE_NEWNS of unshare(2): mounts that no other process sees."""
KEPT = ("step", "loss", "lr", "tokens", "heldout_loss", "gradient_norm")
"""Fields of the log that no start may change."""


class Disk:
    """A small file system of its own, where that can be had (root, or a machine that lets users
    mount); else a folder, which is never full or read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.real = folder, False
        folder.mkdir()
        with contextlib.suppress(OSError):
            self.real = (
                not ctypes.CDLL(None).unshare(NEWNS)
                and self._mount("--make-rprivate", "/")
                and self._mount("-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder))
            )

    def _mount(self, *arguments: str) -> bool:
        with contextlib.suppress(OSError):
            return not subprocess.run(["mount", *arguments], capture_output=True).returncode
        return False

    def set(self, option: str) -> bool:
        """Mount it again with that option; whether that was possible."""
        return self.real and self._mount("-o", f"remount,{option}", str(self.folder))

    def fill(self, left: int) -> bool:
        """Leave that many bytes free."""
        used = shutil.disk_usage(self.folder).used
        return self.set(f"size={used + left}")


class Loop:
    """One run after the other, each to its end under fire."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.disk, self.random = Disk(folder / "disk"), random.Random(seed)
        self.run, self.drive = self.disk.folder / "run", self.disk.folder / "drive"
        self.drive.mkdir()
        self.said = folder / "said"
        self.done = Counter[str]()
        self.newest = 0
        """Step of the newest whole state when it was last looked at."""
        self.ended = 0
        self.reference = self._undisturbed()

    def _undisturbed(self) -> tuple[bytes, bytes]:
        """Log and weights."""
        code = self._wait(self._start("train.save_every=0"), PATIENCE_S)
        assert code == 0, self.said.read_text()
        found = self._log(), self._weights()
        shutil.rmtree(self.run)
        return found

    def _start(self, *more: str, clock: float | None = None) -> int:
        """The pid of a run in a process of its own."""
        arguments = [*RUN, *more, f"output_dir={self.run}", f"train.export={self.run / 'weights'}"]
        arguments.append(f"machine.nvme_path={self.drive}")
        if pid := os.fork():
            return pid
        with contextlib.suppress(BaseException):
            os.setsid()
            output = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1)):
                os.dup2(descriptor, target)
            os.dup2(output, 2)
            if clock is not None:
                time.time = lambda: clock  # type: ignore[assignment]
            code = train.main(arguments)
            sys.stdout.flush()
            os._exit(code)
        os._exit(70)

    def _varied(self) -> list[str]:
        chosen = {name: self.random.choice(values) for name, values in VARIED.items()}
        if chosen["system.device_optimizer"] == NUM_BLOCKS:  # none is left for the disk
            chosen["system.disk_blocks"] = 0
        return [f"{name}={value}" for name, value in chosen.items()]

    def _wait(self, pid: int, seconds: float) -> int | None:
        """Its exit code; None where it is still there after that time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return None

    def disturb(self) -> None:
        """Start the run and do one thing to it; where it has ended, the next is another one."""
        fault = self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
        if fault == "torn file":
            self._tear()
        if fault == "read-only":
            self._refused()
            return
        began = self.random.uniform(0, 1e9) if fault == "clock" else None
        pid, delay = self._start(*self._varied(), clock=began), self.random.uniform(*SPAN_S)
        code = self._wait(pid, delay / 2)
        full = code is None and fault == "full disk" and self.disk.fill(self.random.randrange(9999))
        code = self._wait(pid, delay / 2) if code is None else code
        if code is None and fault == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
            code = self._wait(pid, PATIENCE_S)
            assert code is not None, "a run did not heed SIGTERM"
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if full:
            self.disk.set(f"size={DISK}")
        self.done[fault] += 1
        allowed = {None, 0} | ({75, -signal.SIGTERM} if fault == "SIGTERM" else set())
        allowed |= {1, 2} if full else set()
        assert code in allowed, f"{fault}: ended with {code}: {self.said.read_text()}"
        self._look()
        if code == 0:
            self._finish()

    def _whole(self) -> list[Path]:
        """The states that count and were not torn, the oldest first."""
        states = sorted(path.parent for path in self.run.glob("states/step-*/state"))
        return [state for state in states if not (state / TORN).exists()]

    def _tear(self) -> None:
        """Cut, change or remove a file of the newest whole state, where there is an older one."""
        if len(states := self._whole()) < 2:
            return
        every = [path for path in states[-1].rglob("*") if path.is_file()]
        path, how = self.random.choice(every), self.random.randrange(3)
        content = bytearray(path.read_bytes())
        if how == 0:
            path.unlink()
        elif how == 1:
            path.write_bytes(content[: self.random.randrange(len(content))])
        else:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)
        (states[-1] / TORN).touch()
        self.newest = _step(states[-2])

    def _refused(self) -> None:
        """On a read-only disk a run is refused in one line, and changes nothing."""
        if not self.run.exists() or not self.disk.set("ro"):
            return
        code = self._wait(self._start(), PATIENCE_S)
        assert code == 2, self.said.read_text()
        assert len(self.said.read_text().splitlines()) == 1, self.said.read_text()
        assert self.disk.set("rw")
        self.done["read-only"] += 1

    def _look(self) -> None:
        """No state is lost, and the log up to the newest is what it is to be."""
        states = self._whole()
        newest = _step(states[-1]) if states else 0
        lost = f"the state of step {self.newest} was lost: {self.said.read_text()}"
        assert newest >= self.newest, lost
        self.newest = newest
        if states:
            position = json.loads((states[-1] / "position.json").read_text())
            log = (self.run / "log.jsonl").read_bytes()[: position["log_bytes"]]
            assert self._compare(log), "the log lacks what came before the state"

    def _log(self) -> bytes:
        return (self.run / "log.jsonl").read_bytes()

    def _weights(self) -> bytes:
        return (self.run / "weights" / "model.safetensors").read_bytes()

    def _compare(self, log: bytes) -> int:
        """AssertionError where the log does not begin as the reference does; its lines."""
        mine, whole = _told(log), _told(self.reference[0])
        assert mine == whole[: len(mine)], (mine[-1], whole[len(mine) - 1])
        return len(mine)

    def _finish(self) -> None:
        """What must hold of a run that has ended, whatever befell it; then it is removed."""
        assert self._compare(self._log()) == len(_told(self.reference[0])), "the log lacks a line"
        assert self._weights() == self.reference[1], "the weights are others"
        left = sorted(path.name for path in (self.run / "states").iterdir())
        assert len(left) <= 2, left
        assert left[-1] == f"step-{STEPS:08}", left
        assert all(name.startswith("step-") for name in left), left
        shutil.rmtree(self.run)
        self.newest, self.ended = 0, self.ended + 1

    def end(self) -> None:
        """The run that is under way, to its end, undisturbed."""
        code = self._wait(self._start(), PATIENCE_S)
        assert code == 0, self.said.read_text()
        self._finish()


def _step(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def _told(log: bytes) -> list[dict[str, Any]]:
    """What the lines of a log say, without what a clock says."""
    lines = [json.loads(line) for line in log.splitlines()]
    return [{key: line[key] for key in KEPT if key in line} for line in lines]


def run_loop(kills: int, seed: int, folder: Path) -> str:
    """The whole loop in an empty folder; what was done, in one line."""
    os.environ[train.STARTED] = "1"
    began, loop = time.monotonic(), Loop(folder, seed)
    while sum(loop.done.values()) < kills:
        loop.disturb()
    loop.end()
    told = ", ".join(f"{count} of {fault}" for fault, count in loop.done.most_common())
    disk = "" if loop.disk.real else "; no disk of its own could be had, so it was never full"
    return (
        f"{sum(loop.done.values())} kills of training ({told}) in {time.monotonic() - began:.0f} "
        f"s: {loop.ended} runs ended, each with the losses and weights of one never stopped{disk}"
    )
