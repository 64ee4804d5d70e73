"""The row: what one cell leaves behind, whatever happened to it, and the line of JSON that holds
it.

Invariant: a row is written once and never edited; units are in the names, bytes are integers, and a
number that is not known is None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
    """gpu, num_gpus, device_bytes, cpu, num_cores, host_cores, numa_nodes, huge_pages, host_bytes,
    boot, matrix_peak_tflops, matrix_sustained_tflops, datasheet_tflops. num_cores: those that the
    process may use, of the host_cores there are. boot: eight hex digits, the same in rows of one
    machine between two of its starts. huge_pages: when the kernel backs host memory with them,
    always, madvise or never. These two and numa_nodes are None where unreadable; older rows lack
    them, host_cores and matrix_sustained_tflops."""
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
