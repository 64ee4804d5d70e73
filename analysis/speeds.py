"""The frame -> one line a configuration and run, with its speed and interval; ratios of two lines.

Samples are the windows of a cell that was measured once, and the repeats of one that was measured
several times, for the windows of one process share whatever it met. Everything is on the logarithm,
so that a ratio's interval (Welch's) is as simple as a speed's. The standard error over repeats is
that of the hierarchical bootstrap in closed form (Davison & Hinkley 1997, section 3.8).

Invariant: fewer than three samples give no interval rather than a narrow one, and no ratio spans
two runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from sweeps.agreement import ADAPTERS

LEVEL = 0.95
MIN_SAMPLES = 3
LINE = ["study", "run", "configuration", "family", "mode"]
"""What the repeats of one measurement share."""
LARGEST = ("device_gb", "host_gb", "max_loss_difference")
MEAN = ("tflops_6p", "tflops_6p_causal", "tflops_paper", "mfu")
"""Columns of which repeats give the largest, and the harmonic mean; of the others the first."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast one line is as another; lo and hi are None without an interval."""

    value: float
    lo: float | None
    hi: float | None

    @property
    def times(self) -> str:
        """`1.75x`."""
        return f"{self.value:.2f}x"

    @property
    def change(self) -> str:
        """`+9.8%`."""
        return percent(self.value - 1)

    @property
    def short(self) -> str:
        """`1.75x (1.59–1.93)`, as a title has room for."""
        return f"{self.times} ({self.interval()})" if self.lo is not None else self.times

    @property
    def short_change(self) -> str:
        """`+9.8% (+8.1% to +11.5%)`."""
        interval = self.interval(change=True)
        return f"{self.change} ({interval})" if interval else self.change

    def interval(self, *, between: str = "–", change: bool = False) -> str:
        """`1.59–1.93`, or as changes `−3.0% to +9.1%`; nothing where there is none."""
        if self.lo is None or self.hi is None:
            return ""
        if change:
            return f"{percent(self.lo - 1)} to {percent(self.hi - 1)}"
        return f"{self.lo:.2f}{between}{self.hi:.2f}"


def percent(change: float) -> str:
    """`+9.8%` with a true minus; `±0.0%` for less than is shown."""
    text = f"{change:+.1%}".replace("-", "−")
    return "±0.0%" if text[1:] == "0.0%" else text


def lines(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a configuration and run: tokens_per_s with lo, hi, error (of its log), degrees."""
    return pd.DataFrame(
        [_line(key, part) for key, part in frame.groupby(LINE, sort=False, dropna=False)]
    )


def _line(key: Any, repeats: pd.DataFrame) -> dict[str, Any]:
    measured = repeats[(repeats["status"] == "ok") & repeats["tokens_per_s"].notna()]
    told = measured if len(measured) else repeats.tail(1)
    line: dict[Any, Any] = told.iloc[0].to_dict() | dict(zip(LINE, key, strict=True))
    line |= {name: told[name].max() for name in LARGEST} | {
        name: _mean(told[name]) for name in MEAN
    }
    line |= speed(list(measured["tokens_per_s"]), list(measured["step_s"]))
    agreeing = told["agrees"].dropna()
    return line | {
        "agrees": bool(agreeing.all()) if len(agreeing) else None,
        "joules_per_token": told["joules_per_token"].mean(),  # of equal work
        "num_repeats": len(measured),
        "num_failed": len(repeats) - len(measured),
        "step_s": [second for windows in told["step_s"] for second in windows],
    }


def _mean(numbers: pd.Series) -> float | None:
    """The harmonic mean of repeats of equal work: all work over all seconds."""
    known = [float(value) for value in numbers.dropna()]
    return float(stats.hmean(known)) if known else None


def speed(tokens_per_s: list[float], windows: list[list[float]]) -> dict[str, Any]:
    """Tokens/s of one configuration, from its repeats' and the step_s of their windows."""
    if not tokens_per_s:
        return estimate(None, None, 0, 0)
    value = float(stats.hmean(tokens_per_s))
    samples = len(windows) if len(windows) > 1 else len(windows[0])
    if samples < MIN_SAMPLES:
        return estimate(value, None, 0, samples)
    logs = [np.log(seconds) for seconds in windows]
    if len(logs) == 1:
        error = float(stats.sem(logs[0]))
    else:
        error = _over_repeats([one.mean() for one in logs], [one.var() / len(one) for one in logs])
    return estimate(value, error, samples - 1, samples)


def _over_repeats(means: list[float], squared_errors: list[float]) -> float:
    """Standard error of the mean over repeats: their spread and that of their windows."""
    return float(np.sqrt((np.var(means) + np.mean(squared_errors)) / (len(means) - 1)))


def estimate(
    value: float | None, error: float | None, degrees: int, samples: int
) -> dict[str, Any]:
    """A value with its 95% t interval; lo and hi are None without an error."""
    found = {
        "tokens_per_s": value,
        "lo": None,
        "hi": None,
        "error": error,
        "degrees": degrees,
        "num_samples": samples,
    }
    if value is None or error is None:
        return found
    factor = float(np.exp(stats.t.ppf((1 + LEVEL) / 2, degrees) * error))
    return found | {"lo": value / factor, "hi": value * factor}


def ratio(first: Any, base: Any) -> Ratio:
    """How many times as fast the first line is as `base`, with Welch's interval."""
    value = first["tokens_per_s"] / base["tokens_per_s"]
    errors = first["error"], base["error"]
    if pd.isna(errors[0]) or pd.isna(errors[1]):
        return Ratio(value=value, lo=None, hi=None)
    squared = errors[0] ** 2, errors[1] ** 2
    spread = squared[0] ** 2 / first["degrees"] + squared[1] ** 2 / base["degrees"]
    degrees = max(1, int(sum(squared) ** 2 / spread)) if spread > 0 else 1
    found = estimate(value, float(np.sqrt(sum(squared))), degrees, 0)
    return Ratio(value=value, lo=found["lo"], hi=found["hi"])


def comparable(found: pd.DataFrame) -> pd.Series:
    """Which lines may be held against others: measured, not in a fallback, of equal losses and of
    the same function."""
    differs = found["agrees"].eq(False) & found["system"].ne("in_memory")
    same = ~differs & ~found["fallback"] & ~found["system"].isin(ADAPTERS)
    return found["tokens_per_s"].notna() & same


def fastest(found: pd.DataFrame) -> Any:
    """The line with the highest speed."""
    return found.sort_values("tokens_per_s", kind="stable").iloc[-1]
