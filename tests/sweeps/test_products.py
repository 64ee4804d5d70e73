"""Every product of a model is measured with the operations that it has; a wrong model is one line."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import Widths
from sweeps import products

WIDTHS = Widths(hidden=32, inner=48, queries=32, keys=16, vocab=96, heads=4)


def test_operations_are_those_that_torch_counts() -> None:
    counted = 0
    for name, part, flops, work in products.works(WIDTHS, 2, 16, 8, torch.device("cpu")):
        if name == "attention":  # on the CPU a kernel of its own, which torch does not count
            assert flops == 2.0 * 2 * 32 * 16**2 * (2.5 if part == "backward" else 1.0)
            work()
            continue
        with FlopCounterMode(display=False) as counter:
            work()
        assert counter.get_total_flops() == flops, (name, part)
        counted += 1
    assert counted == 3 * 8


def test_the_command_prints_a_line_a_product_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["model=tiny", "shape.batch_size=1"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["products"]
    assert len(lines) == len(found) == 3 * 8 + 2
    assert head.split()[:2] == ["product", "part"]
    assert all(one["sustained_tflops"] > 0 < one["burst_tflops"] for one in found)
    assert {one["throttle_reasons"] for one in found} == {None}


def test_what_held_the_clock_down_stands_in_the_line() -> None:
    about = {"sm_mhz": 1480.0, "power_w": 699.6, "throttle_reasons": {"sw_power_cap": 0.75}}
    numbers = {"gflop": 840.3, "burst_tflops": 794.0, "sustained_tflops": 668.2}
    line = products.line_of(SimpleNamespace(name="gate", part="forward", **numbers, **about))
    assert line.split() == [
        "gate",
        "forward",
        "840.3",
        "794",
        "668.2",
        "1480",
        "699.6",
        "sw_power_cap",
        "75%",
    ]


def test_a_wrong_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["model=tni"]) == 2
    assert capsys.readouterr().err.startswith("model: got 'tni', allowed ")
