"""One group of comparable rows -> who stands where. Tables, figures and the sentence (analysis/verdict.py) all read it from here.

Rows of one configuration, measured in several repeats (measure.repeat), are one standing: their windows are pooled.
Invariant: only rows whose losses agree with the reference are ranked; the in-memory reference is the upper bound and is never
ranked. Where no reference ran at all, speeds are ranked and the note says that numerics were not checked.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pandas as pd

from analysis import stats, style
from analysis.stats import Estimate
from analysis.style import STATUS_LABELS, SYSTEMS
from sweeps.result import LOSS_TOLERANCE, REFERENCE, STAND_IN

BASELINE = "zero3"
AS_IT_IS = (None, "compiled", "tuned")
"""Presets that leave a system what its name says: its defaults, compiled or not, and what sweeps/tuner.py found."""
Number = TypeVar("Number", int, float)
REFUSAL = re.compile(r"needs ([\d,]+) bytes of (\w+) memory, allowed ([\d,]+)")
"""What sweeps/cell.py says of a cell without room."""
CPU_NOTE = "CPU speeds prove wiring and numerics; they say nothing about GPUs."


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
    ranked: bool = False
    best: bool = False
    variant: int = 0
    """Which look of its system it has in this group's figures (style.variants)."""
    common_steps: int | None = None
    """Steps that all measured rows of the group have losses of; None where all have the same number."""
    compared_steps: int | None = None
    """Steps whose losses were held against the reference's, where that is not all of them."""

    @property
    def measured(self) -> bool:
        """Whether the row carries a speed."""
        return self.status == "ok" and self.speed is not None

    @property
    def is_reference(self) -> bool:
        """Whether this is the in-memory system: the numerics reference and the upper bound."""
        return self.system == REFERENCE

    @property
    def stands_in(self) -> bool:
        """Whether others were held against this one because the in-memory system has no room (sweeps.result.compared)."""
        return self.system == STAND_IN and self.max_loss_difference == 0.0

    @property
    def differs(self) -> bool:
        """Whether the losses are known to disagree with the reference."""
        return self.agrees is False and not self.is_reference

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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The standings of one group, best first: reference, ranked by speed, numerics differ, not measured."""

    standings: list[Standing]
    baseline: Standing | None
    reference: Standing | None
    on_gpu: bool
    numerics_checked: bool

    @property
    def ranked(self) -> list[Standing]:
        """The ranked standings, fastest first."""
        return [standing for standing in self.standings if standing.ranked]


def compare(frame: pd.DataFrame) -> Comparison:
    """Standings of the rows of one group (`load.groups`); no row is dropped, repeats of one configuration are pooled."""
    configurations: dict[str, list[Standing]] = {}
    for record in frame.to_dict("records"):
        configurations.setdefault(str(record["configuration"]), []).append(standing_of(record))
    standings = [pooled(repeats) for repeats in configurations.values()]
    checked = any(standing.agrees is not None for standing in standings if not standing.is_reference)
    standings = [_ranked(standing, checked) for standing in standings]
    rivals = [one for one in standings if one.system == BASELINE and one.measured and not one.differs]
    baseline = _fastest([one for one in rivals if one.preset in AS_IT_IS] or rivals)
    best = _fastest([one for one in standings if one.ranked])
    standings = [replace(one, ratio=_ratio(one, baseline), best=one is best) for one in standings]
    standings = _numbered(standings)
    lengths = {len(one.losses) for one in standings if one.measured}
    if len(lengths) > 1:
        standings = [replace(one, common_steps=min(lengths)) for one in standings]
    references = [one for one in standings if one.losses and one.stands_in] + [o for o in standings if o.losses and o.is_reference]
    reference = references[-1] if references else None
    if reference is not None:
        standings = [_against(one, len(reference.losses)) for one in standings]
    return Comparison(
        standings=sorted(standings, key=_order),
        baseline=baseline,
        reference=reference,
        on_gpu=bool(frame["gpu"].notna().any()),
        numerics_checked=checked,
    )


def _gb(num_bytes: str) -> str:
    return f"{int(num_bytes.replace(',', '')) / 1e9:,.1f} GB"


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know beside the table: failures with reasons, disagreements, caveats, missing checks, CPU runs."""
    told = [
        f"{one.label}: {one.status_label}{f': {one.why}' if one.reason else ''}" for one in comparison.standings if not one.measured
    ]
    told += [
        f"{one.label}: numerics differ from the reference{_by(one)}; not ranked" for one in comparison.standings if one.differs
    ]
    told += [f"{one.label}: {one.caveat}" for one in comparison.standings if one.measured and one.caveat]
    told += [_prediction(one) for one in comparison.standings if one.measured and one.plan.get("window_step_s")]
    if not comparison.numerics_checked and comparison.ranked:
        told.append("No reference row: numerics were not checked.")
    told += [f"{one.label}: {one.reason}" for one in comparison.standings if one.measured and one.reason]
    if len({one.num_repeats for one in comparison.standings if one.measured}) > 1:
        told.append("Intervals of what was measured once tell of the windows of one run, not of other runs.")
    if comparison.baseline is None:
        told.append("No ratios: ZeRO-3 was not measured with agreeing losses.")
    if not comparison.on_gpu:
        told.append(CPU_NOTE)
    return told


def interval_text(estimate: Estimate) -> str:
    """`1.84x (95% interval 1.80 to 1.88)`, or only the value where too few windows were measured."""
    text = f"{estimate.value:.2f}x"
    return (
        f"{text} (95% interval {estimate.lo:.2f} to {estimate.hi:.2f})"
        if estimate.has_interval
        else f"{text} (too few windows for an interval)"
    )


def _prediction(standing: Standing) -> str:
    measured, predicted = statistics.mean(standing.step_s), standing.plan["window_step_s"]
    gap = f"{measured / predicted - 1:+.1%}".replace("-", "−")
    return f"{standing.label}: {measured:.3g} s a step, {gap} of the {predicted:.3g} s that its cost model had predicted."


def _by(standing: Standing) -> str:
    gap = standing.max_loss_difference
    return f" (max |Δloss| {gap:.1e}, allowed {LOSS_TOLERANCE:.0e})" if gap is not None else ""


def _ranked(standing: Standing, checked: bool) -> Standing:
    agreeing = standing.agrees is True if checked else True
    return replace(standing, ranked=standing.measured and not standing.is_reference and agreeing)


def _fastest(standings: list[Standing]) -> Standing | None:
    return max(standings, key=lambda one: one.speed.value if one.speed else 0.0, default=None)


def _ratio(standing: Standing, baseline: Standing | None) -> Estimate | None:
    if baseline is None or not standing.measured:
        return None
    if standing.system == baseline.system and standing.label == baseline.label:
        return Estimate(value=1.0, num_samples=len(standing.step_s))
    return stats.quotient(standing.speed, baseline.speed)


def _order(standing: Standing) -> tuple[int, float, int]:
    place = 0 if standing.is_reference else 1 if standing.ranked else 2 if standing.measured else 3
    listed = list(SYSTEMS).index(standing.system) if standing.system in SYSTEMS else len(SYSTEMS)
    return place, -standing.speed.value if standing.speed and standing.measured else 0.0, listed


def _against(standing: Standing, num_steps: int) -> Standing:
    """It, with the steps that were compared where some were not."""
    return replace(standing, compared_steps=num_steps) if num_steps < len(standing.losses) else standing


def _numbered(standings: list[Standing]) -> list[Standing]:
    """The same order, each with the look that its preset has beside the others of its system, in the order shown."""
    shown = sorted(range(len(standings)), key=lambda index: _order(standings[index]))
    families: dict[str, list[int]] = {}
    for index in shown:
        families.setdefault(standings[index].system, []).append(index)
    looks = {}
    for system, family in families.items():
        looks |= dict(zip(family, style.variants(system, [standings[index].preset for index in family]), strict=True))
    return [replace(one, variant=looks[index]) for index, one in enumerate(standings)]


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
        caveat=known.get("caveat"),
    )
