"""Where a cell's progress and its row are shown: the console, and W&B.

Invariant: both only mirror. The row is on disk before them (sweeps/rows.py); what fails here says
so in one line and changes nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from sweeps.config import Cell
from sweeps.groups import Logging
from sweeps.result import Row

MIRROR_S = 120.0
"""Seconds that W&B may take for one row."""


def mirror(row: Row, rows_path: Path, logging: Logging) -> None:
    """Feed the last row of the cell to W&B, in a process of its own.

    W&B's noise, its hangs and its errors stay in that process; one line on stderr says when it
    would not.
    """
    if logging.wandb == "disabled":
        return
    options = [f"mode={logging.wandb}", f"project={logging.project}", f"cell={row.cell}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sweeps.upload", str(rows_path), *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MIRROR_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = type(error).__name__
    else:
        if not done.returncode:
            return
        why = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    print(f"wandb: row {row.cell} not mirrored ({why}); the JSONL has it", file=sys.stderr)


class Progressed:
    """What the console knows of a cell: the last event of each kind, in words."""

    def __init__(self, cell: Cell) -> None:
        self.num_steps, self.measure = cell.measure.num_steps, cell.measure
        self.step, self.phase = 0, "start"
        self.loss = self.tokens_per_s = None
        self.host_bytes = self.device_bytes = None
        self._step_s: float | None = None
        self._first_step_at: float | None = None

    def update(self, event: Mapping[str, Any]) -> None:
        """Take one event in."""
        kind = event["event"]
        if kind == "phase":
            self.phase = event["name"]
        elif kind == "memory":
            self.host_bytes, self.device_bytes = event["host_bytes"], event["device_bytes"]
        elif kind == "step":
            now = time.monotonic()
            self._first_step_at = self._first_step_at or now
            self.step = event["step"] + 1
            if self.step > 1:
                self._step_s = (now - self._first_step_at) / (self.step - 1)
        elif kind == "losses":
            self.loss = event["losses"][-1]
            if event["seconds"]:
                self.tokens_per_s = event["num_tokens"] / event["seconds"]

    def text(self) -> str:
        """step i/n, loss, tokens/s, memory, time left: only what is known."""
        parts = [f"step {self.step}/{self.num_steps}" if self.step else self.phase]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s else []
        parts += [f"host {self.host_bytes / 1e9:.2f} GB"] if self.host_bytes else []
        parts += [f"device {self.device_bytes / 1e9:.2f} GB"] if self.device_bytes else []
        if self._step_s is not None:
            parts.append(f"{self._step_s * (self.num_steps - self.step):.0f} s left")
        return "  ".join(parts)


class Console:
    """A live line on a terminal; on anything else a plain line at each phase and each window."""

    def __init__(self, label: str, cell: Cell) -> None:
        self._label, self._cell = label, cell
        self._terminal = Terminal(highlight=False, soft_wrap=True)
        self._progressed, self._started = Progressed(cell), time.monotonic()
        self._bar: Progress | None = None

    def start(self) -> None:
        """Show which cell."""
        cell, self._started = self._cell, time.monotonic()
        num = cell.process.num_ranks
        where = cell.machine.device + (f", {num} ranks" if num > 1 else "")
        self._terminal.print(
            f"{self._label} {cell.system}: {cell.model.name} {cell.dtype}, {cell.shape.batch_size} "
            "x "
            f"{cell.shape.seq_len} tokens, {cell.measure.num_steps} steps on {where}"
        )
        if self._terminal.is_terminal:
            columns = SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}")
            self._bar = Progress(*columns, console=self._terminal, transient=True)
            self._bar.add_task("start", total=cell.measure.num_steps)
            self._bar.start()

    def event(self, event: Mapping[str, Any]) -> None:
        """Show what changed."""
        now = self._progressed
        now.update(event)
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=now.step, description=now.text())
        elif event["event"] == "losses" or (event["event"] == "phase" and not now.step):
            self._terminal.print(f"  {time.monotonic() - self._started:6.1f} s  {now.text()}")

    def row(self, row: Row) -> None:
        """Show the verdict."""
        self.close()
        took = f"{time.monotonic() - self._started:.0f} s"
        if row.status != "ok":
            self._terminal.print(f"  {row.status}: {row.reason} ({took})", markup=False)
            return
        agrees = {
            True: "agrees with the reference",
            False: "differs from the reference",
            None: "no reference",
        }[row.agrees]
        self._terminal.print(
            f"  ok: {row.tokens_per_s:,.0f} tokens/s, loss {row.losses[0]:.4f} to "
            f"{row.losses[-1]:.4f}, {agrees} ({took})"
        )
        if row.reason:
            self._terminal.print(f"  {row.reason}", markup=False)

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
