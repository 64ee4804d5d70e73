"""One configuration as tables, figures and sentences show it: what a record of the frame says of it, its repeats pooled."""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pandas as pd

from analysis import stats
from analysis.stats import Estimate
from analysis.style import STATUS_LABELS
from sweeps.identity import FALLBACK
from sweeps.result import REFERENCE, STAND_IN, STAND_IN_KEPT

Number = TypeVar("Number", int, float)
REFUSAL = re.compile(r"needs ([\d,]+) bytes of (\w+) memory, allowed ([\d,]+)")
"""What sweeps/cell.py says of a cell without room."""
MISSED = 0.8
"""Share of the planned host bytes under which a peak was not seen."""
SETTLED = 0.96
"""Share of the windows' mean under which a last window that no earlier one undercuts was not the end of warming up."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One configuration, ready to be shown. Bytes are integers, speeds are label tokens a second."""

    label: str
    system: str
    preset: str | None = None
    status: str
    reason: str
    speed: Estimate | None
    step_s: list[float]
    """Seconds a step of every window, repeat after repeat."""
    num_repeats: int = 1
    """Repeats that were measured."""
    optimizer_s: list[tuple[float, float]] = field(default_factory=list)
    """Seconds a step that the optimizer ran and was waited for, of every window, as step_s; empty where the rows do not say."""
    ratio: Estimate | None = None
    """Speed over the fastest ZeRO-3's, not counting its other presets unless there is nothing else; None without one, or where its
    own numerics differ."""
    tflops: float | None
    mfu: float | None
    mfu_datasheet: float | None = None
    device_bytes: int | None
    host_bytes: int | None
    host_bytes_per_param: float | None
    plan_device_bytes: int | None
    plan_host_bytes: int | None
    plan: dict[str, Any]
    """As the row has it: planned bytes by kind, and seconds a step where the system predicts them."""
    final_loss: float | None
    heldout_loss: float | None
    losses: list[float]
    max_loss_difference: float | None
    agrees: bool | None
    caveat: str | None = None
    """What the system does otherwise than the recipe asks."""
    fallback: bool = False
    """Whether a slower part ran in place of the system's own (sweeps.identity.FALLBACK): its speed is not the system's."""
    ranked: bool = False
    best: bool = False
    variant: int = 0
    """Which look of its system it has in this group's figures (style.variants)."""
    common_steps: int | None = None
    """Steps that all measured rows of the group have losses of; None where all have the same number."""
    compared_steps: int | None = None
    """Steps whose losses were held against the reference's, where that is not all of them."""
    stands_in: bool = False
    """Whether others were held against this one because the in-memory system was not measured (sweeps.result.compared)."""

    @property
    def measured(self) -> bool:
        """Whether the row carries a speed."""
        return self.status == "ok" and self.speed is not None

    @property
    def is_reference(self) -> bool:
        """Whether this is the in-memory system: the numerics reference."""
        return self.system == REFERENCE

    @property
    def differs(self) -> bool:
        """Whether the losses are known to disagree with the reference."""
        return self.agrees is False and not self.is_reference and not self.stands_in

    @property
    def status_label(self) -> str:
        """The status in the words of figures and tables."""
        return "not measured" if self.status == "ok" and self.speed is None else STATUS_LABELS.get(self.status, self.status)

    @property
    def why(self) -> str:
        """The reason in short: of a refusal what is needed and allowed, of torch's allocator what it was asked for."""
        if refused := REFUSAL.search(self.reason):
            needed, kind, allowed = refused.groups()
            return f"needs {_gb(needed)} of {kind} memory, allowed {_gb(allowed)}"
        return self.reason.partition(" GPU 0 has a total capacity")[0]

    @property
    def missed(self) -> str | None:
        """What to know of a host peak far below the plan's: a short run may have been sampled before it had touched its memory."""
        seen, planned = self.host_bytes, self.plan_host_bytes
        if not self.measured or seen is None or planned is None or seen >= MISSED * planned:
            return None
        return f"{seen / 1e9:.1f} GB of host memory seen of {planned / 1e9:.1f} GB planned: sampled too early"

    @property
    def optimizer(self) -> str | None:
        """How much of a step was the optimizer's; None where it is not known, or nothing ran apart from the step."""
        if not self.measured or not any(ran for ran, _ in self.optimizer_s):
            return None
        ran, waited = (statistics.fmean(seconds) for seconds in zip(*self.optimizer_s, strict=True))
        step = statistics.fmean(self.step_s)
        return f"of {step:#.3g} s a step the optimizer ran for {ran:#.3g} s, and was waited for {waited:#.3g} s"

    @property
    def unsettled(self) -> str | None:
        """What to know of one run whose windows were still getting shorter: its speed, that of all of them, is too low."""
        steps = self.step_s
        if self.speed is None or self.num_repeats > 1 or len(steps) < 2 or any(map(operator.lt, steps, steps[1:])):
            return None
        mean, last = statistics.fmean(steps), steps[-1]
        if last > SETTLED * mean:
            return None
        told = ", ".join(f"{seconds:#.3g}" for seconds in steps)
        return f"not settled, windows of {told} s a step; by the last alone {self.speed.value * mean / last:,.0f} tokens/s"


def pooled(repeats: list[Standing]) -> Standing:
    """One standing of one configuration's repeats: the speeds of those measured pooled, the largest peaks and differences.

    Losses are the first measured repeat's. Where a repeat failed, the status stays ok as long as another was measured and the
    reason tells; where all did, the last one speaks for them.
    """
    measured = [one for one in repeats if one.measured]
    if len(repeats) == 1 or not measured:
        return repeats[-1]
    failed = [one for one in repeats if not one.measured]
    first = measured[0]
    speed = stats.pooled([(one.speed.value, one.step_s) for one in measured if one.speed])
    assert speed is not None
    assert first.speed is not None
    scale = speed.value / first.speed.value
    agreeing = [one.agrees for one in measured if one.agrees is not None]
    return replace(
        first,
        speed=speed,
        step_s=[second for one in measured for second in one.step_s],
        optimizer_s=[seconds for one in measured for seconds in one.optimizer_s],
        num_repeats=len(measured),
        reason=f"{len(failed)} of {len(repeats)} repeats failed ({failed[-1].status_label})" if failed else _first_reason(measured),
        tflops=_scaled(first.tflops, scale),
        mfu=_scaled(first.mfu, scale),
        mfu_datasheet=_scaled(first.mfu_datasheet, scale),
        device_bytes=_largest([one.device_bytes for one in measured]),
        host_bytes=_largest([one.host_bytes for one in measured]),
        host_bytes_per_param=_largest([one.host_bytes_per_param for one in measured]),
        max_loss_difference=_largest([one.max_loss_difference for one in measured]),
        agrees=all(agreeing) if agreeing else None,
    )


def _first_reason(standings: Sequence[Standing]) -> str:
    return next((one.reason for one in standings if one.reason), "")


def _scaled(number: float | None, scale: float) -> float | None:
    return None if number is None else number * scale


def _largest(numbers: Sequence[Number | None]) -> Number | None:
    return max((number for number in numbers if number is not None), default=None)


def standing_of(record: Mapping[Hashable, Any]) -> Standing:
    """One record of the frame as a standing by itself: no ratio, no rank, no variant."""
    known = {str(key): value for key, value in record.items() if isinstance(value, list | dict) or not pd.isna(value)}
    step_s = [float(second) for second in known["step_s"]]
    return Standing(
        label=known["label"],
        system=known["system"],
        preset=known.get("preset"),
        status=known["status"],
        reason=known.get("reason", ""),
        speed=stats.throughput(known.get("tokens_per_s"), step_s),
        step_s=step_s,
        optimizer_s=_optimizer_s(known),
        tflops=known.get("tflops_6p"),
        mfu=known.get("mfu"),
        mfu_datasheet=known.get("mfu_datasheet"),
        device_bytes=known.get("peak_device_bytes"),
        host_bytes=known.get("peak_host_bytes"),
        host_bytes_per_param=known.get("host_bytes_per_param"),
        plan_device_bytes=known.get("plan_device_bytes"),
        plan_host_bytes=known.get("plan_host_bytes"),
        plan=known["plan"],
        final_loss=known.get("final_loss"),
        heldout_loss=known.get("heldout_loss"),
        losses=known["losses"],
        max_loss_difference=known.get("max_loss_difference"),
        agrees=bool(known["agrees"]) if "agrees" in known else None,
        stands_in=known["system"] == STAND_IN
        and known.get("preset") in (None, "compiled", f"{STAND_IN_KEPT} compiled")
        and known.get("max_loss_difference") == 0.0,
        caveat=known.get("caveat"),
        fallback=bool(known["config"].get("system", {}).get(FALLBACK)),
    )


def _optimizer_s(known: Mapping[str, Any]) -> list[tuple[float, float]]:
    steps = known["config"].get("measure", {}).get("steps_per_window")
    windows = known["window_counters"] if steps else []
    told = [one for one in windows if {"optimizer_s", "optimizer_wait_s"} <= one.keys()]
    return [(one["optimizer_s"] / steps, one["optimizer_wait_s"] / steps) for one in told]


def _gb(num_bytes: str) -> str:
    return f"{int(num_bytes.replace(',', '')) / 1e9:,.1f} GB"
