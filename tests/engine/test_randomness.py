"""A forward that draws random numbers is refused: found by the generators, whatever the setting is
called."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baselines.model import config_of
from baselines.registry import build
from baselines.system import ModelSpec
from engine import MegaTrain, RefusedError
from engine.layers import rehearsal
from engine.layers.randomness import refuse_random
from tests.baselines.test_model import TINY
from tests.baselines.test_systems import make_spec
from tests.models import make_batch, make_engine, make_model

NONE = {"dropout": 0.0, "attention_dropout": 0.0}
EXPERTS = {"num_local_experts": 4}
QUIET = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
XGLM = {"d_model": 32, "ffn_dim": 64, "num_layers": 3, "attention_heads": 4, "layerdrop": 0.0}
GPT = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.1,
}
DRAWING = {
    "phimoe": (
        "phimoe",
        EXPERTS,
        "PhimoeDecoderLayer draws random numbers (router_jitter_noise=0.01)",
    ),
    "phimoe-quiet": (
        "phimoe",
        EXPERTS | QUIET,
        "PhimoeDecoderLayer draws random numbers in training",
    ),
    "mixtral": ("mixtral", EXPERTS | {"router_jitter_noise": 0.1}, "(jitter_noise=0.1)"),
    "starcoder2": (
        "starcoder2",
        {"residual_dropout": 0.3},
        "Starcoder2DecoderLayer draws random numbers (residual_dropout=0.3)",
    ),
    "starcoder2-before": (
        "starcoder2",
        {"embedding_dropout": 0.3},
        "Starcoder2ForCausalLM draws random numbers (embedding_dropout=0.3)",
    ),
    "doge": ("doge", {"hidden_dropout": 0.3}, "(hidden_dropout=0.3)"),
    "xglm": ("xglm", XGLM | NONE | {"activation_dropout": 0.2}, "(activation_dropout=0.2)"),
    "gpt_bigcode": ("gpt_bigcode", GPT, "attn_pdrop=0.1"),
}


REFUSED = r"^model\.config: the forward of .* allowed is .*; set [^\n]*$"


def engine_that_draws(name: str, kept: int = 0) -> MegaTrain:
    model_type, settings, _ = DRAWING[name]
    dtype = torch.bfloat16 if name == "phimoe-quiet" else torch.float32
    model = make_model(model_type, attention="eager", dtype=dtype, **settings)
    return make_engine(model, keep_activations=kept)


@pytest.mark.parametrize("name", sorted(set(DRAWING) - {"starcoder2-before"}))
def test_layers_that_draw_are_refused_when_the_engine_is_made(name):
    with pytest.raises(RefusedError, match=REFUSED) as caught:
        engine_that_draws(name)
    assert DRAWING[name][2] in str(caught.value)


@pytest.mark.parametrize("kept", [0, 3], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", DRAWING)
def test_the_first_step_refuses_what_was_not_seen_before(name, kept, monkeypatch):
    monkeypatch.setattr(rehearsal._Drawing, "__torch_dispatch__", unseen)
    engine = engine_that_draws(name, kept)
    before = dict(engine.parameters())
    with pytest.raises(RefusedError, match=REFUSED) as caught:
        engine.train_step(make_batch(0))
    assert DRAWING[name][2] in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in engine.parameters())


def unseen(mode, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))


def test_the_generators_are_left_alone(models):
    engine, state = make_engine(models[torch.float32]), torch.get_rng_state()
    engine.train_step(make_batch(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_only_a_compiler_draws_is_no_refusal():
    module, device = torch.nn.Linear(2, 2), torch.device("cpu")
    assert refuse_random(module, device, lambda: torch.rand(3), again=lambda: None).shape == (3,)
    with pytest.raises(ValueError, match="the forward of Linear draws random numbers in training"):
        refuse_random(module, device, lambda: torch.rand(3))


@pytest.mark.parametrize("system", ["in_memory", "megatrain"])
def test_no_system_of_the_bench_takes_a_type_that_draws_whatever_is_set(system):
    with pytest.raises(
        ValueError, match=r"^model\.\w+: .* draws random numbers [^\n]* choose [^\n]*$"
    ):
        build(
            system,
            dataclasses.replace(
                make_spec(), model=ModelSpec(name="m", model_type="phimoe", config=TINY | EXPERTS)
            ),
        )


def test_the_bench_sets_every_dropout_and_jitter_to_0():
    config = config_of(
        ModelSpec(
            name="m", model_type="mixtral", config=TINY | EXPERTS | {"router_jitter_noise": 0.1}
        )
    )
    assert config.router_jitter_noise == 0
