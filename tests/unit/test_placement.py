"""The cost model that fills device memory: limits, monotony, and the choice against brute force."""

from dataclasses import replace

import pytest
import torch

from engine.layout import Layout, pack
from engine.placement import AUTO, Rates, choose, predicted_s
from engine.schedule import Pipeline


def layouts(num_layers: int = 8) -> list[Layout]:
    return [pack([("weight", torch.Size((1 << 20,)))]) for _ in range(num_layers + 2)]


PIPELINE = Pipeline(num_layers=8)
RATES = Rates(layer_flops=2 * (1 << 20) * 100 / 0.01, adamw_params=(1 << 20) / 0.02)
"""At 100 tokens: 10 ms a layer's forward, 20 ms a block's update."""


def bytes_of(pipeline: Pipeline) -> int:
    return 14 * pipeline.device_blocks + 5 * pipeline.kept_layers


def test_everything_on_the_host_waits_for_updates_and_recomputes():
    # The head is updated last, after 10 x 20 ms; the forward alone takes 80 ms; 80 ms of recomputation.
    assert predicted_s(PIPELINE, layouts(), 100, RATES) == pytest.approx(0.200 - 0.080 + 0.080)


def test_everything_on_the_device_costs_nothing():
    everything = replace(PIPELINE, device_blocks=10, kept_layers=8)
    assert predicted_s(everything, layouts(), 100, RATES) == pytest.approx(0)


def test_without_clipping_the_forward_waits_for_nothing():
    assert predicted_s(replace(PIPELINE, clip=False), layouts(), 100, RATES) == pytest.approx(0.080)


@pytest.mark.parametrize("budget", [0, 13, 14, 40, 60, 100, 179, 180, 10**6])
def test_the_choice_is_the_best_that_fits(budget):
    auto = replace(PIPELINE, device_blocks=AUTO, kept_layers=AUTO)
    chosen = choose(auto, layouts(), 100, RATES, budget=budget, device_bytes=bytes_of)
    assert bytes_of(chosen) <= budget
    for device_blocks in range(11):
        for kept in range(9):
            other = replace(PIPELINE, device_blocks=device_blocks, kept_layers=kept)
            if bytes_of(other) <= budget:
                assert predicted_s(chosen, layouts(), 100, RATES) <= predicted_s(other, layouts(), 100, RATES) + 1e-12


def test_a_number_given_is_kept():
    chosen = choose(replace(PIPELINE, kept_layers=AUTO, device_blocks=2), layouts(), 100, RATES, budget=50, device_bytes=bytes_of)
    assert (chosen.device_blocks, chosen.kept_layers) == (2, 4)


def test_nothing_fits_is_the_smallest_for_plan_to_refuse():
    auto = replace(PIPELINE, device_blocks=AUTO, kept_layers=AUTO)
    chosen = choose(auto, layouts(), 100, RATES, budget=-1, device_bytes=bytes_of)
    assert (chosen.device_blocks, chosen.kept_layers) == (0, 0)
