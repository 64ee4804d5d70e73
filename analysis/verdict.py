"""Who wins a comparison and by how much, in one sentence: over the table's baseline, and over the fastest rival if that is another.

Invariant: a ratio in words is one of the table's, or says whose it is; nobody wins by less than the interval of the ratio.
"""

from __future__ import annotations

from analysis import stats
from analysis.compare import Comparison, interval_text
from analysis.standing import Standing
from analysis.stats import Estimate


def sentence(comparison: Comparison) -> str:
    """One plain sentence: who wins and by how much, with the interval."""
    ranked = comparison.ranked
    if not ranked:
        return "No system but the reference was measured with agreeing losses, so none is ranked."
    best = ranked[0]
    if len(ranked) == 1:
        return f"Only {best.label} could be ranked: {_speed(best)} tokens/s."
    rival = next((one for one in ranked if one.system != best.system), None)
    base = comparison.baseline.label if comparison.baseline else None
    over = next((one for one in comparison.standings if one.label == base and one is not best), rival or ranked[1])
    others = [over] if rival is None or rival is over else [over, rival]
    ties = [one for one in others if _tied(_quotient(best, one))]
    told = [
        f"{best.label} and {one.label} cannot be told apart: {_against(best, one)}, ratio {interval_text(_quotient(best, one))}"
        for one in ties
    ]
    won = " and ".join(
        f"{interval_text(_quotient(best, one))} as fast as {one.label}{'' if one is over else ', the fastest rival'} "
        f"({_against(best, one)})"
        for one in others
        if one not in ties
    )
    if won:
        told.append(f"{best.label} is {won}" if ties else f"{best.label} is the fastest: {won}")
    return "; ".join(told) + "."


def _quotient(best: Standing, other: Standing) -> Estimate:
    quotient = stats.quotient(best.speed, other.speed)
    assert quotient is not None
    return quotient


def _tied(quotient: Estimate) -> bool:
    return quotient.has_interval and not quotient.excludes(1.0)


def _against(best: Standing, other: Standing) -> str:
    return f"{_speed(best)} tokens/s against {_speed(other)}"


def _speed(standing: Standing) -> str:
    assert standing.speed is not None
    return f"{standing.speed.value:,.0f}"
