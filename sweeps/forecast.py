"""How long a study will take, what is left of it after each cell, what a time limit has room for.

Invariant: seconds come from the engine's cost model (on a GPU) or from rows in the study's folder,
and where neither knows the word is "unknown"; nothing that is said here reaches a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sweeps.config import Cell
from sweeps.identity import configuration, flat
from sweeps.outlook import Outlook
from sweeps.result import Row
from sweeps.rows import Rows, comparable

HIDDEN = ("experiment", "output_dir", "logging", "time_limit_s")
"""Parts of a config that never tell one cell of a study from another."""


class Forecast:
    """The cells of one command, and what is known of their time."""

    def __init__(self, cells: Sequence[Cell], outlooks: Mapping[str, Outlook], rows: Rows) -> None:
        """outlooks: by the hash of a cell."""
        self.cells, self._outlooks, self._rows = list(cells), outlooks, rows
        self.left = [cell for cell in cells if not rows.standing(cell)]
        words = [one.split() for one in settings(cells)]
        beside = [[word for word in one if not word.startswith("system=")] for one in words]
        self.names = {cell.hash: " ".join(one) for cell, one in zip(cells, beside, strict=True)}
        """By hash, what tells a cell from the others beside its system."""

    def step_s(self, cell: Cell) -> float | None:
        """Seconds a step: as predicted, or by tokens from the likest row of the system and model.

        None where neither is known.
        """
        known = self._outlooks.get(cell.hash)
        if known is not None and known.step_s is not None:
            return known.step_s
        row = _likest(cell, [row for row in self._speeds(cell) if row.system == cell.system])
        if row is None:
            return None
        num_tokens = row.batch_size * row.seq_len
        return statistics.median(row.step_s) * cell.shape.num_tokens / num_tokens

    def extra_s(self, cell: Cell) -> float | None:
        """Seconds beside the steps: importing, making the model, giving memory back.

        They are those of the likest row of the model; None where no row tells.
        """
        row = _likest(cell, [row for row in self._speeds(cell) if row.cell_s is not None])
        if row is None:
            return None
        steps_s = statistics.mean(row.step_s) * len(row.losses)
        return max(0.0, (row.cell_s or 0.0) - steps_s)

    def _speeds(self, cell: Cell) -> list[Row]:
        """The measured rows of the cell's model in its folder that tell of its speed."""
        rows = (row for row in self._rows.of(cell) if row.step_s and comparable(row, cell))
        return [row for row in rows if row.model == cell.model.name]

    def seconds(self, cell: Cell) -> float | None:
        """Seconds that the cell takes; those of its steps alone where no row tells what comes on
        top.

        0 where there is no room for it.
        """
        step_s = self.step_s(cell)
        if step_s is None:
            return None
        return step_s * cell.measure.num_steps + (self.extra_s(cell) or 0.0) if step_s else 0.0

    def remaining(self) -> str:
        """How long the cells that are left will take, in words."""
        known = [seconds for cell in self.left if (seconds := self.seconds(cell)) is not None]
        unknown = len(self.left) - len(known)
        words = [f"about {duration(sum(known))}"] if known else []
        words += [f"{unknown} of unknown length" if known else "unknown"] if unknown else []
        alone = known and all(self.extra_s(cell) is None for cell in self.left)
        return " and ".join(words) + (", steps alone: starting up adds to it" if alone else "")

    def lines(self) -> list[str]:
        """The study in short, and one line a cell."""
        done = len(self.cells) - len(self.left)
        head = f"{self.cells[0].experiment}: {len(self.cells)} cells, {done} already measured"
        names = settings(self.cells)
        width = max(map(len, names))
        lines = [f"{head}; time left: {self.remaining()}" if self.left else head]
        for cell, name in zip(self.cells, names, strict=True):
            expected = self._expected(cell) if cell in self.left else "measured"
            lines.append(f"  {name:<{width}}  {expected}")
        return lines

    def _expected(self, cell: Cell) -> str:
        step_s = self.step_s(cell)
        if not step_s:
            return "unknown" if step_s is None else "does not fit"
        steps = f"{step_s:.3g} s x {cell.measure.num_steps} steps"
        return f"about {duration(self.seconds(cell) or 0)} ({steps})"

    def too_long(self, cell: Cell, left_s: float, limit_s: float) -> str | None:
        """Why a cell is not begun with so many seconds left of the limit, and what to do.

        None where it is begun.
        """
        if self._rows.standing(cell):
            return None
        expected = self.seconds(cell) or 0.0  # nobody knows, or no room: it ends at once
        if expected <= left_s:
            return None
        needed = f", about {duration(expected)} needed" if expected else ""
        remedy = "raise it" if expected > limit_s else "the same command goes on"
        return f"{duration(max(0.0, left_s))} left of time_limit_s = {limit_s:g}{needed}; {remedy}"

    @contextmanager
    def watching(self, cell: Cell) -> Iterator[None]:
        """Around one cell: says what is left."""
        yield
        planned = next((one for one in self.left if one.hash == cell.hash), None)
        if planned is None:
            return
        self.left.remove(planned)
        if self.left:
            print(
                f"{len(self.left)} of {len(self.cells)} cells left; time left: {self.remaining()}",
                flush=True,
            )


def announce(cells: Sequence[Cell], outlooks: Mapping[str, Outlook], rows: Rows) -> Forecast:
    """The forecast of a study, printed where it has more than one cell."""
    if len(cells) < 2:
        return Forecast([], {}, rows)
    forecast = Forecast(cells, outlooks, rows)
    print("\n".join(forecast.lines()), flush=True)
    return forecast


def _likest(cell: Cell, rows: Sequence[Row]) -> Row | None:
    """The row that is most like the cell, the last of equals.

    A repeat of the cell comes first; then system, ranks, preset, compilation and tokens decide.
    """
    measurement = configuration(cell.config)

    def likeness(row: Row) -> list[bool]:
        its, mine = row.config.get("system", {}), cell.config["system"]
        return [
            bool(row.config) and row.measurement == measurement,
            row.system == cell.system,
            row.num_ranks == cell.process.num_ranks,
            row.preset == cell.options.get("preset"),
            bool(its.get("compile")) == bool(mine.get("compile")),
            row.batch_size * row.seq_len == cell.shape.num_tokens,
        ]

    return max(reversed(rows), key=likeness, default=None)


def duration(seconds: float) -> str:
    """45 s, 12 min, 3.4 h."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def settings(cells: Sequence[Cell]) -> list[str]:
    """What tells each cell from the others: the first fields of the config that suffice for it.

    System and preset come before all other fields.
    """
    configs = [dict(_shown(cell)) for cell in cells]
    every = (key for config in configs for key in config)
    chosen: list[str] = []
    for key in dict.fromkeys(("system.name", "system.preset", *every)):
        if _num_distinct(configs, [*chosen, key]) > _num_distinct(configs, chosen):
            chosen.append(key)
    # A preset of None goes without saying where the system's name is said.
    hidden = {"system.preset"} if "system.name" in chosen else set()

    def words(config: Mapping[str, Any]) -> Iterator[str]:
        for key in chosen:
            if not (key in hidden and config.get(key) is None):
                yield f"{key.removesuffix('.name')}={config.get(key)}"

    return [" ".join(words(config)) for config in configs]


def _shown(cell: Cell) -> Iterator[tuple[str, Any]]:
    return (item for item in flat(cell.config) if item[0].split(".")[0] not in HIDDEN)


def _num_distinct(configs: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    """How many of the configs can be told from each other by these keys."""
    return len({repr([config.get(key) for key in keys]) for config in configs})
