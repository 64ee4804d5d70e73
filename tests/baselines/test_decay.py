"""recipe.decayed=matrices: norms and biases do not decay, in any system, and everything else is as it
was."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from baselines.model import initial_weights, materialise
from baselines.rival import adamw_groups
from baselines.system import SystemSpec, Unsupported
from engine import Recipe
from tests.baselines.test_baseline_parity import CPU, build, make_batch, make_spec, running, train
from tests.models import assert_same, make_engine
from tests.models import make_batch as engine_batch
from tests.models import train as train_engine
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow

STEPS = 20
RECIPE = Recipe(
    lr=1e-2,
    eps=1e-3,
    weight_decay=0.1,
    decayed="matrices",
    schedule="cosine",
    warmup_steps=3,
    total_steps=40,
)
"""An eps at which no rounding of a gradient near zero becomes a step."""


def spec_of(**recipe: Any) -> SystemSpec:
    return dataclasses.replace(make_spec(), recipe=dataclasses.replace(RECIPE, **recipe))


@functools.cache
def plainly(decayed: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """torch's own AdamW with two groups, in the obvious loop."""
    spec = spec_of(decayed=decayed)
    model = materialise(
        spec.model, spec.dtype, CPU, initial_weights(spec.model, 0, spec.dtype, CPU)
    )
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2]}]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups.append({"params": others, "weight_decay": RECIPE.weight_decay * (decayed == "all")})
    settings = {"eps": RECIPE.eps, "weight_decay": RECIPE.weight_decay, "foreach": False}
    optimizer = torch.optim.AdamW(groups, **settings)
    losses = []
    for step in range(STEPS):
        batch = make_batch(step, spec)
        logits = model(batch.tokens[0], use_cache=False).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[0].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["in_memory", "megatrain", "zero3", "zero2", "fsdp2"])
def test_every_system_decays_matrices_alone(name):
    expected, params = plainly("matrices")
    with running(name, spec_of()) as system:
        assert train(system, spec_of(), range(STEPS)) == pytest.approx(expected, rel=2e-6)
        found = dict(system.parameters())
    worst = {key: (found[key] - value).abs().max().item() for key, value in params.items()}
    others = plainly("all")[1]
    for key, value in params.items():
        assert worst[key] < 5e-6
        if value.ndim < 2:
            assert (others[key] - value).abs().max() > 1e-4, key


PLACEMENTS: list[dict[str, Any]] = [
    {"depth": 1, "streams": 1, "gradient_slabs": 2, "lanes": TwinLanes(seed=2)},
    {"device_optimizer": 3, "keep_activations": 2},
    {"device_optimizer": 6, "keep_activations": 4},
    {"optimizer_overlap": False, "checkpoint_interval": 2},
    {"late_moments": False, "lanes": TwinLanes(seed=3)},
    {"torch_adamw": True},
]


@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placement_changes_no_bit_where_matrices_alone_decay(models, dtype, clip_norm):
    recipe = dataclasses.replace(RECIPE, clip_norm=clip_norm)
    expected = train_engine(make_engine(models[dtype], recipe=recipe), 4)
    for placement in PLACEMENTS:
        assert_same(
            train_engine(make_engine(models[dtype], recipe=recipe, **placement), 4), expected
        )
    every = dataclasses.replace(recipe, decayed="all")
    others = train_engine(make_engine(models[dtype], recipe=every), 4)[1]
    assert any(not torch.equal(others[name], value) for name, value in expected[1].items())


def test_where_all_decays_a_block_is_updated_in_one_stretch(models):
    for decayed, most in (("all", 1), ("matrices", 8)):
        engine = make_engine(models[torch.float32], recipe=Recipe(decayed=decayed))
        engine.train_step(engine_batch(0))
        parts = engine.executor._parts
        assert max(map(len, parts.values())) == most, decayed
        for block, found in parts.items():
            lengths = [stretch.stop - stretch.start for _, stretch, _ in found]
            assert sum(lengths) == engine.work.layouts[block].numel


@pytest.mark.parametrize("name", ["in_memory", "zero3", "zero2"])
def test_two_groups_resume(name, tmp_path):
    spec = spec_of()
    with running(name, spec) as system:
        train(system, spec, range(3))
        system.save(tmp_path / "saved")
        expected = train(system, spec, range(3, 6))
    with running(name, spec, initial_weights(spec.model, 1, spec.dtype, CPU)) as system:
        system.resume(tmp_path / "saved")
        assert train(system, spec, range(3, 6)) == expected


def test_zenflow_says_that_it_takes_one_group():
    with pytest.raises(Unsupported, match=r"^ZenFlow .*recipe\.decayed is matrices, use all$"):
        build("zenflow", spec_of())


def test_where_all_decays_there_is_one_group():
    params = [torch.zeros(2, 2), torch.zeros(2)]
    assert adamw_groups(Recipe(), params) == [{"params": params}]
    bare = adamw_groups(Recipe(decayed="matrices"), params[1:])
    assert bare == [{"params": params[1:], "weight_decay": 0.0}]
