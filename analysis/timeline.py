"""One step's work on each lane, read from a file that `measure.trace=true` leaves, and the arithmetic on its intervals.

Invariant: nothing is invented. What is busy, idle or hidden follows from the intervals alone, so measured and predicted
steps go through the same lines; a file that does not say what it must is refused in one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import load as rows
from analysis.style import name_of

SUFFIX = ".timeline.json"
COMPUTE = "compute"
LANES: dict[str, str] = {
    COMPUTE: "compute",
    "h2d": "load (H2D)",
    "d2h": "store (D2H)",
    "fetch": "fetch (H2D)",
    "copy": "all copies",
    "cpu": "CPU",
}
"""Lane -> its name, in the order in which lanes are drawn. Others follow under their own names."""

FORWARD, HEAD, BACKWARD, RECOMPUTE, BACKWARD_RECOMPUTING = "forward", "head", "backward", "recompute", "backward_recomputing"
ADAMW, LOAD, STORE, ACTIVATIONS, KEEP, OTHER = "adamw", "load", "store", "activations", "keep", "other"
WORK: dict[str, str] = {
    "compute embed": FORWARD,
    "compute forward": FORWARD,
    "compute forward_kept": FORWARD,
    "compute forward_offloaded": FORWARD,
    "compute tail": HEAD,
    "compute recompute": RECOMPUTE,
    "compute backward": BACKWARD_RECOMPUTING,
    "compute backward_kept": BACKWARD,
    "compute backward_offloaded": BACKWARD,
    "compute embed_backward": BACKWARD,
    "load": LOAD,
    "store": STORE,
    "evict": ACTIVATIONS,
    "fetch": ACTIVATIONS,
    "keep": KEEP,
    "step": ADAMW,
    "step device_step": ADAMW,
}
"""Kind and phase of an operation, as its label begins -> the work it is. The others (clip, check, free, drop, stage) are OTHER."""
COPIES = (LOAD, STORE, ACTIVATIONS)
EXAMPLE = "write one with python -m sweeps.run system=megatrain measure.trace=true"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One operation on its lane; seconds since the step's embedding began."""

    lane: str
    label: str
    """Kind, phase and block, such as `compute backward 7`; block -1 is none."""
    start_s: float
    end_s: float

    @property
    def work(self) -> str:
        """What it is drawn as."""
        return WORK.get(self.label.rpartition(" ")[0], OTHER)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One steady step, measured or predicted."""

    step_s: float
    intervals: tuple[Interval, ...]

    @property
    def lanes(self) -> list[str]:
        """The lanes that do anything, in the order in which they are drawn."""
        found = dict.fromkeys(i.lane for i in self.intervals)
        return [lane for lane in LANES if lane in found] + [lane for lane in found if lane not in LANES]

    def busy_s(self, lane: str) -> float:
        """Seconds that a lane works."""
        return _length(merged(i for i in self.intervals if i.lane == lane))

    def idle_s(self, lane: str) -> float:
        """Seconds that it does not."""
        return max(0.0, self.step_s - self.busy_s(lane))

    def hidden_share(self, lane: str) -> float | None:
        """Share of a lane's work during which the device computes; None for the compute lane and for one without work.

        Copies on the compute lane (one stream) are no computation and hide nothing.
        """
        mine = merged(i for i in self.intervals if i.lane == lane)
        if lane == COMPUTE or not mine:
            return None
        computing = merged(i for i in self.intervals if i.lane == COMPUTE and i.work not in COPIES)
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in mine for b in computing)
        return both / _length(mine)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What one file holds."""

    name: str
    measured: Step
    predicted: Step | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured step seconds, minus one."""
        return None if self.predicted is None else self.predicted.step_s / self.measured.step_s - 1


def load(path: Path, name: str | None = None) -> Timeline:
    """The timeline in a file. ValueError in one line where it is missing, is not JSON or is not a timeline."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {EXAMPLE}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({' '.join(str(error).split())}); {EXAMPLE}") from None
    if not isinstance(content, dict) or "measured" not in content:
        raise ValueError(f"{path}: not a timeline: no field 'measured'; {EXAMPLE}")
    predicted = content.get("predicted")
    return Timeline(
        name=name or name_in(path),
        measured=_step(content["measured"], f"{path}: measured"),
        predicted=None if predicted is None else _step(predicted, f"{path}: predicted"),
    )


def load_all(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Timeline]:
    """The timelines in files, named by `labels` or so that they are told apart: as the rows beside them, or as the files."""
    names = list(labels) or [_label(path) or name_in(path) for path in paths]
    unique = [name if names.count(name) == 1 else _stem(path) for name, path in zip(names, paths, strict=True)]
    return [load(path, name) for path, name in zip(paths, unique, strict=True)]


def profile_of(path: Path) -> Path:
    """Where the profiler's trace of the same cell lies."""
    return path.with_name(f"{_stem(path)}.json")


def cell_of(path: Path) -> str | None:
    """The cell's hash in a file name such as `0123456789ab-megatrain.timeline.json`."""
    cell, dash, _ = path.name.partition("-")
    return cell if dash and len(cell) == 12 and not set(cell) - set("0123456789abcdef") else None


def name_in(path: Path) -> str:
    """What a file calls its timeline: STUDY.LABEL.timeline.json the label, HASH-SYSTEM.timeline.json the system."""
    stem = _stem(path)
    if cell_of(path):
        return name_of(stem.partition("-")[2])
    return stem.removeprefix(f"{study}.") if (study := study_of(path)) else stem


def study_of(path: Path) -> str | None:
    """STUDY of STUDY.LABEL.timeline.json; a label begins with a letter, so the dot of qwen2.5-7b parts nothing."""
    study, _, label = _stem(path).rpartition(".")
    return study if study and label[:1].isalpha() else None


def merged(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Their union: (start, end) in order, apart from each other."""
    pieces: list[tuple[float, float]] = []
    for start, end in sorted((i.start_s, i.end_s) for i in intervals if i.end_s > i.start_s):
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(pieces[-1][1], end))
        else:
            pieces.append((start, end))
    return pieces


def digits(value: float, count: int) -> str:
    """So many significant digits, trailing zeros among them: 0.994, 1.00, 12.0, 123."""
    return f"{value:#.{count}g}".removesuffix(".")


def percent(change: float) -> str:
    """A signed percentage with a true minus."""
    return f"{change:+.1%}".replace("-", "−")


def share(part: float) -> str:
    """A percentage that says 0% and 100% only of nothing and everything."""
    if 0 < part < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= part < 1 - 1e-6 else f"{part:.0%}"


def _length(pieces: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in pieces)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".timeline")


def _label(path: Path) -> str | None:
    """Label and preset of the cell in the study's rows, where there are such rows and they can be read."""
    study, cell = path.parent.parent / "rows.jsonl", cell_of(path)
    if path.parent.name != "traces" or cell is None or not study.is_file():
        return None
    with contextlib.suppress(ValueError):
        for row in rows.latest(rows.load(study)).itertuples():
            if row.cell == cell:
                label, preset = str(row.label), "" if row.preset is pd.NA else str(row.preset)
                return label if preset in label else f"{label} {preset}"
    return None


def _step(plain: Any, where: str) -> Step:
    if not isinstance(plain, dict) or not {"step_s", "intervals"} <= plain.keys():
        raise ValueError(f"{where}: allowed is an object with 'step_s' and 'intervals'; {EXAMPLE}")
    step_s, found = plain["step_s"], plain["intervals"]
    if not _is_number(step_s) or step_s <= 0:
        raise ValueError(f"{where}.step_s: got {reprlib.repr(step_s)}, allowed is a number of seconds above 0; {EXAMPLE}")
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}.intervals: got none, allowed is a list of [lane, label, start_s, end_s]; {EXAMPLE}")
    return Step(
        step_s=float(step_s), intervals=tuple(_interval(row, step_s, f"{where}.intervals[{n}]") for n, row in enumerate(found))
    )


def _interval(row: Any, step_s: float, where: str) -> Interval:
    well_formed = isinstance(row, list) and [isinstance(value, str) for value in row] == [True, True, False, False]
    if not well_formed or not all(map(_is_number, row[2:])) or not 0 <= row[2] <= row[3] <= step_s * (1 + 1e-6):
        raise ValueError(
            f"{where}: got {reprlib.repr(row)}, allowed is [lane, label, start_s, end_s] within the step's {step_s} s; {EXAMPLE}"
        )
    return Interval(lane=row[0], label=row[1], start_s=float(row[2]), end_s=float(row[3]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
