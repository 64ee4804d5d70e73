"""Parameters that are frozen, or that get no gradient, stay as they are, as torch.optim.AdamW
leaves them."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from baselines.model import initial_weights
from baselines.registry import build
from engine import Recipe
from engine.layout import pack
from tests.baselines.test_model import CPU, TINY
from tests.baselines.test_systems import make_spec
from tests.models import make_batch, make_engine, make_model, plain_loss

RECIPE = Recipe(lr=1e-2, weight_decay=0.5, clip_norm=0.5)
"""A decay and a clipping that would show."""
WHISPER = {
    "d_model": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_target_positions": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}
FROZEN = (
    "model.embed_tokens",
    "model.layers.0.",
    "model.layers.1.mlp.up_proj",
    "model.layers.2.mlp.down_proj",
    "model.norm",
)
PLACEMENTS = [
    {},
    {"keep_activations": 3, "device_optimizer": 5},
    {"checkpoint_interval": 2},
    {"offload_activations": 2, "late_moments": False},
    {"mlp_chunk": 5, "micro_batches": 2},
]


def frozen_model():
    model = make_model("qwen2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def unreached_model():
    """Whisper's decoder without an encoder: its cross attention is never called."""
    return make_model("whisper", **WHISPER)


def plainly_trained(model, num_steps, micro_batches):
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RECIPE.lr,
        betas=(RECIPE.beta1, RECIPE.beta2),
        eps=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
    )
    for step in range(num_steps):
        optimizer.zero_grad()
        plain_loss(model, make_batch(step, micro_batches=micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(make, monkeypatch, options):
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    micro_batches = options.pop("micro_batches", 1)
    model = make()
    if not hasattr(model.get_decoder().layers[0], "mlp"):
        options.pop("mlp_chunk", None)
    engine = make_engine(
        model, recipe=RECIPE, batch=make_batch(0, micro_batches=micro_batches), **options
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = plainly_trained(model, 3, micro_batches)
    for step in range(3):
        engine.train_step(make_batch(step, micro_batches=micro_batches))
    left = {name for name in before if torch.equal(expected[name], before[name])}
    assert len(left) >= 12
    for name, value in engine.parameters():
        # Attention hardly depends on its keys' bias where these rotate slowly: AdamW makes steps of
        # what rounding leaves.
        atol = 1e-4 if name.endswith("k_proj.bias") else 2e-5
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert torch.equal(value, before[name]) == (name in left)


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize("make", [frozen_model, unreached_model])
def test_training_is_torchs_own(make, options, monkeypatch):
    check(make, monkeypatch, dict(options))


def frozen_and_unreached_model():
    model = unreached_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".fc1." not in name)
    return model


@pytest.mark.slow
def test_compiled_it_is_too(monkeypatch):
    """A compiled backward says zero where there is no gradient; whether one is there is found out
    without it."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        "torch.compile", functools.partial(torch.compile, backend="aot_eager")
    )  # seconds, not minutes
    check(frozen_and_unreached_model, monkeypatch, {"compile": True})


def test_a_parameter_that_gets_a_gradient_in_some_steps_only_is_one_line():
    engine = make_engine(make_model("qwen2"))
    engine.train_step(make_batch(0))
    engine._decoder.templates[0].module.mlp.forward = lambda hidden: hidden
    with pytest.raises(
        ValueError,
        match=r"^model: model\.layers\.2\.mlp\.\w+\.weight gets a gradient in some steps only, .*; choose",
    ):
        engine.train_step(make_batch(1))


def test_nothing_to_train_is_one_line():
    with pytest.raises(
        ValueError,
        match=r"^model: got requires_grad=False on every parameter, allowed .*; call model",
    ):
        make_engine(make_model("qwen2").requires_grad_(False))


def test_stretches_join_neighbours_and_leave_out_the_rest():
    layout = pack([(name, torch.Size((100,))) for name in "abcd"])
    assert layout.stretches([True] * 4) == [slice(0, layout.numel)]
    assert layout.stretches([True, False, True, True]) == [slice(0, 128), slice(256, layout.numel)]
    assert layout.stretches([False] * 4) == []
    assert pack([]).stretches(()) == []


ERNIE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 0,
    "pad_token_id": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("system", ["in_memory", "megatrain", "fsdp2", "zero3"])
def test_what_the_library_freezes_stays_in_every_system(system, dtype):
    """ERNIE's router has a bias that the library adjusts in other ways than by gradients; here it
    starts off zero."""
    spec = dataclasses.replace(make_spec(TINY | ERNIE, dtype=dtype), recipe=RECIPE)
    spec = dataclasses.replace(
        spec, model=dataclasses.replace(spec.model, model_type="ernie4_5_moe")
    )
    weights = {name: value.clone() for name, value in initial_weights(spec.model, 0, dtype, CPU)}
    frozen = [name for name in weights if "e_score_correction_bias" in name]
    assert len(frozen) == 2
    for number, name in enumerate(frozen):
        weights[name] += torch.arange(4).view_as(weights[name]) + number + 1
    trained = build(system, spec)
    try:
        trained.setup(weights.items())
        trained.train_step(make_batch(0, seq_len=8))
        trained.drain()
        after = dict(trained.parameters())
    finally:
        trained.close()
    assert all(
        torch.equal(after[name], weights[name].float()) == (name in frozen) for name in weights
    )
