"""baselines.model: skeletons cost no memory, weights are reproducible one by one, mistakes are one
line."""

from __future__ import annotations

import resource
import time

import pytest
import torch

from baselines.model import (
    build_skeleton,
    config_of,
    count_params,
    decoder_layers,
    initial_weights,
    materialise,
    num_params,
)
from baselines.model_check import require_runnable
from baselines.system import ModelSpec, Unsupported

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 96,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen2": ModelSpec(name="qwen2", model_type="qwen2", config=TINY),
    "qwen2-tied": ModelSpec(
        name="qwen2-tied", model_type="qwen2", config=TINY | {"tie_word_embeddings": True}
    ),
    "llama": ModelSpec(name="llama", model_type="llama", config=TINY),
    "mistral": ModelSpec(name="mistral", model_type="mistral", config=TINY),
    "gemma2": ModelSpec(
        name="gemma2",
        model_type="gemma2",
        config=TINY | {"head_dim": 8, "pad_token_id": None},
        attn_implementation="eager",
    ),
    "gpt2": ModelSpec(name="gpt2", model_type="gpt2", config=GPT2),
}
TIED = {"qwen2-tied", "gemma2", "gpt2"}


@pytest.mark.parametrize("family", FAMILIES)
def test_skeleton_keeps_the_tie_the_buffers_and_the_dtype(family):
    model = build_skeleton(FAMILIES[family], torch.bfloat16)
    assert all(param.is_meta == (param.ndim >= 2) for param in model.parameters())
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert all(
        buffer.dtype == torch.float32
        for name, buffer in model.named_buffers()
        if "inv_freq" in name
    )
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        family in TIED
    )
    assert model.training
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert len(decoder_layers(model)) == 2


def test_construction_patch_is_taken_back():
    build_skeleton(FAMILIES["llama"], torch.float32)
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_a_14b_skeleton_costs_neither_time_nor_memory():
    spec = ModelSpec(
        name="14b",
        model_type="qwen2",
        config={
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
        },
    )
    num_params(FAMILIES["qwen2"])
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    count = count_params(spec)
    assert count.total == 14_770_033_664
    assert count.largest == 152064 * 5120
    assert count.in_layers == 48 * count.largest_layer
    assert time.perf_counter() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_reproducible_alone_and_rounded_to_bf16(family):
    spec = FAMILIES[family]
    weights = initial_weights(spec, 3, torch.float32, CPU)
    once, again = dict(weights), dict(weights)
    assert list(once) == [
        name for name, _ in build_skeleton(spec, torch.float32).named_parameters()
    ]
    for name, value in once.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, weights[name])
        assert torch.equal(value, value.bfloat16().float())
    half = dict(initial_weights(spec, 3, torch.bfloat16, CPU))
    assert all(torch.equal(half[name].float(), value) for name, value in once.items())
    name = max(once, key=lambda key: once[key].numel())
    assert not torch.equal(once[name], initial_weights(spec, 4, torch.float32, CPU)[name])
    assert once[name].std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_materialised_model_holds_the_weights_and_runs(family):
    spec = FAMILIES[family]
    weights = initial_weights(spec, 0, torch.bfloat16, CPU)
    model = materialise(spec, torch.bfloat16, CPU, weights)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        family in TIED
    )
    for name, param in model.named_parameters():
        assert param.requires_grad
        assert torch.equal(param, weights[name])
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_materialise_refuses_other_weights():
    spec = FAMILIES["llama"]
    weights = dict(initial_weights(spec, 0, torch.float32, CPU))
    name, value = weights.popitem()
    with pytest.raises(ValueError, match=name):
        materialise(spec, torch.float32, CPU, weights.items())
    with pytest.raises(ValueError, match="shape"):
        materialise(spec, torch.float32, CPU, [(name, value[:1])])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ModelSpec(name="x", model_type="qwen22"), ["model.model_type", "'qwen22'", "qwen2"]),
        (
            ModelSpec(name="x", model_type="llama", config={"hiden_size": 8}),
            ["model.config.hiden_size", "8", "hidden_size"],
        ),
        (
            ModelSpec(name="x", model_type="llama", config={"hidden_size": "a"}),
            ["model.config", "hidden_size"],
        ),
        (
            ModelSpec(name="x", model_type="llama", config={"hidden_size": 30}),
            ["model.config", "multiple"],
        ),
        (
            ModelSpec(name="x", model_type="llama", attn_implementation="fast"),
            ["model.attn_implementation", "'fast'", "sdpa"],
        ),
        (
            ModelSpec(name="x", model_type="mixtral", config={"output_router_logits": True}),
            ["output_router_logits: got True"],
        ),
    ],
)
def test_mistakes_are_one_line(spec, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        config_of(spec)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (*words, "allowed"))


def test_attention_that_is_not_there():
    with pytest.raises(ValueError, match=r"model\.attn_implementation.*gemma2"):
        build_skeleton(
            ModelSpec(name="x", model_type="gemma2", config=TINY | {"head_dim": 8}), torch.float32
        )
    spec = ModelSpec(
        name="x", model_type="llama", config=TINY, attn_implementation="flash_attention_2"
    )
    with pytest.raises(Unsupported, match="flash_attention_2"):
        build_skeleton(spec, torch.float32)


def test_legacy_rope_keys_are_understood():
    config = config_of(ModelSpec(name="x", model_type="qwen2", config={"rope_theta": 123.0}))
    assert config.rope_parameters["rope_theta"] == 123.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_runs_is_not_refused(family):
    require_runnable(FAMILIES[family])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_attention_heads": 7}, "transformers says RuntimeError"),
        ({"num_attention_heads": 0}, r"model\.config\.num_attention_heads: got 0, allowed >= 1"),
        ({"num_key_value_heads": 3}, "transformers says"),
        ({"hidden_size": -32}, r"model\.config\.hidden_size: got -32"),
        ({"rms_norm_eps": float("nan")}, r"model\.config\.rms_norm_eps: got nan"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "KeyError: 'spiral'"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
            "transformers says TypeError",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "inv_freq is not finite"),
        ({"hidden_size": 3200000}, "allowed at most 10,000,000,000,000"),
    ],
    ids=str,
)
def test_nonsense_in_a_config_is_refused_in_one_line(settings, words):
    spec = ModelSpec(name="nonsense", model_type="qwen2", config=TINY | settings)
    with pytest.raises(ValueError, match=words) as error:
        require_runnable(spec)
    assert str(error.value).startswith("model.config")
    assert "\n" not in str(error.value)


def test_the_library_s_own_names_are_known():
    with pytest.raises(ValueError, match=r"model\.config\.n_head: got 0, allowed >= 1"):
        require_runnable(ModelSpec(name="gpt2", model_type="gpt2", config=GPT2 | {"n_head": 0}))


def test_a_model_larger_than_any_memory_is_counted():
    wide = {
        "hidden_size": 400_000,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
    }
    spec = ModelSpec(name="wide", model_type="llama", config=TINY | wide)
    require_runnable(spec)
    assert num_params(spec) > 640_000_000_000
