"""The state of one command: its cells, its clock, what is known of them before they run.

Invariant: every cell is looked at before the first one runs; what the time limit leaves out is
counted, so that the exit code says it; an interrupt says what became of the cell.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sweeps import forecast, tuner
from sweeps.command import Command
from sweeps.config import Cell
from sweeps.outlook import OUTLOOKS_S, Outlook, outlooks, require_memory
from sweeps.result import Row
from sweeps.rows import Rows
from sweeps.study import TimeIsUpError, run_cell, tidy

UNFINISHED = 75
"""Exit code where the time limit left cells out, for a script that gives the command again:
EX_TEMPFAIL of sysexits.h."""


class Session:
    """One command from its first look at its cells to its exit code."""

    def __init__(self, began: float) -> None:
        """began: when the process began, on time.monotonic's clock; a time limit counts from it."""
        self.began, self.rows = began, Rows()
        self.cells: list[Cell] = []
        """The cells of this command, in order; none under other sweepers."""
        self.forecast = forecast.Forecast([], {}, self.rows)
        self._outlooks: dict[str, Outlook] = {}
        """What is known of the cells before they run, by hash; those without room need no
        process."""
        self._late: list[Cell] = []
        """Cells that the time limit left out or stopped."""

    def plan(self, cells: Sequence[Cell]) -> None:
        """Look at the cells, and say how long they will take.

        ValueError, one line, for a cell that its system would refuse, and for a limit of memory
        that this machine has not; what its system refuses, a cell alone says itself.
        """
        require_memory([cell for cell in cells if not self.rows.standing(cell)])
        self.cells = list(cells)
        if len(cells) > 1:
            print(f"{cells[0].experiment}: looking at {len(cells)} cells", flush=True)
            left_s = max(1.0, self._deadline(cells[0]) - time.monotonic())
            if new := [cell for cell in cells if not self.rows.standing(cell)]:
                self._outlooks = outlooks(new, min(left_s, OUTLOOKS_S))
        self.forecast = forecast.announce(cells, self._outlooks, self.rows)

    def run(self, cell: Cell, label: str = "[1]", *, trial: bool = False) -> Row | None:
        """The cell's row; None where the time limit left it out or stopped it.

        label: of a cell that was not planned. trial: of a search, whose cell may end early, and
        whose sampler asks for all of its trials.
        """
        label, limit_s = self._label(cell) or label, cell.time_limit_s
        left_s = self._deadline(cell) - time.monotonic()
        if limit_s and (why := self.forecast.too_long(cell, left_s, limit_s)):
            if not (trial and self._late):
                print(f"{label} {cell.system}: not begun: {why}", flush=True)
            self._late.append(cell)
            return None
        try:
            with self.forecast.watching(cell):
                return self._run(tuner.pruned(cell, self.rows) if trial else cell, label)
        except TimeIsUpError:
            self._stopped(cell)
            return None

    def begin(self) -> bool:
        """Measure the cell that a search starts from; whether there is anything to search."""
        try:
            return self._run(self.cells[0], "default,").status != "unsupported"
        except TimeIsUpError:
            self._stopped(self.cells[0])
            return False

    def _run(self, cell: Cell, label: str) -> Row:
        """The cell's row. An interrupt says whether it is there: W&B may not be fed yet."""
        began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        outlook = self._outlooks.get(cell.hash)
        refused = outlook.outcome if outlook else None
        try:
            return run_cell(cell, label, self.rows, self._deadline(cell), refused)
        except KeyboardInterrupt:
            row = self.rows.latest(cell)
            there = row is not None and (row.started_at >= began or self.rows.standing(cell))
            stopped = "the running cell was stopped and has no row"
            raise KeyboardInterrupt("the cell's row is there" if there else stopped) from None

    def _stopped(self, cell: Cell) -> None:
        self._late.append(cell)
        remedy = "the same command goes on (raise it if this was the first cell)"
        print(f"  stopped, no row: time_limit_s is up; {remedy}", flush=True)

    def finish(self, command: Command) -> int:
        """Report what there is; the exit code."""
        try:
            code = self._tuned(command.system) if command.tune else self._reported()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("every row is there, the report was not finished") from None
        return UNFINISHED if self._late else code

    def _tuned(self, system: str) -> int:
        return tuner.finish(self.cells[0], system, self.rows)

    def _reported(self) -> int:
        """Say what was not measured, print the table and figure, say where everything is.

        The exit code is 0 where a cell has its number, or Hydra alone knows the cells, and every
        report was made.
        """
        measured, failed = 0, False
        for path in dict.fromkeys(cell.rows_path for cell in self.cells):
            mine = [cell for cell in self.cells if cell.rows_path == path]
            rows = [(cell, self.rows.latest(cell)) for cell in mine]
            good = sum(row is not None and row.status == "ok" for _, row in rows)
            measured += good
            sys.stdout.flush()
            failed |= path.exists() and bool(good) and not _reported(path)
            _say_lacking(rows)
            if path.exists():
                print(f"rows: {path}")
            if (path.parent / "wandb").is_dir() and mine[0].logging.wandb != "disabled":
                print(f"W&B: {path.parent / 'wandb'}")
        return 0 if (measured or not self.cells) and not failed else 1

    def close(self) -> None:
        """Remove what was made for nothing."""
        for folder in {cell.output_dir for cell in self.cells}:
            with contextlib.suppress(OSError):  # what it is about has been said
                tidy(folder)

    def _deadline(self, cell: Cell) -> float:
        """When this command's time is up, on time.monotonic's clock."""
        return self.began + (cell.time_limit_s or math.inf)

    def _label(self, cell: Cell) -> str:
        """Which cell of how many; nothing for one that was not planned."""
        hashes = [planned.hash for planned in self.cells]
        if cell.hash not in hashes:
            return ""
        number, name = hashes.index(cell.hash) + 1, self.forecast.names.get(cell.hash)
        return f"[{number}/{len(hashes)}]{f' {name},' if name else ''}"


def _reported(path: Path) -> bool:
    """Whether the report of a file of rows could be made."""
    command = [sys.executable, "-m", "analysis", "report", str(path)]
    # In a session of its own a Ctrl-C reaches this process alone, which stops the report.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)
    if done.returncode:
        remedy = f"make it again with python -m analysis report {path}"
        print(f"report: not made; {remedy}", file=sys.stderr, flush=True)
    return not done.returncode


def _say_lacking(rows: Sequence[tuple[Cell, Row | None]]) -> None:
    """Say which cells have no number, and why."""
    lacking = [(cell.system, row) for cell, row in rows if row is None or row.status != "ok"]
    whys = [(name, f"{row.status}: {row.reason}" if row else "not run") for name, row in lacking]
    for (system, why), count in Counter(whys).items():
        cells = f", {count} cells" if count > 1 else ""
        print(f"not measured: {system}{cells} ({why})", file=sys.stderr, flush=True)
