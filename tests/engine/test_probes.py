"""What a machine does in a second, as it is probed, and with how many threads AdamW then runs."""

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine import EngineConfig, Machine, MegaTrain, Ranks, Recipe
from engine.adamw import AdamW, Pass
from engine.planner import rates as probing
from engine.planner.planner import Planner
from tests.models import H200, make_engine, make_model


def test_a_link_that_is_slow_at_first_is_probed_until_it_is_not() -> None:
    done: list[int] = []

    def copy() -> None:
        done.append(1)
        time.sleep(0.02 if len(done) <= probing.COPY_ROUNDS + 1 else 0.001)

    assert probing._fastest(copy) < 0.01


def test_adamw_s_rate_is_that_of_the_block_it_is_probed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that takes a moment more than its bytes, whatever its size, is slower on a small
    block. It is timed on a thread that is not this one, as the lane of a run."""
    wait, step, done, threads = 0.02, AdamW.step, list[Any](), set[int]()

    def slower(*args: Any, taken: Pass, **options: Any) -> None:
        time.sleep(wait)
        step(*args, taken=taken, **options)
        done.append(taken)
        threads.add(threading.get_ident())

    monkeypatch.setattr(AdamW, "step", slower)
    monkeypatch.setattr(probing, "UPDATED", 3 << 12)
    for numel, rounds in ((1 << 10, 12), (1 << 12, 3)):
        done.clear()
        updates = probing._updates(numel, AdamW(Recipe(), num_threads=1))
        rates = probing._params_per_s(numel, updates)
        assert all(numel / wait / 2 < rate <= numel / wait for rate in rates)
        assert done == [Pass.BOTH, Pass.WEIGHTS, Pass.MOMENTS] * (1 + rounds)
    assert threading.get_ident() not in threads


def test_adamw_is_probed_on_a_layer_within_bounds_and_about_as_often() -> None:
    for layer, probed in ((1, 1 << 26), (77 << 20, 77 << 20), (262 << 20, 1 << 28)):
        assert probing.block_numel(layer) == probed
        assert probing.UPDATED * 3 // 4 < probing.UPDATED // probed * probed <= probing.UPDATED


def test_adamw_runs_with_the_threads_that_were_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all updates together, of which one alone may say otherwise."""
    seconds = {
        62: {Pass.BOTH: 0.001, Pass.WEIGHTS: 0.020, Pass.MOMENTS: 0.001},
        31: {Pass.BOTH: 0.003, Pass.WEIGHTS: 0.005, Pass.MOMENTS: 0.004},
    }

    def step(self: AdamW, *_: Any, taken: Pass, **__: Any) -> None:
        time.sleep(seconds[self.num_threads][taken])

    monkeypatch.setattr(AdamW, "step", step)
    monkeypatch.setattr(probing, "UPDATED", 3 << 10)
    for tried, fastest in (([62, 31], 31), ([31, 62], 31), ([62], 62)):
        optimizer = AdamW(Recipe(), num_threads=62)
        updates = probing._updates(1 << 10, optimizer)
        rates = probing._with_fastest(tried, optimizer, 1 << 10, updates)
        assert optimizer.num_threads == fastest, tried
        assert rates[1] == pytest.approx((1 << 10) / seconds[fastest][Pass.WEIGHTS], rel=0.5)


def chosen(num_threads: int, asked: int = 0, num_ranks: int = 1, **changes: Any) -> tuple[Any, int]:
    """The numbers of threads that are probed beside a GPU, and the one that AdamW then runs with,
    0 for all; 62 is slower than 31."""
    planner = make_engine(make_model())._planner
    planner = replace(
        planner,
        num_threads=num_threads,
        config=EngineConfig(num_threads=asked),
        machine=Machine(rates=replace(H200, peer_bytes=1e11, adamw_threads=31)),
        ranks=Ranks(count=num_ranks),
        **{"device": torch.device("cuda", 0)} | changes,
    )
    return planner._threads, planner.chosen.num_threads


def test_half_the_threads_are_tried_where_there_are_many() -> None:
    assert chosen(62) == ([62, 31], 31)
    assert chosen(probing.MANY_THREADS) == ([32], 0)
    assert chosen(40, asked=40) == ([40], 40)
    assert chosen(62, num_ranks=4) == ([62], 0)
    assert chosen(62, device=torch.device("cpu"))[1] == 0
    assert chosen(80) == ([80, 40], 0), "given rates of another machine"


def test_the_engine_runs_adamw_with_the_threads_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_three = property(lambda planner: replace(planner.config, num_threads=3))
    monkeypatch.setattr(Planner, "chosen", with_three)
    engine: MegaTrain = make_engine(make_model())
    assert engine.executor.optimizer.num_threads == 3


def test_a_probe_beside_other_work_is_the_mean_while_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "COPY_SECONDS", 0.2)
    seen: list[int] = []
    done: list[int] = []

    def other() -> None:
        time.sleep(0.001)
        done.append(1)

    def copy() -> None:
        time.sleep(0.02 if len(seen) % 2 else 0.04)
        seen.append(len(done))

    assert 0.03 <= probing._beside(other, copy) < 0.045
    assert seen[0] < seen[1] < seen[-1], "it did not stop in between"
    after = len(done)
    time.sleep(0.02)
    assert len(done) == after, "and stops with the probe"


def test_a_probe_whose_other_work_fails_says_so() -> None:
    with pytest.raises(OSError, match="gone"):
        probing._beside(partial(_raise, OSError("gone")), lambda: None)


def _raise(error: Exception) -> None:
    raise error
