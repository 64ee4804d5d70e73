"""The frame -> one line a configuration and run, with its speed and interval; ratios of two lines.

Samples are the windows of a cell that was measured once, and the repeats of one that was measured
several times, for the windows of one process share whatever it met. Everything is on the logarithm,
so that a ratio's interval (Welch's) is as simple as a speed's. The standard error over repeats is
that of the hierarchical bootstrap in closed form (Davison & Hinkley 1997, section 3.8).

Invariant: fewer than three samples give no interval rather than a narrow one, and no ratio spans
two runs.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from sweeps.agreement import ADAPTERS, REFERENCE, repeat_of

FLOAT8 = "float8"
"""The experiment that varies what layers multiply in."""

LEVEL = 0.95
MIN_SAMPLES = 3
ENOUGH_ROUNDS = 3
"""What a ratio takes to stand without a word on its rounds."""
LINE = ["study", "run", "configuration", "family", "mode"]
"""What the repeats of one measurement share."""
LARGEST = ["device_gb", "host_gb", "max_loss_difference"]
MEAN = ["steady_tokens_per_s", "tflops_6p", "tflops_6p_causal", "tflops_paper", "mfu"]
MEAN += ["mfu_sustained"]
"""Columns of which repeats give the largest, and the harmonic mean; of the others the first."""


class Ratio(NamedTuple):
    """How many times as fast one line is as another; lo and hi are NaN without an interval.
    rounds: in how many rounds of their run both were measured."""

    value: float
    lo: float
    hi: float
    rounds: int

    @property
    def times(self) -> str:
        """`1.75x`."""
        return f"{self.value:.2f}x"

    @property
    def change(self) -> str:
        """`+9.8%`."""
        return percent(self.value - 1)

    @property
    def interval(self) -> str:
        """`1.59–1.93`; nothing where there is none."""
        return "" if pd.isna(self.lo) else f"{self.lo:.2f}–{self.hi:.2f}"

    def told(self, *, change: bool, about: str = "") -> str:
        """`1.75x (1.59–1.93)` or `+9.8% (+8.1% to +11.5%)`; in brackets `about` comes first."""
        head, interval = (self.times, self.interval)
        if change:
            head, interval = self.change, f"{percent(self.lo - 1)} to {percent(self.hi - 1)}"
        return head if pd.isna(self.lo) else f"{head} ({about}{interval})"


def few_rounds(found: Sequence[Ratio]) -> str:
    """In how many rounds the systems of these ratios, one a run, took turns: `one round`,
    `one round in each run`, `three rounds in 5 of 10 runs`; empty where each had ENOUGH_ROUNDS."""
    few = sorted({one.rounds for one in found if one.rounds < ENOUGH_ROUNDS})
    if not few:
        return ""
    runs = len(found)
    if enough := sum(one.rounds >= ENOUGH_ROUNDS for one in found):
        return f"three rounds in {enough} of {runs} runs"
    told = " or ".join({1: "one", 2: "two"}[rounds] for rounds in few)
    told += " round" if few[-1] == 1 else " rounds"
    return f"{told} in each run" if runs > 1 else told


def percent(change: float) -> str:
    """`+9.8%` with a true minus; `±0.0%` for less than is shown."""
    text = f"{change:+.1%}".replace("-", "−")
    return "±0.0%" if text[1:] == "0.0%" else text


def lines(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a configuration and run: tokens_per_s with lo, hi, error (of its log), degrees."""
    parts = [part for _, part in frame.groupby(LINE, sort=False, dropna=False)]
    pooled = pd.DataFrame([_pooled(part) for part in parts])
    first = frame.loc[pooled.pop("first")].reset_index(drop=True)
    return first.drop(columns=list(pooled), errors="ignore").join(pooled)


def _pooled(repeats: pd.DataFrame) -> dict[str, Any]:
    """What the repeats of one line say together, and the place of the first that was measured."""
    measured = repeats[(repeats["status"] == "ok") & repeats["tokens_per_s"].notna()]
    told = measured if len(measured) else repeats.tail(1)
    agreeing = told["agrees"].dropna()
    return {
        "first": told.index[0],
        "agrees": bool(agreeing.all()) if len(agreeing) else None,
        "joules_per_token": told["joules_per_token"].mean(),  # of equal work
        "cell_s": repeats["cell_s"].sum(min_count=1),
        "counters": _worst(list(told["counters"])),
        "reason": "; ".join(dict.fromkeys(filter(None, told["reason"]))),
        "num_repeats": len(measured),
        "rounds": frozenset(measured["config"].map(repeat_of)),
        "num_failed": len(repeats) - len(measured),
        **told[LARGEST].max(),
        **1 / (1 / told[MEAN].astype(float)).mean(),  # all work over all seconds
        **speed(list(measured["tokens_per_s"]), list(measured["step_s"])),
        "step_s": [second for windows in told["step_s"] for second in windows],
    }


def unsettled(line: Any) -> bool:
    """Whether every window of a line that ran once was faster than the one before, and the last by
    more than a little: its speed is too low."""
    windows = pd.Series(line["step_s"])
    faster = windows.is_monotonic_decreasing and windows.iloc[-1] < 0.98 * windows.mean()
    return bool(faster and line["num_repeats"] == 1)


def _worst(counters: list[Any]) -> dict[str, Any]:
    """Those of the first repeat, with the largest difference after a state was resumed."""
    apart = [one["resumed_difference"] for one in counters if "resumed_difference" in one]
    return {**counters[0], **({"resumed_difference": max(apart)} if apart else {})}


def speed(tokens_per_s: list[float], windows: list[list[float]]) -> dict[str, Any]:
    """Tokens/s of one configuration with its 95% t interval, from its repeats' and the step_s of
    their windows; NaN for what is not known."""
    value = float(stats.hmean(tokens_per_s)) if tokens_per_s else np.nan
    samples = len(windows) if len(windows) != 1 else len(windows[0])
    logs = [np.log(seconds) for seconds in windows]
    if samples < MIN_SAMPLES:
        error, degrees = np.nan, 0
    elif len(logs) == 1:
        error, degrees = float(stats.sem(logs[0])), samples - 1
    else:  # the spread of the repeats, and that of their windows
        squared = np.var([one.mean() for one in logs])
        squared += np.mean([one.var() / len(one) for one in logs])
        error, degrees = float(np.sqrt(squared / (samples - 1))), samples - 1
    factor = _factor(error, degrees)
    known = {"tokens_per_s": value, "lo": value / factor, "hi": value * factor}
    return known | {"error": error, "degrees": degrees, "num_samples": samples}


def _factor(error: float, degrees: float) -> float:
    """By how much a value with this standard error of its logarithm may be off; NaN for none."""
    return float(np.exp(stats.t.ppf((1 + LEVEL) / 2, degrees) * error))


def ratio(first: Any, base: Any) -> Ratio:
    """How many times as fast the first line is as `base`, with Welch's interval."""
    value = first["tokens_per_s"] / base["tokens_per_s"]
    squared = np.array([first["error"], base["error"]], float) ** 2
    with np.errstate(invalid="ignore"):  # neither varies
        spread = (squared**2 / [first["degrees"], base["degrees"]]).sum()
        degrees = np.fmax(1, np.floor(squared.sum() ** 2 / spread))
    factor = _factor(np.sqrt(squared.sum()), degrees)
    rounds = len(first["rounds"] & base["rounds"])
    return Ratio(value=value, lo=value / factor, hi=value * factor, rounds=rounds)


def steady(first: Any, base: Any) -> float:
    """The same of their steady rates; NaN where one of them has none."""
    return float(first["steady_tokens_per_s"] / base["steady_tokens_per_s"])


def ratios(pairs: Iterable[Sequence[Any]]) -> list[Ratio]:
    """Of each run's two lines, the least first; not where the windows of one were still getting
    faster."""
    return sorted(ratio(*pair) for pair in pairs if not any(map(unsettled, pair)))


def comparable(found: pd.DataFrame) -> pd.Series:
    """Which lines may be held against others: measured, not in a fallback, of equal losses and of
    the same function, but where that is what a study varies."""
    differs = found["agrees"].eq(False) & found["system"].ne("in_memory")
    same = ~differs & ~found["fallback"] & ~found["system"].isin(ADAPTERS)
    same &= found["plain"] | found["experiment"].eq(FLOAT8)
    return found["tokens_per_s"].notna() & same


def rivals(found: pd.DataFrame) -> pd.Series:
    """Which lines are another way to train than this engine, whose speed may be compared."""
    ours = found["family"].str.startswith("megatrain")
    return ~ours & ~found["system"].isin([REFERENCE, "published_megatrain"]) & comparable(found)


def fastest(found: pd.DataFrame) -> Any:
    """The line with the highest speed."""
    return found.sort_values("tokens_per_s", kind="stable").iloc[-1]
