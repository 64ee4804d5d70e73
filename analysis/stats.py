"""Estimates from windows: a value with a Student t interval on the logarithm of its windows.

Invariant: the same windows give the same interval on every machine; fewer than three windows give no interval rather than a
narrow one. A window is one sample (see sweeps.bench); cells run in separate processes, so windows of two systems are not paired.
Windows are few (3 to 5), so the quantile is t's: resampling so few windows would give intervals far too narrow. The logarithm
makes an interval of a quotient as simple as that of a speed, and keeps both positive.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
MIN_WINDOWS = 3
"""Fewer windows give no interval: with two, t has one degree of freedom and the interval says nothing."""

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
    """A value and its 95% t interval; `lo` and `hi` are None when fewer than three windows were measured."""

    value: float
    lo: float | None = None
    hi: float | None = None
    num_samples: int = 1

    @property
    def has_interval(self) -> bool:
        """Whether enough windows stand behind the value for an interval."""
        return self.lo is not None and self.hi is not None

    def excludes(self, value: float) -> bool:
        """True when the interval lies wholly on one side of `value`; False without an interval."""
        return self.lo is not None and self.hi is not None and not self.lo <= value <= self.hi


def t_quantile(degrees_of_freedom: int) -> float:
    """97.5% quantile of Student's t; the normal's beyond the table."""
    assert degrees_of_freedom >= 1, "an interval needs at least one degree of freedom"
    return T_QUANTILES[degrees_of_freedom - 1] if degrees_of_freedom <= len(T_QUANTILES) else NORMAL_QUANTILE


def throughput(tokens_per_s: float | None, step_s: Sequence[float]) -> Estimate | None:
    """Tokens/s as the row states it, with the interval that its windows give; None where it was not measured.

    The interval is `value * exp(+-t * se)`, se that of the mean of log(step_s), t with one degree less than windows.
    """
    if tokens_per_s is None or not math.isfinite(tokens_per_s):
        return None
    if len(step_s) < MIN_WINDOWS:
        return Estimate(value=tokens_per_s, num_samples=len(step_s))
    return _around(tokens_per_s, math.sqrt(_squared_error(step_s)), len(step_s) - 1, len(step_s))


def ratio(
    tokens_per_s: float | None, step_s: Sequence[float], over_tokens_per_s: float | None, over_step_s: Sequence[float]
) -> Estimate | None:
    """How many times as fast the first system is as the second; None unless both were measured.

    The value is the quotient of the two printed speeds; the interval is Welch's on the difference of the mean logs, with the
    degrees of freedom of Welch and Satterthwaite rounded down (never below one).
    """
    first, second = throughput(tokens_per_s, step_s), throughput(over_tokens_per_s, over_step_s)
    if first is None or second is None or second.value <= 0:
        return None
    value, num_samples = first.value / second.value, min(first.num_samples, second.num_samples)
    if num_samples < MIN_WINDOWS:
        return Estimate(value=value, num_samples=num_samples)
    errors = _squared_error(step_s), _squared_error(over_step_s)
    total = sum(errors)
    spread = errors[0] ** 2 / (len(step_s) - 1) + errors[1] ** 2 / (len(over_step_s) - 1)
    degrees = max(1, math.floor(total**2 / spread)) if spread > 0 else 1
    return _around(value, math.sqrt(total), degrees, num_samples)


def _squared_error(step_s: Sequence[float]) -> float:
    """Squared standard error of the mean of the logarithms."""
    return statistics.variance([math.log(second) for second in step_s]) / len(step_s)


def _around(value: float, error: float, degrees: int, num_samples: int) -> Estimate:
    factor = math.exp(t_quantile(degrees) * error)
    return Estimate(value=value, lo=value / factor, hi=value * factor, num_samples=num_samples)
