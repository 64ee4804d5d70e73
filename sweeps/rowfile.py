"""A file of rows as it is read: lines of JSON, and every value of a row of its kind.

Invariant: who has a row of here need not ask again what is in it; what is no row is a ValueError of
one line, with the file and the line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from sweeps.result import HISTORY, SCHEMA_VERSION, STATUSES, Row

ENDING = 4096
"""Bytes by which a file of rows that grew is known again."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """What was read of a file of rows: where the file grows, the new lines alone are parsed."""

    stamp: tuple[int, ...] = ()
    """Device, inode, size and time of change."""
    rows: tuple[Row, ...] = ()
    """Those of the lines that have a newline."""
    last: tuple[Row, ...] = ()
    """The row that has none yet, if there is one."""
    num_lines: int = 0
    """Lines with a newline, empty ones too."""
    end: int = 0
    """Bytes of these lines."""
    ending: bytes = b""
    """The last of these bytes: a file that grew still has them, one that was rewritten does not."""

    def again(self, path: Path) -> Read:
        """The file as it is now. ValueError as `read_rows`."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if stamp == self.stamp:
                return self
            before = self if self._grew(file, stamp) else NOTHING_READ
            return before._more(file, stamp, path)

    def _grew(self, file: BinaryIO, stamp: tuple[int, ...]) -> bool:
        if self.stamp[:2] != stamp[:2] or stamp[2] <= self.stamp[2]:
            return False
        file.seek(self.end - len(self.ending))
        return file.read(len(self.ending)) == self.ending

    def _more(self, file: BinaryIO, stamp: tuple[int, ...], path: Path) -> Read:
        """What was read, and the rest of the file."""
        file.seek(self.end)
        data = file.read(stamp[2] - self.end)
        *lines, tail = data.split(b"\n")
        complete = data[: len(data) - len(tail)]
        numbered = list(enumerate([*lines, tail], self.num_lines + 1))
        rows = [
            row_of_line(line, f"{path}: line {at}") for at, line in numbered[:-1] if line.strip()
        ]
        last = [
            row_of_line(line, f"{path}: line {at}") for at, line in numbered[-1:] if whole(line)
        ]
        return Read(
            stamp=stamp,
            rows=(*self.rows, *rows),
            last=tuple(last),
            num_lines=self.num_lines + len(lines),
            end=self.end + len(complete),
            ending=complete[-ENDING:] or self.ending,
        )


NOTHING_READ = Read()


def read_rows(path: Path) -> list[Row]:
    """Rows of one JSONL file, in order. ValueError, with file and line, for a line that is no row.

    A last line without its newline is a row if it is whole; else its writer was killed, and it is
    left out.
    """
    read = NOTHING_READ.again(path)
    return [*read.rows, *read.last]


def whole(line: bytes) -> bool:
    """Whether a line is JSON to its end: one that a killed writer left behind is not."""
    try:
        _parsed(line)
    except (ValueError, RecursionError):
        return False
    return True


def row_of_line(line: bytes, where: str) -> Row:
    """The row of one line of JSON, with a byte order mark or without.

    ValueError, one line that begins with `where`, for anything else.
    """
    try:
        record = _parsed(line)
    except UnicodeDecodeError:
        wrong = "is not UTF-8"
    except (ValueError, RecursionError):
        wrong = "is not JSON"
    else:
        if _is_text(line, record):
            return row_of_record(record, where)
        wrong = "has half a character (\\ud800 to \\udfff)"
    raise ValueError(f"{where} {wrong}; a row was edited or torn, remove that line")


def _parsed(line: bytes) -> Any:
    return json.loads(str(line, "utf-8-sig"))


def _is_text(line: bytes, record: Any) -> bool:
    """Whether a file can hold what the line's escapes stand for."""
    if b"\\ud" in line.lower():
        text = json.dumps(record, ensure_ascii=False)
        return text == text.encode(errors="replace").decode()
    return True


KINDS: dict[str, Any] = get_type_hints(Row)
"""The type of each field of a row."""
REQUIRED = tuple(
    one.name
    for one in dataclasses.fields(Row)
    if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
)
INSIDE: dict[str, dict[str, Any]] = {
    "machine": {
        **dict.fromkeys(("gpu", "cpu", "boot", "huge_pages"), str | None),
        **dict.fromkeys(("num_gpus", "num_cores", "host_cores", "numa_nodes"), int | None),
        **dict.fromkeys(("device_bytes", "host_bytes"), float | None),
        **dict.fromkeys(
            ("matrix_peak_tflops", "matrix_sustained_tflops", "datasheet_tflops"), float | None
        ),
    },
    "plan": {
        **dict.fromkeys(("device", "host", "placement"), dict[str, int]),
        **dict.fromkeys(("step_s", "window_step_s"), float | None),
        "rates": dict[str, Any],
    },
    "config": dict.fromkeys(
        ("model", "shape", "recipe", "data", "logging", "system", "measure", "machine"),
        dict[str, Any],
    ),
    "config.machine": {"device": str, "device_bytes": float | None},
    "config.measure": dict.fromkeys(("warmup_steps", "windows", "steps_per_window", "repeat"), int),
    "config.model": {"config": dict[str, Any]},
    "config.model.config": dict.fromkeys(("num_hidden_layers", "hidden_size"), int | None),
    "config.system": {
        "dtype": str,
        **dict.fromkeys(("depth", "streams", "checkpoint_interval"), int | None),
    },
}
"""What is known of the mappings in a row: of each by its path, the kinds of those keys that are
read somewhere. Others are as they are."""
CONFIG_HAS = ("config.system.dtype", "config.measure", "config.machine.device")
"""What cells are compared by: a row has it, unless it has no config at all."""
LARGEST = 1 << 60
"""Whole numbers are smaller: a table adds some of them, and holds 64 bits."""
ANY_NUMBER = ("losses", "gradient_norms", "heldout_loss", "max_loss_difference")
"""Fields that may be negative, infinite or no number at all; the others are what was counted."""
DIVISORS = ("batch_size", "seq_len", "num_micro_batches", "num_params", "tokens_per_s", "step_s")
"""Fields that are not zero either."""
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


def row_of_record(record: Any, where: str) -> Row:
    """The row, every value of it of its kind, so that who reads it need not ask."""
    try:
        fields = _fields(record)
        for path, kinds in INSIDE.items():
            _take_inside(fields, path, kinds)
        lacking = [path for path in CONFIG_HAS if _inside(fields, path) is None]
        if fields.get("config") and lacking:
            raise ValueError(f"no {lacking[0]}, allowed a config with it or an empty one")
    except ValueError as error:
        remedy = (
            "remove that line and run the cell again, or read it with the version that wrote it"
        )
        raise ValueError(f"{where} has {error}; {remedy}") from None
    return Row(**fields)


def _fields(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"no row, allowed schema_version {SCHEMA_VERSION}")
    version, status = record.get("schema_version"), record.get("status")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version {_shown(version)}, allowed schema_version {SCHEMA_VERSION}"
        )
    if unknown := sorted(set(record) - set(KINDS)):
        raise ValueError(f"the field {_shown(unknown[0])}, allowed what this version knows")
    if status not in STATUSES:
        raise ValueError(
            f"status {_shown(status)}, allowed what this version knows: {', '.join(STATUSES)}"
        )
    if lacking := [name for name in REQUIRED if name not in record]:
        raise ValueError(f"no {lacking[0]}, allowed a row with {', '.join(REQUIRED)}")
    fields = {name: _taken(value, KINDS[name], name) for name, value in record.items()}
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            _require_sense(name, item)
    if fields.get("tokens_per_s") is not None and not fields.get("step_s"):
        raise ValueError("tokens_per_s without step_s, allowed both or neither")
    return fields | {name: [float(item) for item in fields.get(name, [])] for name in HISTORY}


def _taken(value: Any, kind: Any, name: str) -> Any:
    """The value as that kind, floats made of the words that stand for them; ValueError where it is
    of another."""
    if isinstance(kind, UnionType):  # all of them are `... | None`
        return None if value is None else _taken(value, get_args(kind)[0], name)
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is list and isinstance(value, list):
        return [_taken(item, inner[0], name) for item in value]
    if outer is dict and isinstance(value, dict):
        return {key: _taken(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    if outer is float and (number := _number(value)) is not None:
        return number
    if outer is Any or (outer in (str, bool) and type(value) is outer):
        return value
    if outer is int and type(value) is int and abs(value) < LARGEST:
        return value
    raise ValueError(f"{name} {_shown(value)}, allowed {WORDS[outer]}")


def _number(value: Any) -> float | None:
    """A number of JSON, or what stands for one that strict JSON lacks: nan, inf, -inf, and as W&B
    writes them."""
    try:
        found = float(value) if type(value) in (int, float, str) else None
    except (ValueError, OverflowError):
        return None
    if isinstance(value, str):
        return None if found is None or math.isfinite(found) else found
    return None if found is None else value


def _require_sense(name: str, value: Any) -> None:
    """What was counted or timed is finite and not negative, and what others are divided by is not
    zero."""
    if type(value) not in (int, float) or name in ANY_NUMBER:
        return
    if not (0 <= value < math.inf) or (not value and name in DIVISORS):
        least = "> 0" if name in DIVISORS else ">= 0"
        raise ValueError(f"{name} {_shown(value)}, allowed a finite number {least}")


def _take_inside(record: Mapping[str, Any], path: str, kinds: Mapping[str, Any]) -> None:
    found = _inside(record, path) or {}
    for key, kind in kinds.items():
        if key in found:
            found[key] = _taken(found[key], kind, f"{path}.{key}")


def _inside(record: Any, path: str) -> Any:
    """What lies at a dotted path; None where nothing does."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
