"""One group of comparable rows -> who stands where. Tables, figures and the sentence (analysis/verdict.py) all read it from here.

Rows of one configuration, measured in several repeats (measure.repeat), are one standing: their windows are pooled.
Invariant: only rows whose losses agree with the reference are ranked; the in-memory reference is never ranked. Where no reference
ran at all, speeds are ranked and the note says that numerics were not checked, and how far the losses lie apart.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import zip_longest

import pandas as pd

from analysis import stats, style
from analysis.standing import Standing, pooled, standing_of
from analysis.stats import Estimate
from analysis.style import SYSTEMS
from sweeps.identity import comparison_key
from sweeps.result import LOSS_TOLERANCE

BASELINE = "zero3"
AS_IT_IS = (None, "compiled", "kept", "kept compiled", "tuned", "tuned kept")
"""Presets that leave a system what its name says: its defaults, compiled or not, recomputing every layer or only those without
room, and what sweeps/tuner.py found."""
PLACED = {
    "device_blocks": "weights and optimizer state of {} blocks on the device",
    "kept_layers": "activations of {} layers kept",
    "offloaded_layers": "of {} layers sent to the host and back",
}
"""`placement` of a row's plan (sweeps.result.Row) in words."""
CPU_NOTE = "CPU speeds prove wiring and numerics; they say nothing about GPUs."


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The standings of one group, best first: reference, ranked by speed, numerics differ, not measured."""

    standings: list[Standing]
    baseline: Standing | None
    reference: Standing | None
    on_gpu: bool
    numerics_checked: bool
    spread: tuple[float, int] | None = None
    """Largest gap between the losses of any two measured rows at one step, nats per token, and the steps that more than one ran;
    None where fewer than two were measured, or not all from the same batches and recipe."""

    @property
    def ranked(self) -> list[Standing]:
        """The ranked standings, fastest first."""
        return [standing for standing in self.standings if standing.ranked]


def compare(frame: pd.DataFrame) -> Comparison:
    """Standings of the rows of one group (`load.groups`); no row is dropped, repeats of one configuration are pooled."""
    configurations: dict[str, list[Standing]] = {}
    for record in frame.to_dict("records"):
        configurations.setdefault(str(record["configuration"]), []).append(standing_of(record))
    standings = _held([pooled(repeats) for repeats in configurations.values()])
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
    references = [one for one in reversed(standings) if one.losses and (one.is_reference or one.stands_in)]
    reference = max(references, key=_primacy, default=None)
    if reference is not None:
        standings = [_against(one, len(reference.losses)) for one in standings]
    return Comparison(
        standings=sorted(standings, key=_order),
        baseline=baseline,
        reference=reference,
        on_gpu=bool(frame["gpu"].notna().any()),
        numerics_checked=checked,
        spread=_spread(frame),
    )


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know beside the table: failures with reasons, disagreements, caveats, missing checks, CPU runs."""
    told = [
        f"{one.label}: {one.status_label}{f': {one.why}' if one.reason else ''}" for one in comparison.standings if not one.measured
    ]
    told += [
        f"{one.label}: numerics differ from the reference{_by(one)}; not ranked" for one in comparison.standings if one.differs
    ]
    told += [f"{one.label}: {one.caveat}" for one in comparison.standings if one.measured and one.caveat]
    told += [f"{one.label}: {one.missed}" for one in comparison.standings if one.missed]
    told += [f"{one.label}: {one.unsettled}" for one in comparison.standings if one.unsettled]
    told += [placed for one in comparison.standings if one.measured and (placed := _placement(one))]
    told += [f"{one.label}: {one.optimizer}." for one in comparison.standings if one.optimizer]
    told += [_prediction(one) for one in comparison.standings if one.measured and one.plan.get("window_step_s")]
    if not comparison.numerics_checked and comparison.ranked:
        told.append(" ".join(["No reference row: numerics were not checked.", *_apart(comparison.spread)]))
    told += [f"{one.label}: {one.reason}" for one in comparison.standings if one.measured and one.reason]
    if len({one.num_repeats for one in comparison.standings if one.measured}) > 1:
        told.append("Intervals of what was measured once tell of the windows of one run, not of other runs.")
    if comparison.baseline is None and len({one.system for one in comparison.standings}) > 1:
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


def _placement(standing: Standing) -> str | None:
    """What the system chose to keep on the device, or was told to; None where that is nothing."""
    placement = standing.plan.get("placement", {})
    told = [words.format(placement[name]) for name, words in PLACED.items() if placement.get(name)]
    return f"{standing.label}: {', '.join(told)}." if told else None


def _prediction(standing: Standing) -> str:
    measured, predicted = statistics.mean(standing.step_s), standing.plan["window_step_s"]
    gap = f"{measured / predicted - 1:+.1%}".replace("-", "−")
    form = "#.3g" if max(measured, predicted) < 100 else ".0f"
    return (
        f"{standing.label}: {measured:{form}} s a step, {gap} against the {predicted:{form}} s that its cost model had predicted."
    )


def _by(standing: Standing) -> str:
    gap = standing.max_loss_difference
    return f" (max |Δloss| {gap:.1e}, allowed {LOSS_TOLERANCE:.0e})" if gap is not None else ""


def _ranked(standing: Standing, checked: bool) -> Standing:
    agreeing = standing.agrees is True or standing.stands_in if checked else True
    return replace(standing, ranked=standing.measured and not (standing.is_reference or standing.fallback) and agreeing)


def _fastest(standings: list[Standing]) -> Standing | None:
    return max(standings, key=lambda one: one.speed.value if one.speed else 0.0, default=None)


def _ratio(standing: Standing, baseline: Standing | None) -> Estimate | None:
    if baseline is None or not standing.measured or standing.fallback:
        return None
    if standing.system == baseline.system and standing.label == baseline.label:
        return Estimate(value=1.0, num_samples=len(standing.step_s))
    return stats.quotient(standing.speed, baseline.speed)


def _order(standing: Standing) -> tuple[int, float, int]:
    place = 0 if standing.is_reference else 1 if standing.ranked else 2 if standing.measured else 3
    listed = list(SYSTEMS).index(standing.system) if standing.system in SYSTEMS else len(SYSTEMS)
    return place, -standing.speed.value if standing.speed and standing.measured else 0.0, listed


def _held(standings: list[Standing]) -> list[Standing]:
    """They, but who stands in with the very losses of a reference before it (in memory, then eager) was held against that one."""
    references = [one for one in standings if one.losses and (one.is_reference or one.stands_in)]
    references.sort(key=lambda one: (not one.is_reference, one.preset is not None))
    held = [one for place, one in enumerate(references) if any(_same_losses(one, first) for first in references[:place])]
    return [replace(one, stands_in=False) if any(one is each for each in held) else one for one in standings]


def _primacy(one: Standing) -> tuple[bool, bool]:
    """Others are held against plain training in memory, else against who stands in; a preset in memory is the last resort."""
    return one.is_reference and one.preset is None, one.stands_in


def _same_losses(one: Standing, other: Standing) -> bool:
    return all(mine == theirs for mine, theirs in zip(one.losses, other.losses, strict=False))


def _spread(frame: pd.DataFrame) -> tuple[float, int] | None:
    """As `Comparison.spread` has it."""
    rows = [row for row in frame.to_dict("records") if row["status"] == "ok" and row["losses"]]
    if len(rows) < 2 or not all(row["config"] for row in rows) or len({comparison_key(row["config"]) for row in rows}) > 1:
        return None
    steps = [[loss for loss in losses if loss is not None] for losses in zip_longest(*(row["losses"] for row in rows))]
    gaps = [max(losses) - min(losses) for losses in steps if len(losses) > 1]
    return max(gaps), len(gaps)


def _apart(spread: tuple[float, int] | None) -> list[str]:
    if spread is None:
        return []
    gap, num_steps = spread
    return [f"Losses lie within {gap:.1e} of one another over the {num_steps} steps that more than one ran."]


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
