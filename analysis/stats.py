"""Estimates from windows: a value with a Student t interval on the logarithm of its windows, or of its repeats.

Invariant: the same windows give the same interval on every machine; fewer than three windows (or repeats) give no interval rather
than a narrow one. A window is one sample (see sweeps.bench); cells run in separate processes, so windows of two systems are not
paired. The logarithm makes an interval of a quotient as simple as that of a speed, and keeps both positive.

Of a configuration that was measured in several repeats the repeats are the samples: windows of one process share whatever that
process met. The standard error is that of the hierarchical bootstrap (repeats with replacement, then windows within each; Davison &
Hinkley 1997, section 3.8), in closed form, so no resampling noise is left. Windows and repeats are few (3 to 5), so the quantile is
t's with the repeats' degrees of freedom: percentiles of so few resampled values would give intervals far too narrow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Run = tuple[float, Sequence[float]]
"""Tokens/s of one repeat, and the seconds a step of its windows."""
LEVEL = 0.95
MIN_SAMPLES = 3
"""Fewer windows, or repeats, give no interval: with two, t has one degree of freedom and the interval says nothing."""

# fmt: off
T_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)
# fmt: on
"""97.5% quantiles of Student's t for 1 to 30 degrees of freedom: the density integrated by Simpson's rule, then
bisected; a test integrates them again."""
NORMAL_QUANTILE = 1.9600
"""97.5% quantile of the normal, taken beyond 30 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value and its 95% t interval; `lo` and `hi` are None when fewer than three windows, or repeats, were measured."""

    value: float
    lo: float | None = None
    hi: float | None = None
    num_samples: int = 1
    """Windows of one repeat, or repeats."""
    error: float | None = None
    """Standard error of the logarithm."""
    degrees: int = 0
    """Degrees of freedom of `error`."""

    @property
    def has_interval(self) -> bool:
        """Whether enough samples stand behind the value for an interval."""
        return self.lo is not None and self.hi is not None

    def excludes(self, value: float) -> bool:
        """True when the interval lies wholly on one side of `value`; False without an interval."""
        return self.lo is not None and self.hi is not None and not self.lo <= value <= self.hi


def t_quantile(degrees_of_freedom: int) -> float:
    """97.5% quantile of Student's t; the normal's beyond the table."""
    assert degrees_of_freedom >= 1, "an interval needs at least one degree of freedom"
    return T_QUANTILES[degrees_of_freedom - 1] if degrees_of_freedom <= len(T_QUANTILES) else NORMAL_QUANTILE


def throughput(tokens_per_s: float | None, *repeats: Sequence[float]) -> Estimate | None:
    """Tokens/s as stated, with the interval that its windows give; None where it was not measured.

    repeats: the seconds a step of each window of each repeat. The samples are the windows of one repeat, or several repeats.
    """
    if tokens_per_s is None or not math.isfinite(tokens_per_s):
        return None
    num_samples = len(repeats) if len(repeats) > 1 else sum(map(len, repeats))
    if num_samples < MIN_SAMPLES:
        return Estimate(value=tokens_per_s, num_samples=num_samples)
    logs = [[math.log(second) for second in repeat] for repeat in repeats]
    if len(logs) == 1:
        squared = statistics.variance(logs[0]) / num_samples
    else:
        squared = _hierarchical(list(map(statistics.fmean, logs)), list(map(_squared_error, logs)))
    return _around(tokens_per_s, math.sqrt(squared), num_samples - 1, num_samples)


def pooled(repeats: Sequence[Run]) -> Estimate | None:
    """Tokens/s of one configuration from the (tokens/s, windows) of its repeats: all tokens over all seconds; None without any.

    Repeats train on the same batches, so that is the harmonic mean of their tokens/s.
    """
    if not repeats:
        return None
    return throughput(statistics.harmonic_mean([speed for speed, _ in repeats]), *[windows for _, windows in repeats])


def quotient(first: Estimate | None, second: Estimate | None) -> Estimate | None:
    """How many times as fast the first is as the second; None unless both were measured.

    The interval is Welch's on the difference of the mean logs, with the degrees of freedom of Welch and Satterthwaite rounded
    down (never below one).
    """
    if first is None or second is None or second.value <= 0:
        return None
    value, num_samples = first.value / second.value, min(first.num_samples, second.num_samples)
    if first.error is None or second.error is None:
        return Estimate(value=value, num_samples=num_samples)
    errors = first.error**2, second.error**2
    spread = errors[0] ** 2 / first.degrees + errors[1] ** 2 / second.degrees
    degrees = max(1, math.floor(sum(errors) ** 2 / spread)) if spread > 0 else 1
    return _around(value, math.sqrt(sum(errors)), degrees, num_samples)


def paired(rounds: Sequence[tuple[Run, Run]]) -> Estimate | None:
    """How many times as fast the first of every pair is as the second, over rounds that measured both; None without any.

    Of one round it is the `quotient`. Rounds are the samples where there are several: what a round met, it did to both.
    """
    if not rounds:
        return None
    first, second = (pooled(side) for side in zip(*rounds, strict=True))
    if len(rounds) == 1:
        return quotient(first, second)
    assert first is not None
    assert second is not None
    value = first.value / second.value
    if len(rounds) < MIN_SAMPLES:
        return Estimate(value=value, num_samples=len(rounds))
    logs = [[[math.log(second) for second in windows] for _, windows in both] for both in rounds]
    gaps = [statistics.fmean(one) - statistics.fmean(other) for one, other in logs]
    squared = _hierarchical(gaps, [_squared_error(one) + _squared_error(other) for one, other in logs])
    return _around(value, math.sqrt(squared), len(rounds) - 1, len(rounds))


def ratio(
    tokens_per_s: float | None, step_s: Sequence[float], over_tokens_per_s: float | None, over_step_s: Sequence[float]
) -> Estimate | None:
    """`quotient` of two cells of one repeat each, from their printed speeds and their windows."""
    return quotient(throughput(tokens_per_s, step_s), throughput(over_tokens_per_s, over_step_s))


def _hierarchical(means: Sequence[float], squared_errors: Sequence[float]) -> float:
    """Squared standard error of the mean over repeats of their windows' means: the two-stage bootstrap's variance.

    One draw takes a repeat (variance of the repeats' means) and the mean of as many of its windows as it has, with
    replacement (`_squared_error`); n draws are averaged. Times n / (n - 1), as for any bootstrap of n
    samples, or few repeats would look alike. Windows count twice, for the means vary with them too: on the safe side.
    """
    return (statistics.pvariance(means) + statistics.fmean(squared_errors)) / (len(means) - 1)


def _squared_error(windows: Sequence[float]) -> float:
    """Variance of the mean of as many of these as there are, drawn with replacement."""
    return statistics.pvariance(windows) / len(windows)


def _around(value: float, error: float, degrees: int, num_samples: int) -> Estimate:
    factor = math.exp(t_quantile(degrees) * error)
    return Estimate(value=value, lo=value / factor, hi=value * factor, num_samples=num_samples, error=error, degrees=degrees)
