"""The row: what one cell leaves behind, whatever happened to it. The only module that analysis imports.

Invariant: a row is written once and never edited; units are in the names, bytes are integers, and a number
that is not known is None.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
BENCH_VERSION = 2
"""2: cells run with growing segments of device memory (sweeps.environment.cell_variables)."""
STATUSES = ("ok", "oom_device", "oom_host", "timeout", "nonfinite", "unsupported", "wont_fit", "error")
"""ok: measured. wont_fit: refused from `plan` before anything was allocated. oom_host: killed by SIGKILL, or MemoryError."""
REFERENCE = "in_memory"
"""The system whose losses the others must agree with."""
STAND_IN = "zero3"
"""The reference where REFERENCE has no room on the machine: an independent implementation with an fp32 master."""
NO_ROOM = ("wont_fit", "oom_device", "oom_host")
UNHASHED = ("experiment", "logging", "output_dir")
"""Groups of a config that cannot change a measurement; machine and measure.timeout_s are left out beside them."""
LOSS_TOLERANCE = 2e-3
"""Largest absolute difference from the reference's losses, nats per token, at which a row `agrees`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured (or refused, or failed) cell."""

    experiment: str
    cell: str
    """Hash of the composed config without logging, output paths and machine."""
    system: str
    model: str
    batch_size: int
    seq_len: int
    num_micro_batches: int
    status: str
    reason: str = ""
    """One line: why the status is not ok."""
    preset: str | None = None
    num_params: int | None = None
    tokens_per_s: float | None = None
    """Label tokens of the timed windows over their seconds; padding never counted. The primary figure."""
    step_s: list[float] = field(default_factory=list)
    """Seconds a step, one entry a window (window seconds / steps in it)."""
    tflops_6p: float | None = None
    """6 x num_params x tokens_per_s / 1e12; recompute never counted."""
    mfu: float | None = None
    """tflops_6p over this machine's own measured matrix peak; None where no peak was measured."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step, warm-up included, in order."""
    heldout_loss: float | None = None
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
    peak_host_bytes: int | None = None
    """Peak PSS of the cell's process tree, sampled from outside it (pinned pages included)."""
    host_bytes: dict[str, int] = field(default_factory=dict)
    """peak_host_bytes by kind: pss_anon_bytes, pss_file_bytes, pss_shmem_bytes."""
    plan: dict[str, Any] = field(default_factory=dict)
    """{"device": {kind: bytes}, "host": {kind: bytes}} as predicted before the run, and step_s where a system predicts it."""
    counters: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    """gpu, num_gpus, device_bytes, cpu, num_cores, host_bytes, matrix_peak_tflops."""
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    started_at: str = ""
    """UTC, ISO 8601."""
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


def _loose(value: Any) -> Any:
    return [float(item) for item in value] if isinstance(value, list) else value


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
        if record.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: line {number} has schema_version {record.get('schema_version')}, allowed {SCHEMA_VERSION}; "
                "re-run the cell or read it with the version that wrote it"
            )
        record["losses"], record["step_s"] = _loose(record.get("losses", [])), _loose(record.get("step_s", []))
        rows.append(Row(**record))
    return rows


def hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a composed config that can change a measurement: what a cell is known by."""
    kept = {name: value for name, value in config.items() if name not in UNHASHED}
    kept["measure"] = {name: value for name, value in config["measure"].items() if name != "timeout_s"}
    kept["machine"] = {"device": config["machine"]["device"]}
    return kept


def digest(value: Any) -> str:
    """Twelve hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def comparison_key(config: Mapping[str, Any]) -> str:
    """Digest of what two cells must share for their losses to be comparable: all but the system's own knobs and the timing."""
    shared = {name: value for name, value in hashed(config).items() if name not in ("system", "measure")}
    return digest({**shared, "dtype": config["system"]["dtype"]})


def compared(row: Row, rows: Sequence[Row]) -> Row:
    """`row` with its losses held against the latest reference of the same model, batches, recipe and dtype.

    Where a row says that REFERENCE has no room, STAND_IN takes its place.
    """
    if row.status != "ok":
        return row
    key = comparison_key(row.config)
    alike = [item for item in reversed(rows) if item.system in (REFERENCE, STAND_IN) and comparison_key(item.config) == key]
    name = REFERENCE
    if all(item.status in NO_ROOM for item in alike if item.system == REFERENCE) and any(i.system == REFERENCE for i in alike):
        name = STAND_IN
    if row.system == name:
        return dataclasses.replace(row, agrees=True, max_loss_difference=0.0)
    reference = next((item for item in alike if item.system == name and item.status == "ok"), None)
    if reference is None or not row.losses:
        return row
    worst = max(abs(mine - theirs) for mine, theirs in zip(row.losses, reference.losses, strict=False))
    return dataclasses.replace(row, agrees=worst <= LOSS_TOLERANCE, max_loss_difference=worst)
