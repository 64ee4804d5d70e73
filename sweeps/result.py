"""The row: what one cell leaves behind, whatever happened to it. With identity.py and runfile.py all that analysis imports.

Invariant: a row is written once and never edited; units are in the names, bytes are integers, and a number
that is not known is None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from sweeps.identity import comparison_key

SCHEMA_VERSION = 1
BENCH_VERSION = 2
"""2: cells run with growing segments of device memory (sweeps.environment.cell_variables)."""
STATUSES = ("ok", "oom_device", "oom_host", "timeout", "nonfinite", "unsupported", "wont_fit", "error")
"""ok: measured. wont_fit: refused from `plan` before anything was allocated. oom_host: killed by SIGKILL, or MemoryError."""
REFERENCE = "in_memory"
"""The system whose losses the others must agree with."""
STAND_IN = "zero3"
"""The reference where REFERENCE was not measured: an independent implementation with an fp32 master."""
STAND_IN_KEPT = "kept"
"""The one preset of it that may be: the same arithmetic, less recomputation."""
HISTORY = ("losses", "step_s")
"""Fields of a row that are the history of its W&B run."""
NO_ROOM = ("wont_fit", "oom_device", "oom_host")
LOSS_TOLERANCE = 2e-3
"""Largest absolute difference from the reference's losses, nats per token, at which a row `agrees`."""
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
    status: str
    reason: str = ""
    """One line: why the status is not ok, or what is to be known of a measured row."""
    preset: str | None = None
    num_params: int | None = None
    tokens_per_s: float | None = None
    """Label tokens of the timed windows over their seconds; padding never counted. The primary figure."""
    step_s: list[float] = field(default_factory=list)
    """Seconds a step, one entry a window (window seconds / steps in it)."""
    tflops_6p: float | None = None
    """6 x num_params x tokens_per_s / 1e12; recompute never counted."""
    tflops_6p_causal: float | None = None
    """6P and the attention that a causal mask leaves (sweeps.flops); None where ambiguous, and in older rows."""
    tflops_paper: float | None = None
    """The paper's formula, 6P + 12 L h T; None where ambiguous, and in older rows."""
    mfu: float | None = None
    """tflops_6p over this machine's own measured matrix peak; None where no peak was measured."""
    mfu_datasheet: float | None = None
    """tflops_6p over the data sheet's dense bf16 peak; None for an unknown GPU, and in older rows."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step, warm-up included, in order."""
    heldout_loss: float | None = None
    """Mean over the label tokens of measure.heldout_tokens of the held-out text, of the plain model with the trained parameters."""
    agrees: bool | None = None
    """Largest |loss - reference loss| <= LOSS_TOLERANCE over the steps both ran; None without a reference row."""
    max_loss_difference: float | None = None
    dtypes: dict[str, str] = field(default_factory=dict)
    caveat: str | None = None
    """What the system does otherwise than the recipe asks, one line; None for the others and in rows older than the field."""
    peak_device_bytes: int | None = None
    """Peak of torch's allocator (allocated, not reserved)."""
    device_bytes: dict[str, int] = field(default_factory=dict)
    """Device peaks as each observer saw them: allocated, reserved (torch), nvml (sampled from outside the process)."""
    crowd_device_bytes: int | None = None
    """Device memory that was in use beside the cell, where others were there; None where nobody was, and in older rows."""
    peak_host_bytes: int | None = None
    """Peak PSS of the cell's process tree, sampled from outside it (pinned pages included)."""
    host_bytes: dict[str, int] = field(default_factory=dict)
    """peak_host_bytes by what the kernel calls it: pss_anon_bytes, pss_file_bytes, pss_shmem_bytes."""
    host_split: dict[str, int] = field(default_factory=dict)
    """peak_host_bytes by what it is for (`host_split`), of a measured cell; empty in older rows."""
    plan: dict[str, Any] = field(default_factory=dict)
    """{"device": {kind: bytes}, "host": {kind: bytes}} as predicted before the run; where a system predicts its step,
    also step_s (steady), window_step_s (as the windows measure it, drains included) and the rates (a second) they follow from.
    placement: where a system chose or was told what goes where, numbers of blocks and layers."""
    counters: dict[str, float] = field(default_factory=dict)
    """Of all steps; beside it those of each window alone, in the order of step_s (empty in older rows)."""
    window_counters: list[dict[str, float]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    """gpu, num_gpus, device_bytes, cpu, num_cores, host_bytes, boot, matrix_peak_tflops, datasheet_tflops. boot: eight hex digits,
    the same in rows of one machine between two of its starts; None where unreadable, not there in older rows."""
    versions: dict[str, str] = field(default_factory=dict)
    allocator: str | None = None
    """PYTORCH_ALLOC_CONF of the cell's process: the bench's, or the user's in its place; None in older rows."""
    git_commit: str | None = None
    started_at: str = ""
    """UTC, ISO 8601."""
    cell_s: float | None = None
    """Seconds that the cell's process lived, setting up and what follows the measurement included; None where none was started,
    and in older rows."""
    config: dict[str, Any] = field(default_factory=dict)
    """The composed config of the cell, as run."""
    schema_version: int = SCHEMA_VERSION
    bench_version: int = BENCH_VERSION

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status

    def to_json(self) -> str:
        """One line of strict JSON (NaN and infinities become strings)."""
        return json.dumps(_strict(dataclasses.asdict(self)), allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return repr(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value


def read_rows(path: Path) -> list[Row]:
    """Rows of one JSONL file, in order. A torn last line (the writer was killed) is dropped; ValueError for another schema."""
    rows = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                continue
            raise ValueError(f"{path}: line {number} is not JSON; a row was edited or torn, remove that line") from None
        rows.append(_row(record, f"{path}: line {number}"))
    return rows


def host_split(plan: Mapping[str, Any], peak_host_bytes: int | None, *, on_gpu: bool) -> dict[str, int]:
    """The observed host peak by kind: weights, master, moments, gradients as planned, staging, and other; {} without a peak.

    staging: whatever else the plan names (pinned copies, activations). other: the observed peak, seen from outside the
    process, less all of these: libraries, CUDA context, allocator. It is negative where a plan names more than was touched.
    Without a GPU the host holds both shares of the plan.
    """
    if peak_host_bytes is None or not (plan.get("host") or plan.get("device")):
        return {}
    split = dict.fromkeys(HOST_KINDS, 0)
    for share in ("host",) if on_gpu else ("host", "device"):
        for kind, size in plan.get(share, {}).items():
            if kind != "other":
                split[kind if kind in split else "staging"] += size
    return split | {"other": peak_host_bytes - sum(split.values())}


NUMBERS = tuple(item.name for item in dataclasses.fields(Row) if item.type in ("int", "int | None", "float | None"))
"""Fields of a row that are one number."""


def _row(record: Any, where: str) -> Row:
    remedy = "re-run the cell or read it with the version that wrote it"
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        found = f"schema_version {record.get('schema_version')}" if isinstance(record, dict) else "no row"
        raise ValueError(f"{where} has {found}, allowed schema_version {SCHEMA_VERSION}; {remedy}")
    unknown = sorted(set(record) - {item.name for item in dataclasses.fields(Row)})
    if unknown or record.get("status") not in STATUSES:
        found = f"the field {unknown[0]!r}" if unknown else f"status {record.get('status')!r}"
        raise ValueError(f"{where} has {found}, allowed what this version knows; {remedy}")
    single = [(key, record[key]) for key in NUMBERS if record.get(key) is not None]
    for name, value in [*single, *((key, item) for key in HISTORY for item in record.get(key, []))]:
        try:
            float(value)  # of text too: strict JSON has no other NaN
        except (TypeError, ValueError):
            raise ValueError(f"{where} has {name} {value!r}, allowed a number; {remedy}") from None
    return Row(**record | {name: [float(value) for value in record.get(name, [])] for name in HISTORY})


def history(row: Row) -> Iterator[tuple[int, dict[str, float]]]:
    """What W&B gets as history, (step, values): the loss of every step; at a window's last step also its seconds and tokens/s."""
    measure = row.config.get("measure", {})
    warmup, length = int(measure.get("warmup_steps", 0)), int(measure.get("steps_per_window", 1))
    tokens = row.tokens_per_s * fmean(row.step_s) if row.tokens_per_s and row.step_s else None  # label tokens of a step
    ends = {warmup + (number + 1) * length - 1: seconds for number, seconds in enumerate(row.step_s)}
    for step in sorted({*range(len(row.losses)), *ends}):
        values = {"loss": row.losses[step]} if step < len(row.losses) else {}
        if step in ends:
            values |= {"step_s": ends[step]} | ({"tokens_per_s": tokens / ends[step]} if tokens else {})
        yield step, values


def packed(row: Row) -> str:
    """The rest of the row, for W&B: one line of JSON, with the number of entries in place of what `history` yields."""
    return json.dumps(json.loads(row.to_json()) | {name: len(getattr(row, name)) for name in HISTORY})


def unpacked(text: str, steps: Iterable[Mapping[str, Any]], where: str) -> Row:
    """The row again, from `packed` and the history (entries with a `_step`, in any order); ValueError where some are missing."""
    record, ordered = json.loads(text), sorted(steps, key=lambda entry: int(entry["_step"]))
    for name, key in zip(HISTORY, ("loss", "step_s"), strict=True):
        found = [entry[key] for entry in ordered if entry.get(key) is not None]
        if len(found) != record.get(name):
            raise ValueError(f"{where} has {len(found)} of {record.get(name)} {name}: its writer was stopped; upload the row again")
        record[name] = found
    return _row(record, where)


def compared(row: Row, rows: Sequence[Row], *, complete: bool = False) -> Row:
    """`row` with its losses held against the reference of the same model, batches, recipe and dtype: the latest, and of its repeats
    the first, which the others are held against like any row.

    The reference is REFERENCE, eager. STAND_IN, eager, takes its place where rows say that it has no room; where `rows` are
    `complete`, wherever it was not measured, and then also compiled or, the last resort, STAND_IN_KEPT.
    """
    if row.status != "ok":
        return row
    key = comparison_key(row.config)
    beside = [item for item in reversed(rows) if item.config and comparison_key(item.config) == key]
    refused = any(item.system == REFERENCE and item.preset is None and item.status in NO_ROOM for item in beside)
    kinds: list[tuple[str, str | None, bool]] = [(REFERENCE, None, False)]
    kinds += [(STAND_IN, None, False)] * (refused or complete)
    kinds += [(STAND_IN, None, True), (STAND_IN, STAND_IN_KEPT, True)] * complete
    measured = [item for item in (row, *beside) if item.status == "ok" and _kind(item) in kinds]
    reference = min(measured, key=lambda item: (kinds.index(_kind(item)), _repeat(item)), default=None)
    if reference is row:
        return dataclasses.replace(row, agrees=True, max_loss_difference=0.0)
    if reference is None or not row.losses:
        return row
    worst = max(abs(mine - theirs) for mine, theirs in zip(row.losses, reference.losses, strict=False))
    return dataclasses.replace(row, agrees=worst <= LOSS_TOLERANCE, max_loss_difference=worst)


def _kind(row: Row) -> tuple[str, str | None, bool]:
    """What decides whether others may be held against the row: system, preset, whether it is compiled."""
    return row.system, row.preset, is_compiled(row)


def is_compiled(row: Row) -> bool:
    """Whether the row's system compiled its layers."""
    return bool(row.config.get("system", {}).get("compile"))


def _repeat(row: Row) -> int:
    return int(row.config.get("measure", {}).get("repeat", 1))
