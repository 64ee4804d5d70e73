"""The row: what one cell leaves behind, whatever happened to it, and the line of JSON that holds
it.

Invariant: a row is written once and never edited; units are in the names, bytes are integers, and a
number that is not known is None.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from sweeps.identity import comparison_key, configuration, identity

SCHEMA_VERSION = 1
RETRIED = ("error", "timeout", "oom_host", "unsupported", "wont_fit")
"""Statuses that another run may change: installing, freeing memory, raising a limit. The others
stand; oom_device does not where others had a part of the device."""
BENCH_VERSION = 2
"""2: cells run with growing segments of device memory (sweeps.environment.cell_variables)."""
STATUSES = (
    "ok",
    "oom_device",
    "oom_host",
    "timeout",
    "nonfinite",
    "unsupported",
    "wont_fit",
    "error",
)
"""ok: measured. wont_fit: refused from `plan` before anything was allocated. oom_host: killed by
SIGKILL, or MemoryError."""
HISTORY = {"losses": "loss", "step_s": "step_s", "gradient_norms": "gradient_norm"}
"""Fields of a row that are the history of its W&B run -> what they are called there."""
ENDING = 4096
"""Bytes by which a file of rows that grew is known again."""
DISK_RATES = ("disk_read_bytes", "disk_write_bytes")
"""Rates of a plan that are probed where there is state on disk."""
HOST_KINDS = ("weights", "master", "moments", "gradients", "staging")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured (or refused, or failed) cell."""

    experiment: str
    cell: str
    """Hash of the composed config without logging, output paths and host."""
    system: str
    model: str
    batch_size: int
    seq_len: int
    num_micro_batches: int
    num_ranks: int = 1
    """Processes that trained together, each on a device of its own and on its part of every
    micro-batch; counters are rank 0's. 1 in older rows."""
    status: str
    reason: str = ""
    """One line: why the status is not ok, or what is to be known of a measured row."""
    preset: str | None = None
    num_params: int | None = None
    tokens_per_s: float | None = None
    """Label tokens of the timed windows over their seconds; padding never counted. The primary
    figure."""
    step_s: list[float] = field(default_factory=list)
    """Seconds a step, one entry a window (window seconds / steps in it)."""
    steady_tokens_per_s: float | None = None
    """The same without the drains, by the device's own clock: label tokens of all but the first
    step of every window, over the seconds from where that ended to where the last one did. None
    where windows have one step, and in older rows."""
    tflops_6p: float | None = None
    """6 x num_params x tokens_per_s / 1e12; recompute never counted."""
    tflops_6p_causal: float | None = None
    """6P and the attention that a causal mask leaves (sweeps.flops); None where ambiguous, and in
    older rows."""
    tflops_paper: float | None = None
    """The paper's formula, 6P + 12 L h T; None where ambiguous, and in older rows."""
    mfu: float | None = None
    """tflops_6p over this machine's own measured matrix peak; None where no peak was measured."""
    mfu_sustained: float | None = None
    """tflops_6p over what this machine's matrix products keep up for seconds; None where not
    measured, and in older rows."""
    mfu_datasheet: float | None = None
    """tflops_6p over the data sheet's dense bf16 peak; None for an unknown GPU, and in older
    rows."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step, warm-up included, in order."""
    gradient_norms: list[float] = field(default_factory=list)
    """Global 2-norm of every step's gradients, before clipping; [] where unknown, and in older
    rows."""
    heldout_loss: float | None = None
    """Mean over the label tokens of measure.heldout_tokens of the held-out text, of the plain model
    with the trained parameters."""
    exact_match: float | None = None
    """Share of held-out questions that the plain model answers word for word with the trained
    parameters; None where none was asked, and in older rows."""
    num_questions: int | None = None
    """How many were asked."""
    heldout: list[dict[str, float]] = field(default_factory=list)
    """The loss on them as the system itself evaluated it meanwhile: step, tokens (label tokens
    trained on so far), seconds (of the timed windows so far), loss. [] where not asked for, where
    the reason says why not, and in older rows."""
    agrees: bool | None = None
    """Largest |loss - reference loss| <= LOSS_TOLERANCE over the steps both ran; None without a
    reference row."""
    max_loss_difference: float | None = None
    dtypes: dict[str, str] = field(default_factory=dict)
    caveat: str | None = None
    """What the system does otherwise than the recipe asks, one line; None for the others and in
    rows older than the field."""
    peak_device_bytes: int | None = None
    """Peak of torch's allocator (allocated, not reserved); of several ranks the largest."""
    all_device_bytes: int | None = None
    """The sum of these peaks over several ranks; None of one, and in older rows."""
    device_bytes: dict[str, int] = field(default_factory=dict)
    """Device peaks as each observer saw them: allocated, reserved (torch), nvml (sampled from
    outside the process)."""
    crowd_device_bytes: int | None = None
    """Device memory that was in use beside the cell, where others were there; None where nobody
    was, and in older rows."""
    sm_mhz: float | None = None
    """Mean clock of the multiprocessors over the timed windows; this and the three below None where
    unknown, and in older rows."""
    power_w: float | None = None
    """Mean power of the device over them, by its own count of energy."""
    throttle_reasons: dict[str, float] | None = None
    """What held the clock down meanwhile, by NVML's names: share of the looks at it; {} where
    nothing did."""
    host_power_w: float | None = None
    """Mean power of the host's processors and their memory over them, by their own count of
    energy."""
    peak_host_bytes: int | None = None
    """Peak PSS of the cell's process tree, all ranks in it, sampled from outside it (pinned pages
    included)."""
    rank_host_bytes: int | None = None
    """The same of the largest rank alone; None of one, and in older rows."""
    host_bytes: dict[str, int] = field(default_factory=dict)
    """peak_host_bytes by what the kernel calls it: pss_anon_bytes, pss_file_bytes,
    pss_shmem_bytes."""
    host_split: dict[str, int] = field(default_factory=dict)
    """peak_host_bytes by what it is for (`host_split`), of a measured cell; empty in older rows."""
    plan: dict[str, Any] = field(default_factory=dict)
    """{"device": {kind: bytes}, "host": {kind: bytes}} of one rank as predicted before the run;
    where a system predicts its step, also step_s (steady), window_step_s (as the windows measure
    it, drains included) and the rates (a second) they follow from. placement: where a system chose
    or was told what goes where, numbers of blocks and layers."""
    counters: dict[str, float] = field(default_factory=dict)
    """What the system counted over all steps."""
    window_counters: list[dict[str, float]] = field(default_factory=list)
    """The same of each window alone, in the order of step_s; empty in older rows."""
    machine: dict[str, Any] = field(default_factory=dict)
    """gpu, num_gpus, device_bytes, cpu, num_cores, host_bytes, boot, matrix_peak_tflops,
    matrix_sustained_tflops, datasheet_tflops. boot: eight hex digits, the same in rows of one
    machine between two of its starts; None where unreadable. Older rows lack it, and
    matrix_sustained_tflops."""
    versions: dict[str, str] = field(default_factory=dict)
    allocator: str | None = None
    """PYTORCH_ALLOC_CONF of the cell's process: the bench's, or the user's in its place; None in
    older rows."""
    git_commit: str | None = None
    started_at: str = ""
    """UTC, ISO 8601."""
    cell_s: float | None = None
    """Seconds that the cell's process lived, setting up and what follows the measurement included;
    None where none was started, and in older rows."""
    config: dict[str, Any] = field(default_factory=dict)
    """The composed config of the cell, as run."""
    schema_version: int = SCHEMA_VERSION
    bench_version: int = BENCH_VERSION

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status

    @cached_property
    def compared_with(self) -> str:
        """What rows whose losses are comparable with this one's share; its config is there."""
        return comparison_key(self.config)

    @cached_property
    def measurement(self) -> str:
        """What the repeats of this measurement share; its config is there."""
        return configuration(self.config)

    @cached_property
    def identity(self) -> str:
        """What the row's cell is known by; the cell's name where the row has no whole config."""
        return (
            identity(self.config)
            if {"system", "measure", "machine"} <= set(self.config)
            else self.cell
        )

    def to_json(self) -> str:
        """One line of strict JSON (NaN and infinities become strings)."""
        return json.dumps(_strict(dataclasses.asdict(self)), allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return repr(value)
    if isinstance(value, str):  # a path may hold bytes that are no text
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value


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
            return _row(record, where)
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


def host_split(
    plan: Mapping[str, Any], peak_host_bytes: int | None, *, on_gpu: bool, num_ranks: int = 1
) -> dict[str, int]:
    """The observed host peak by kind: weights, master, moments, gradients as planned, staging, and
    other; {} without a peak.

    staging: whatever else the plan names (pinned copies, activations). other: the observed peak,
    seen from outside the process, less all of these: libraries, CUDA context, allocator. It is
    negative where a plan names more than was touched. Without a GPU the host holds both shares of
    the plan. Of several ranks it is all of theirs.
    """
    if peak_host_bytes is None or not (plan.get("host") or plan.get("device")):
        return {}
    split = dict.fromkeys(HOST_KINDS, 0)
    for share in ("host",) if on_gpu else ("host", "device"):
        for kind, size in plan.get(share, {}).items():
            if kind != "other":
                split[kind if kind in split else "staging"] += num_ranks * size
    return split | {"other": peak_host_bytes - sum(split.values())}


KINDS: dict[str, Any] = get_type_hints(Row)
"""The type of each field of a row."""
REQUIRED = tuple(
    one.name
    for one in dataclasses.fields(Row)
    if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
)
INSIDE: dict[str, dict[str, Any]] = {
    "machine": {
        **dict.fromkeys(("gpu", "cpu", "boot"), str | None),
        **dict.fromkeys(("num_gpus", "num_cores"), int | None),
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


def _row(record: Any, where: str) -> Row:
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


def history(row: Row) -> Iterator[tuple[int, dict[str, float]]]:
    """What W&B gets as history, (step, values): loss and gradient norm of every step; at a window's
    last step also its seconds and tokens/s."""
    measure = row.config.get("measure", {})
    warmup, length = int(measure.get("warmup_steps", 0)), int(measure.get("steps_per_window", 1))
    tokens = (
        row.tokens_per_s * fmean(row.step_s) if row.tokens_per_s and row.step_s else None
    )  # label tokens of a step
    ends = {
        warmup + (number + 1) * length - 1: seconds for number, seconds in enumerate(row.step_s)
    }
    by_step = {"loss": row.losses, "gradient_norm": row.gradient_norms}
    for step in sorted({*range(max(map(len, by_step.values()))), *ends}):
        values = {name: one[step] for name, one in by_step.items() if step < len(one)}
        if step in ends:
            values |= {"step_s": ends[step]} | (
                {"tokens_per_s": tokens / ends[step]} if tokens else {}
            )
        yield step, values


def packed(row: Row) -> str:
    """The rest of the row, for W&B: one line of JSON, with the number of entries in place of what
    `history` yields."""
    return json.dumps(
        json.loads(row.to_json()) | {name: len(getattr(row, name)) for name in HISTORY}
    )


def unpacked(text: str, steps: Iterable[Mapping[str, Any]], where: str) -> Row:
    """The row again, from `packed` and the history (entries with a `_step`, in any order);
    ValueError where some are missing."""
    record, ordered = json.loads(text), sorted(steps, key=lambda entry: int(entry["_step"]))
    for name, key in HISTORY.items():
        found = [entry[key] for entry in ordered if entry.get(key) is not None]
        if len(found) != record.get(name, 0):  # runs of before lack the norms
            raise ValueError(
                f"{where} has {len(found)} of {record.get(name)} {name}: its writer was stopped; "
                "upload the row again"
            )
        record[name] = found
    return _row(record, where)
