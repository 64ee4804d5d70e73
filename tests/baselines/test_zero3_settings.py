"""Settings of ZeRO-3 that move weights and optimizer state between host and device: what DeepSpeed
makes of them, and the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from pathlib import Path

import pytest
import torch

from baselines.deepspeed.options import Zero3Options
from baselines.deepspeed.stage3 import on_device, smallest_ratio, sub_groups
from baselines.model import initial_weights, num_params
from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import Recipe
from tests.baselines import test_baseline_parity as parity
from tests.baselines.test_model import TINY
from tests.baselines.test_rivals import make_spec
from tests.baselines.test_systems import QWEN_14B
from tests.sweeps.test_config import composed

pytestmark = pytest.mark.slow


def test_sub_groups_are_those_that_deepspeed_makes():
    spec = SystemSpec(
        model=ModelSpec(name="m", model_type="qwen2", config=TINY),
        shape=Shape(batch_size=2, seq_len=8),
        recipe=Recipe(),
        options={"sub_group_size": 3000, "offload_ratio": 0.5},
    )
    expected = sub_groups(spec.model, 3000)
    assert len(expected) > 3
    assert sum(expected) == num_params(spec.model)
    system = build("zero3", spec)
    system.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
    try:
        assert [
            int(size) for size in system._engine.optimizer.fp16_partitioned_groups_flat_numel
        ] == expected
    finally:
        system.close()
    assert sub_groups(spec.model, 10**9) == [num_params(spec.model)]


@pytest.mark.parametrize("name", ["zero3", "zero3_twinflow"])
def test_a_closed_system_leaves_no_thread_of_its_group(name):
    """Each would wake a hundred times a second until the process ends."""
    spec = parity.make_spec()
    before = polling()
    with parity.running(name, spec) as system:
        parity.train(system, spec, range(2))
        assert polling() - before
    del system
    gc.collect()
    assert not polling() - before


def polling() -> set[str]:
    """Threads of this process that wait for Gloo's sockets."""
    found = set()
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            if name.read_text().startswith("gloo_tcp"):
                found.add(str(name))
    return found


@pytest.mark.parametrize(("preset", "kept"), [("zero3_optimizer", True), ("zero3", False)])
def test_the_optimizer_preset_fetches_every_parameter_once_a_step(monkeypatch, preset, kept):
    """After the update, and not in the forward or the backward. The first step records in which
    order parameters are used."""
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    fetched = []

    def noting(kind):
        def fetch(params):
            fetched.extend(params if isinstance(params, list) else [params])
            return kind(params)

        return fetch

    for name in ("NoGatherHandle", "NoGatherCoalescedHandle"):
        monkeypatch.setattr(partition_parameters, name, noting(getattr(partition_parameters, name)))
    spec = parity.make_spec(torch.bfloat16)
    options = {}
    if not kept:  # a tiny model is within the defaults
        options = {"param_persistence_threshold": 0, "max_live_parameters": 1}
        monkeypatch.setattr("baselines.deepspeed.options.REUSE_DISTANCE", 0)
    with parity.running(preset, dataclasses.replace(spec, options=options)) as system:
        parity.train(system, spec, range(3))
        fetched.clear()
        parity.train(system, spec, range(3, 4))
        statuses = {param.ds_status for _, param in system._named}
        assert (len(fetched) == len(system._named)) == kept
        assert statuses == {ZeroParamStatus.AVAILABLE if kept else ZeroParamStatus.NOT_AVAILABLE}


def test_plan_of_parameters_that_stay_on_the_device_has_them_in_both_places():
    spec = make_spec(QWEN_14B, param_persistence_threshold=10**12)
    plan, total = build("zero3", spec).plan(), num_params(spec.model)
    assert plan.device["weights"] == plan.host["weights"] == 2 * total
    assert build("zero3", make_spec(QWEN_14B)).plan().device["weights"] < 0.2 * total


def test_the_ratio_counts_sub_groups():
    assert on_device([5, 4, 3, 2, 1], 0.6) == [5, 4]
    assert on_device([5, 4, 3, 2, 1], 1.0) == []
    assert on_device([5], 0.1) == []


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (99, 0), (100, 1), (163, 1), (164, 2), (10**9, 4)]
)
def test_the_smallest_ratio_fills_the_room_but_for_the_last_sub_group(room, kept):
    groups = [5, 4, 3, 2, 1]
    assert on_device(groups, smallest_ratio(groups, room)) == groups[:kept]


def test_the_twinflow_preset_fills_the_device_it_plans_for():
    memory, total = 140 * 10**9, num_params(make_spec(QWEN_14B).model)
    options = composed("system=zero3_twinflow").options
    spec = dataclasses.replace(make_spec(QWEN_14B, **options), device_memory=memory)
    plan = build("zero3", spec).plan()
    assert plan.device["weights"] == 2 * total
    assert 0.9 * memory < plan.device_bytes <= 0.94 * memory
    assert (
        "optimizer"
        not in build("zero3", dataclasses.replace(spec, device_memory=50 * 10**9)).plan().device
    )


@pytest.mark.parametrize("preset", ["", "_compiled", "_kept"])
def test_twinflow_copies_the_cpus_updates_through_huge_pages(preset):
    assert composed(f"system=zero3_twinflow{preset}").process.huge_pages
    assert not composed("system=zero3").process.huge_pages


def test_twinflow_moves_optimizer_state_from_host_to_device():
    plans = [
        build("zero3", make_spec(QWEN_14B, sub_group_size=10**8, offload_ratio=r)).plan()
        for r in (1.0, 0.8)
    ]
    kept = sum(on_device(sub_groups(make_spec(QWEN_14B).model, 10**8), 0.8))
    assert 0.15 < kept / num_params(make_spec(QWEN_14B).model) < 0.25
    less = {kind: size - plans[1].host[kind] for kind, size in plans[0].host.items()}
    staging = less.pop("staging")  # what pinned gradients were rounded up by goes with them
    assert sum(less.values()) == 16 * kept
    assert 0 < staging < 4 * kept
    assert "optimizer" not in plans[0].device
    assert 16 * kept < plans[1].device["optimizer"] < 18 * kept
    assert (
        not build("zero3", make_spec(device="cpu", sub_group_size=1000, offload_ratio=0.5))
        .plan()
        .device.get("optimizer")
    )
    offload = Zero3Options(offload_ratio=0.8).config(make_spec())["zero_optimization"][
        "offload_optimizer"
    ]
    assert offload == {"device": "cpu", "pin_memory": True, "ratio": 0.8}


def test_setting_up_says_that_operators_are_built_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    system = build("zero3", make_spec())
    assert system.setup_phase.startswith("setup, building DeepSpeed's operators first")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert system.setup_phase == "setup"
