"""One group of comparable rows -> who stands where. Tables, figures and the sentence all read it from here.

Invariant: only rows whose losses agree with the reference are ranked; the in-memory reference is the upper bound and is never
ranked. Where no reference ran at all, speeds are ranked and the note says that numerics were not checked.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis import stats
from analysis.stats import Estimate
from analysis.style import STATUS_LABELS, SYSTEMS
from sweeps.result import LOSS_TOLERANCE, REFERENCE, STAND_IN

BASELINE = "zero3"
CPU_NOTE = "CPU speeds prove wiring and numerics; they say nothing about GPUs."


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One row, ready to be shown. Bytes are integers, speeds are label tokens a second."""

    label: str
    system: str
    status: str
    reason: str
    speed: Estimate | None
    step_s: list[float]
    ratio: Estimate | None = None
    """Speed over the fastest ZeRO-3 row's; None without a ZeRO-3 row, or where that row's own numerics differ."""
    tflops: float | None
    mfu: float | None
    device_bytes: int | None
    host_bytes: int | None
    host_bytes_per_param: float | None
    plan_device_bytes: int | None
    plan_host_bytes: int | None
    final_loss: float | None
    losses: list[float]
    max_loss_difference: float | None
    agrees: bool | None
    caveat: str | None = None
    """What the system does otherwise than the recipe asks."""
    ranked: bool = False
    best: bool = False
    variant: int = 0
    """Place among the rows of the same system in this group, in the order shown: figures draw it by this."""

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
    """Standings of the rows of one group (`load.groups`); no row is dropped."""
    standings = [_standing(record) for record in frame.to_dict("records")]
    checked = any(standing.agrees is not None for standing in standings if not standing.is_reference)
    standings = [_ranked(standing, checked) for standing in standings]
    baseline = _fastest([one for one in standings if one.system == BASELINE and one.measured and not one.differs])
    best = _fastest([one for one in standings if one.ranked])
    standings = [replace(one, ratio=_ratio(one, baseline), best=one is best) for one in standings]
    standings = _numbered(standings)
    references = [one for one in standings if one.losses and one.stands_in] + [o for o in standings if o.losses and o.is_reference]
    return Comparison(
        standings=sorted(standings, key=_order),
        baseline=baseline,
        reference=references[-1] if references else None,
        on_gpu=bool(frame["gpu"].notna().any()),
        numerics_checked=checked,
    )


def sentence(comparison: Comparison) -> str:
    """One plain sentence: who wins and by how much, with the interval."""
    ranked = comparison.ranked
    if not ranked:
        return "No system but the reference was measured with agreeing losses, so none is ranked."
    best = ranked[0]
    speed = f"{_speed(best)} tokens/s"
    if len(ranked) == 1:
        return f"Only {best.label} could be ranked: {speed}."
    over = next((one for one in ranked[1:] if one.system == BASELINE), ranked[1])
    quotient = _ratio(best, over)
    assert quotient is not None
    against = f"{speed} against {_speed(over)}"
    if quotient.has_interval and not quotient.excludes(1.0):
        return f"{best.label} and {over.label} cannot be told apart: {against}, ratio {interval_text(quotient)}."
    return f"{best.label} is the fastest: {interval_text(quotient)} as fast as {over.label} ({against})."


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know beside the table: failures with reasons, disagreements, caveats, missing checks, CPU runs."""
    told = [
        f"{one.label}: {one.status_label}{f': {one.reason}' if one.reason else ''}"
        for one in comparison.standings
        if not one.measured
    ]
    told += [
        f"{one.label}: numerics differ from the reference{_by(one)}; not ranked" for one in comparison.standings if one.differs
    ]
    told += [f"{one.label}: {one.caveat}" for one in comparison.standings if one.measured and one.caveat]
    if not comparison.numerics_checked and comparison.ranked:
        told.append("No reference row: numerics were not checked.")
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


def _by(standing: Standing) -> str:
    gap = standing.max_loss_difference
    return f" (max |Δloss| {gap:.1e}, allowed {LOSS_TOLERANCE:.0e})" if gap is not None else ""


def _speed(standing: Standing) -> str:
    assert standing.speed is not None
    return f"{standing.speed.value:,.0f}"


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
    assert standing.speed is not None
    assert baseline.speed is not None
    return stats.ratio(standing.speed.value, standing.step_s, baseline.speed.value, baseline.step_s)


def _order(standing: Standing) -> tuple[int, float, int]:
    place = 0 if standing.is_reference else 1 if standing.ranked else 2 if standing.measured else 3
    listed = list(SYSTEMS).index(standing.system) if standing.system in SYSTEMS else len(SYSTEMS)
    return place, -standing.speed.value if standing.speed and standing.measured else 0.0, listed


def _numbered(standings: list[Standing]) -> list[Standing]:
    """The same order, each with its place among the rows of its system in the order in which they are shown."""
    shown = sorted(range(len(standings)), key=lambda index: _order(standings[index]))
    families: dict[str, list[int]] = {}
    for index in shown:
        families.setdefault(standings[index].system, []).append(index)
    return [replace(one, variant=families[one.system].index(index)) for index, one in enumerate(standings)]


def _standing(record: Mapping[Hashable, Any]) -> Standing:
    known = {str(key): value for key, value in record.items() if isinstance(value, list | dict) or not pd.isna(value)}
    step_s = [float(second) for second in known["step_s"]]
    return Standing(
        label=known["label"],
        system=known["system"],
        status=known["status"],
        reason=known.get("reason", ""),
        speed=stats.throughput(known.get("tokens_per_s"), step_s),
        step_s=step_s,
        tflops=known.get("tflops_6p"),
        mfu=known.get("mfu"),
        device_bytes=known.get("peak_device_bytes"),
        host_bytes=known.get("peak_host_bytes"),
        host_bytes_per_param=known.get("host_bytes_per_param"),
        plan_device_bytes=known.get("plan_device_bytes"),
        plan_host_bytes=known.get("plan_host_bytes"),
        final_loss=known.get("final_loss"),
        losses=known["losses"],
        max_loss_difference=known.get("max_loss_difference"),
        agrees=bool(known["agrees"]) if "agrees" in known else None,
        caveat=known.get("caveat"),
    )
