"""Speeds, intervals and ratios: against scipy, a bootstrap, and what the committed rows are known
to say."""

import math
import random
import statistics

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import names, record, speeds, studies
from sweeps.result import Row
from tests.made_rows import curve, framed, row
from tests.sweeps.test_config import composed


def measured(repeat: int, system: str, step_s: list[float], **fields: object) -> Row:
    """A row of one repeat."""
    config = composed(f"system={system}", f"measure.repeat={repeat}").config
    return row(system, step_s, cell=f"{system}-{repeat}", config=config, losses=curve(10), **fields)


def lines_of(given: list[Row]):
    return speeds.lines(studies.assigned(framed(given))).set_index("system")


def test_one_cell_s_interval_is_t_s_on_the_logarithm_of_its_windows() -> None:
    windows = [2.0, 2.1, 1.95, 2.05]
    line = lines_of([row("zero3", windows)]).loc["zero3"]
    logs = np.log(windows)
    reach = stats.t.ppf(0.975, 3) * stats.sem(logs)
    assert line["tokens_per_s"] == pytest.approx(32 * 1024 * 4 / sum(windows))
    assert (line["lo"], line["hi"]) == pytest.approx(
        (line["tokens_per_s"] * math.exp(-reach), line["tokens_per_s"] * math.exp(reach))
    )


def test_a_ratio_s_interval_is_welch_s() -> None:
    one, two = [2.0, 2.1, 1.95, 2.05], [3.0, 3.3, 2.9, 3.05]
    lines = lines_of([row("megatrain", one), row("zero3", two)])
    found = speeds.ratio(lines.loc["megatrain"], lines.loc["zero3"])
    welch = stats.ttest_ind(-np.log(one), -np.log(two), equal_var=False)
    shift = math.log(found.value) - (np.mean(-np.log(one)) - np.mean(-np.log(two)))
    known = welch.confidence_interval(0.95)
    # The degrees of freedom are rounded down, which widens the interval a little.
    assert math.log(found.lo) == pytest.approx(known.low + shift, abs=0.02)
    assert math.log(found.lo) <= known.low + shift
    assert math.log(found.hi) >= known.high + shift


def test_repeats_of_one_configuration_are_one_line() -> None:
    given = [measured(1, "fsdp2", [4.0, 4.1, 4.2], agrees=True)]
    for repeat, (zero3, megatrain) in enumerate(
        [(3.0, 1.50), (3.1, 1.52), (3.2, 1.48), (3.1, 1.55)], 1
    ):
        given.append(
            measured(
                repeat,
                "zero3",
                [zero3, zero3 + 0.01, zero3 - 0.01],
                agrees=True,
                max_loss_difference=1e-4 * repeat,
            )
        )
        ran = (
            {"status": "timeout", "reason": "killed"}
            if repeat == 4
            else {"agrees": True, "peak_host_bytes": repeat * 10**9}
        )
        given.append(
            measured(
                repeat,
                "megatrain",
                [] if repeat == 4 else [megatrain, megatrain, megatrain + 0.02],
                **ran,
            )
        )
    lines = lines_of(given)
    zero3, megatrain = lines.loc["zero3"], lines.loc["megatrain"]
    assert list(lines["num_repeats"]) == [1, 4, 3]
    assert zero3["tokens_per_s"] == pytest.approx(32 * 1024 * 12 / sum(zero3["step_s"]))
    assert (zero3["num_samples"], zero3["degrees"], zero3["max_loss_difference"]) == (4, 3, 4e-4)
    assert (megatrain["num_failed"], megatrain["host_gb"]) == (1, 3.0)
    found = speeds.ratio(megatrain, zero3)
    assert found.lo > 1.9


def test_two_windows_or_two_repeats_give_no_interval() -> None:
    assert math.isnan(speeds.speed([10.0], [[1.0, 1.1]])["lo"])
    two = speeds.speed([10.0, 12.0], [[1.0, 1.1, 1.2], [1.0, 1.1, 1.2]])
    assert two["tokens_per_s"] == pytest.approx(120 / 11)
    assert math.isnan(two["lo"])
    assert math.isnan(speeds.speed([], [])["tokens_per_s"])


def test_the_standard_error_is_that_of_the_hierarchical_bootstrap() -> None:
    """The closed form against twenty thousand two-stage resamples of four unlike repeats."""
    drawn = random.Random(3)
    logs = [
        [0.1 * repeat + drawn.gauss(0, 0.05 * repeat) for _ in range(3)] for repeat in (1, 2, 3, 4)
    ]
    means = []
    for _ in range(20_000):
        repeats = drawn.choices(logs, k=len(logs))
        means.append(
            statistics.fmean(
                statistics.fmean(drawn.choices(windows, k=len(windows))) for windows in repeats
            )
        )
    error = speeds.speed([1.0] * 4, [[math.exp(value) for value in windows] for windows in logs])[
        "error"
    ]
    assert error**2 * 3 / 4 == pytest.approx(statistics.pvariance(means), rel=0.03)


@pytest.mark.parametrize(("between", "within"), [(0.02, 0.005), (0.005, 0.02)])
def test_intervals_of_three_repeats_cover_the_truth(between: float, within: float) -> None:
    """Of 1000 draws of three repeats of three windows, at least 93% of the intervals hold the true
    speed 1 and ratio 2."""
    generator = np.random.default_rng(11)
    held = [0, 0]
    for _ in range(1000):
        pools = []
        for scale in (1.0, 2.0):
            windows = scale * np.exp(
                generator.normal(0, between, (3, 1)) + generator.normal(0, within, (3, 3))
            )
            pool = speeds.speed([1 / float(each.mean()) for each in windows], windows.tolist())
            pools.append(pool | {"rounds": frozenset(range(len(windows)))})
        found = speeds.ratio(*pools)
        held[0] += pools[0]["lo"] <= 1.0 <= pools[0]["hi"]
        held[1] += found.lo <= 2.0 <= found.hi
    assert min(held) >= 930


def test_the_committed_headline() -> None:
    """1.75x of three repeats each, in turns; and the ratios of two 7B runs."""
    lines = record.lines()
    mine = lines[lines["run"] == "2026-11-22_h200-64c_524bf9d0"].set_index("family")
    found = speeds.ratio(mine.loc["megatrain_fast"], mine.loc["zero3"])
    assert (found.value, found.lo, found.hi) == pytest.approx((1.7526, 1.591, 1.930), abs=6e-4)
    seven = lines[
        (lines["run"] == "2026-11-22_h200-32c_65ed26ba") & (lines["study"] == "vs_zero3_7b")
    ].set_index("family")
    found = speeds.ratio(seven.loc["megatrain_fast"], seven.loc["zero3"])
    assert (found.value, found.lo, found.hi) == pytest.approx((2.07, 2.01, 2.13), abs=6e-3)


def test_what_differs_is_not_comparable() -> None:
    lines = lines_of(
        [
            row("zero3", [3.0] * 3, agrees=True),
            row("zenflow", [1.0] * 3, agrees=False),
            row("fsdp2", status="oom_device"),
        ]
    )
    assert list(speeds.comparable(lines.reset_index())) == [True, False, False]


@pytest.mark.parametrize(("experiment", "held"), [("zero3_7b", False), ("float8", True)])
def test_float8_is_held_against_nothing_but_where_it_is_what_varies(
    experiment: str, held: bool
) -> None:
    given = [
        measured(repeat, "megatrain", [1.0 / repeat] * 3, agrees=True, experiment=experiment)
        for repeat in (1, 2)
    ]
    given[1].config["system"] |= {"products": "float8", "preset": "fast_float8"}
    lines = lines_of(given).reset_index()
    assert list(speeds.comparable(lines[lines["plain"]])) == [True]
    assert list(speeds.comparable(lines[~lines["plain"]])) == [held]


@pytest.mark.parametrize(
    ("ranks", "told"), [([1, 1], "one H200"), ([4, 4], "4 H200s"), ([1, 8, 2], "1 to 8 H200s")]
)
def test_a_machine_is_told_by_the_gpus_that_were_trained_on(ranks: list[int], told: str) -> None:
    details = {"gpu": "NVIDIA H200", "num_gpus": 8, "num_cores": 64}
    found = pd.DataFrame({"machine_details": [details] * len(ranks), "num_ranks": ranks})
    assert names.machine(found) == f"{told}, 64 cores"


def test_unlike_machines_are_told_together() -> None:
    details = [
        {"gpu": "NVIDIA H200", "num_cores": 32, "host_bytes": 270_334_464_000},
        {"gpu": "NVIDIA H100 80GB HBM3", "num_cores": 16, "host_bytes": 135_016_448_000},
        {"gpu": "NVIDIA H200", "num_cores": 16, "host_bytes": 137_438_953_472},
    ]
    found = pd.DataFrame({"machine_details": details, "num_ranks": 1})
    told = "one H100 or H200, 16 or 32 cores, 135 to 270 GB of host memory"
    assert names.machine(found) == told


def test_cores_of_a_host_that_a_process_was_kept_from_are_told() -> None:
    counts = [(16, None), (16, 16), (16, 64), (64, 64)]
    details = [{"num_cores": mine, "host_cores": there} for mine, there in counts]
    found = pd.DataFrame({"machine_details": details, "num_ranks": 1})
    assert names.machine(found[:2]) == "no GPU, 16 cores"
    assert names.machine(found[2:3]) == "no GPU, 16 of 64 cores"
    assert names.machine(found) == "no GPU, 16 or 16 of 64 or 64 cores"


@pytest.mark.parametrize(
    ("rounds", "told"),
    [
        ([1], "one round"),
        ([2], "two rounds"),
        ([3], ""),
        ([4, 3], ""),
        ([1, 1, 1], "one round in each run"),
        ([2, 1], "one or two rounds in each run"),
        ([1, 3, 3, 2], "three rounds in 2 of 4 runs"),
    ],
)
def test_few_rounds_are_told(rounds: list[int], told: str) -> None:
    """Rounds of one run make up for none that another lacks."""
    found = [speeds.Ratio(value=1.0, lo=1.0, hi=1.0, rounds=each) for each in rounds]
    assert speeds.few_rounds(found) == told


def test_a_round_counts_where_both_systems_ran_in_it() -> None:
    """Two repeats each, of which one is of the same round."""
    made = [
        row(
            system,
            [1.0] * 3,
            cell=f"{system}{repeat}",
            config=dict(composed(f"system={system}", f"measure.repeat={repeat}").config),
        )
        for system, repeats in (("megatrain", (1, 2)), ("zero3", (2, 3)))
        for repeat in repeats
    ]
    assigned = studies.assigned(framed(made)).assign(run="1")
    ours, theirs = (one for _, one in speeds.lines(assigned).iterrows())
    assert (ours["num_repeats"], theirs["num_repeats"]) == (2, 2)
    assert speeds.ratio(ours, theirs).rounds == 1
