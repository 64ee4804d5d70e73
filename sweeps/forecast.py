"""How long a study will take: said before its first cell, and what is left of it after each; and what a time limit leaves room for.

Invariant: seconds come from the engine's cost model (on a GPU) or from rows in the study's folder, and where neither knows
the word is "unknown"; nothing that is said here reaches a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sweeps import study
from sweeps.config import Cell
from sweeps.identity import configuration, flat
from sweeps.result import Row

HIDDEN = ("experiment", "output_dir", "logging", "time_limit_s")
"""Parts of a config that tell no cell of a study from another."""


class Forecast:
    """The cells of one command, and what is known of their time."""

    def __init__(self, cells: Sequence[Cell], predicted: Mapping[str, float]) -> None:
        """predicted: cell's hash -> seconds a step; 0 where it will be refused."""
        self.cells, self._predicted = list(cells), dict(predicted)
        self.left = [cell for cell in cells if not _measured(cell)]
        told = [[word for word in one.split() if not word.startswith("system=")] for one in settings(cells)]
        self.names = {cell.hash: " ".join(words) for cell, words in zip(cells, told, strict=True)}
        """By hash, what tells a cell from the others beside its system."""

    def step_s(self, cell: Cell) -> float | None:
        """Seconds a step: as predicted, or of the row of the same system and model that is most alike, by tokens; None: unknown."""
        if cell.hash in self._predicted:
            return self._predicted[cell.hash]
        row = _alike(cell, [row for row in _rows(cell) if row.system == cell.system])
        return None if row is None else statistics.median(row.step_s) * cell.shape.num_tokens / (row.batch_size * row.seq_len)

    def extra_s(self, cell: Cell) -> float | None:
        """Seconds beside the steps (importing, making the model, giving memory back), as in the row of the same model that is most
        alike; None where no row tells."""
        row = _alike(cell, [row for row in _rows(cell) if row.cell_s is not None])
        return None if row is None else max(0.0, (row.cell_s or 0.0) - statistics.mean(row.step_s) * len(row.losses))

    def seconds(self, cell: Cell) -> float | None:
        """Of the whole cell, or of its steps alone where no row tells what comes on top; 0 where it will be refused."""
        step_s = self.step_s(cell)
        if step_s is None:
            return None
        return step_s * cell.measure.num_steps + (self.extra_s(cell) or 0.0) if step_s else 0.0

    def remaining(self) -> str:
        """How long the cells that are left will take, in words."""
        known = [seconds for cell in self.left if (seconds := self.seconds(cell)) is not None]
        unknown = len(self.left) - len(known)
        told = [f"about {duration(sum(known))}"] if known else []
        told += [f"{unknown} of unknown length" if known else "unknown"] if unknown else []
        alone = known and all(self.extra_s(cell) is None for cell in self.left)
        return " and ".join(told) + (", steps alone: starting up adds to it" if alone else "")

    def lines(self) -> list[str]:
        """The study in short, and one line a cell."""
        done = len(self.cells) - len(self.left)
        head = f"{self.cells[0].experiment}: {len(self.cells)} cells, {done} already measured"
        names = settings(self.cells)
        width = max(map(len, names))
        lines = [f"{head}; time left: {self.remaining()}" if self.left else head]
        for cell, name in zip(self.cells, names, strict=True):
            step_s = self.step_s(cell)
            known = f"about {duration(self.seconds(cell) or 0)} ({step_s:.3g} s x {cell.measure.num_steps} steps)" if step_s else ""
            expected = "unknown" if step_s is None else known or "does not fit"
            lines.append(f"  {name:<{width}}  {expected if cell in self.left else 'measured'}")
        return lines

    def too_long(self, cell: Cell, left_s: float, limit_s: float) -> str | None:
        """Why a cell is not to be begun with so many seconds left of the limit, and what to do; None where it is."""
        if study.stands(cell):
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
            print(f"{len(self.left)} of {len(self.cells)} cells left; time left: {self.remaining()}", flush=True)


def announce(cells: Sequence[Cell], predicted: Mapping[str, float]) -> Forecast:
    """The forecast of a study, printed where it has more than one cell; predicted: cell's hash -> seconds a step."""
    if len(cells) < 2:
        return Forecast([], {})
    forecast = Forecast(cells, predicted)
    print("\n".join(forecast.lines()), flush=True)
    return forecast


def _measured(cell: Cell) -> bool:
    return study.stands(cell)


def _rows(cell: Cell) -> list[Row]:
    """The measured rows of the same model in the cell's folder, whose speed says something of its own."""
    rows = study.rows_of(cell.rows_path)
    return [row for row in rows if row.step_s and row.model == cell.model.name and study.comparable(row, cell)]


def _alike(cell: Cell, rows: Sequence[Row]) -> Row | None:
    """The row that is most like the cell: a repeat of it, or by system, preset, compilation and tokens; the last of equals."""

    measurement = configuration(cell.config)

    def likeness(row: Row) -> list[bool]:
        its, mine = row.config.get("system", {}), cell.config["system"]
        return [
            bool(row.config) and row.measurement == measurement,
            row.system == cell.system,
            row.preset == cell.options.get("preset"),
            bool(its.get("compile")) == bool(mine.get("compile")),
            row.batch_size * row.seq_len == cell.shape.num_tokens,
        ]

    return max(reversed(rows), key=likeness, default=None)


def duration(seconds: float) -> str:
    """45 s, 12 min, 3.4 h."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def settings(cells: Sequence[Cell]) -> list[str]:
    """What tells each cell from the others: the first fields of the config, system and preset before all, that suffice."""
    told = [{key: value for key, value in flat(cell.config) if key.split(".")[0] not in HIDDEN} for cell in cells]
    keys = dict.fromkeys(("system.name", "system.preset", *(key for config in told for key in config)))
    chosen: list[str] = []
    for key in keys:
        if len({_values(config, [*chosen, key]) for config in told}) > len({_values(config, chosen) for config in told}):
            chosen.append(key)
    hidden = {"system.preset"} if "system.name" in chosen else set()  # where None: the system's name alone says so

    def shown(config: Mapping[str, Any]) -> list[str]:
        return [key for key in chosen if not (key in hidden and config.get(key) is None)]

    return [" ".join(f"{key.removesuffix('.name')}={config.get(key)}" for key in shown(config)) for config in told]


def _values(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    return repr([config.get(key) for key in keys])
