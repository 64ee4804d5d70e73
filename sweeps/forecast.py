"""How long a study will take: said before its first cell, and what is left of it after each.

Invariant: seconds come from the engine's cost model (on a GPU) or from rows in the study's folder, and where neither knows
the word is "unknown"; nothing that is said here reaches a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sweeps import study
from sweeps.config import Cell
from sweeps.result import flat

HIDDEN = ("experiment", "output_dir", "logging")
"""Parts of a config that tell no cell of a study from another."""


class Forecast:
    """The cells of one command, and what is known of their time."""

    def __init__(self, cells: Sequence[Cell], predicted: Mapping[str, float]) -> None:
        """predicted: cell's hash -> seconds a step; 0 where it will be refused."""
        self.cells, self._predicted = list(cells), dict(predicted)
        self.left = [cell for cell in cells if not _measured(cell)]
        self._extra_s: list[float] = []

    def step_s(self, cell: Cell) -> float | None:
        """Seconds a step: as predicted, or of the row of the same system that is most alike, by tokens; None where unknown."""
        if cell.hash in self._predicted:
            return self._predicted[cell.hash]
        keys = (cell.system, cell.model.name, cell.options.get("preset"))
        rows = [
            row for row in study.rows_of(cell.rows_path) if row.step_s and row.system == cell.system and study.comparable(row, cell)
        ]
        if not rows:
            return None
        alike = max(
            rows, key=lambda row: [mine == its for mine, its in zip(keys, (row.system, row.model, row.preset), strict=True)]
        )
        return statistics.median(alike.step_s) * cell.shape.num_tokens / (alike.batch_size * alike.seq_len)

    def seconds(self, cell: Cell) -> float | None:
        """Of the whole cell; starting up counts as soon as one cell of this command has shown how long it takes."""
        step_s = self.step_s(cell)
        extra = statistics.median(self._extra_s) if self._extra_s else 0.0
        return None if step_s is None else step_s * cell.measure.num_steps + extra

    def remaining(self) -> str:
        """How long the cells that are left will take, in words."""
        known = [seconds for cell in self.left if (seconds := self.seconds(cell)) is not None]
        unknown = len(self.left) - len(known)
        told = [f"about {duration(sum(known))}"] if known else []
        told += [f"{unknown} of unknown length" if known else "unknown"] if unknown else []
        return " and ".join(told) + ("" if self._extra_s or not known else ", steps alone: starting up adds to it")

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

    @contextmanager
    def watching(self, cell: Cell) -> Iterator[None]:
        """Around one cell: learns what starting up takes, and says what is left."""
        started = time.monotonic()
        yield
        planned = next((one for one in self.left if one.hash == cell.hash), None)
        if planned is None:
            return
        self.left.remove(planned)
        row = study.latest(cell)
        if row is not None and row.step_s:
            self._extra_s.append(max(0.0, time.monotonic() - started - statistics.mean(row.step_s) * cell.measure.num_steps))
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
    return [" ".join(f"{key.removesuffix('.name')}={config.get(key)}" for key in chosen) for config in told]


def _values(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    return repr([config.get(key) for key in keys])
