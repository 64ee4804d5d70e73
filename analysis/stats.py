"""Estimates from windows: a value with a seeded bootstrap interval.

Invariant: the same windows give the same interval on every machine; one window gives no interval rather than a narrow one.
A window is one sample (see sweeps.bench); cells run in separate processes, so windows of two systems are not paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_RESAMPLES = 10_000
SEED = 0

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value and its percentile-bootstrap interval; `lo` and `hi` are None when fewer than two windows were measured."""

    value: float
    lo: float | None = None
    hi: float | None = None
    num_samples: int = 1

    @property
    def has_interval(self) -> bool:
        """Whether at least two windows stand behind the value."""
        return self.lo is not None and self.hi is not None

    def excludes(self, value: float) -> bool:
        """True when the interval lies wholly on one side of `value`; False without an interval."""
        return self.lo is not None and self.hi is not None and not self.lo <= value <= self.hi


def median(samples: Sequence[float]) -> Estimate:
    """Median of at least one sample, with its interval."""
    array = _array(samples)
    lo, hi = _interval(_resampled(array, np.median, SEED)) if len(array) > 1 else (None, None)
    return Estimate(value=float(np.median(array)), lo=lo, hi=hi, num_samples=len(array))


def throughput(tokens_per_s: float | None, step_s: Sequence[float]) -> Estimate | None:
    """Tokens/s as the row states it, with the interval that its windows give; None where it was not measured.

    The statistic is tokens over seconds: with equal windows, tokens a step / mean(step_s).
    """
    if tokens_per_s is None or not np.isfinite(tokens_per_s):
        return None
    if len(step_s) < 2:
        return Estimate(value=tokens_per_s, num_samples=len(step_s))
    lo, hi = _interval(_speeds(tokens_per_s, step_s, SEED))
    return Estimate(value=tokens_per_s, lo=lo, hi=hi, num_samples=len(step_s))


def ratio(
    tokens_per_s: float | None, step_s: Sequence[float], over_tokens_per_s: float | None, over_step_s: Sequence[float]
) -> Estimate | None:
    """How many times as fast the first system is as the second; None unless both were measured.

    The value is the quotient of the two printed speeds; the interval resamples the windows of both independently.
    """
    first, second = throughput(tokens_per_s, step_s), throughput(over_tokens_per_s, over_step_s)
    if first is None or second is None or second.value <= 0:
        return None
    num_samples = min(first.num_samples, second.num_samples)
    if num_samples < 2:
        return Estimate(value=first.value / second.value, num_samples=num_samples)
    quotients = _speeds(first.value, step_s, SEED) / _speeds(second.value, over_step_s, SEED + 1)
    lo, hi = _interval(quotients)
    return Estimate(value=first.value / second.value, lo=lo, hi=hi, num_samples=num_samples)


def _speeds(tokens_per_s: float, step_s: Sequence[float], seed: int) -> Array:
    array = _array(step_s)
    return tokens_per_s * float(array.mean()) / _resampled(array, np.mean, seed)


def _array(samples: Sequence[float]) -> Array:
    assert len(samples) > 0, "a statistic of no samples"
    return np.asarray(samples, dtype=np.float64)


def _resampled(array: Array, statistic: Callable[..., Any], seed: int) -> Array:
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(array), size=(NUM_RESAMPLES, len(array)))
    return np.asarray(statistic(array[picks], axis=1), dtype=np.float64)


def _interval(resampled: Array) -> tuple[float, float]:
    lo, hi = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(lo), float(hi)
