"""baselines.loss: the chunked loss is the library's loss, and one chunk of logits is alive at a
time."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from baselines.loss import CausalLMLoss
from baselines.model import decoder_layers, initial_weights, materialise
from baselines.system import ModelSpec, Unsupported
from sweeps.tiny import tiny_config
from tests.baselines.test_model import CPU, FAMILIES, TINY

SPECS = FAMILIES | {
    "gemma2-capped": ModelSpec(
        name="gemma2",
        model_type="gemma2",
        config=TINY | {"head_dim": 8, "final_logit_softcapping": 0.05, "pad_token_id": None},
        attn_implementation="eager",
    ),
    "llama-3": ModelSpec(
        name="llama-3", model_type="llama", config=TINY | {"num_hidden_layers": 3}
    ),
    "granite": ModelSpec(
        name="granite",
        model_type="granite",
        config=TINY | {"logits_scaling": 3.0, "pad_token_id": None},
    ),
}

SMALL_DECODER = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "vocab_size": 96,
}
NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
OPT = {
    key: value
    for key, value in TINY.items()
    if key not in ("intermediate_size", "num_key_value_heads")
} | {"ffn_dim": 64}
OTHERS = {
    "opt": OPT | {"word_embed_proj_dim": 32},
    "opt-projected": OPT | {"word_embed_proj_dim": 16},
    "whisper": SMALL_DECODER | {"max_target_positions": 64} | NO_TOKENS,
    "llama4_text": TINY
    | {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "pad_token_id": None},
    "jetmoe": TINY | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Whose decoder is not the base model, or whose class says that its layers cannot be recomputed."""
SPECS |= {
    name: ModelSpec(
        name=name, model_type=name.partition("-")[0], config=config, attn_implementation="eager"
    )
    for name, config in OTHERS.items()
}


def make(name):
    model = materialise(
        SPECS[name], torch.float32, CPU, initial_weights(SPECS[name], 0, torch.float32, CPU)
    )
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[0, :5] = -100
    return model, tokens, labels


@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_plain_loss(name, recomputed):
    model, tokens, labels = make(name)
    mask = torch.ones_like(tokens)
    mask[1, 15:] = 0
    labels[1, 14:] = -100
    num_tokens = int((labels != -100).sum())
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    expected = (
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        / num_tokens
    )
    expected.backward()
    gradients = {
        key: None if param.grad is None else param.grad.clone()
        for key, param in model.named_parameters()
    }
    model.zero_grad()
    kept = 0 if recomputed else len(decoder_layers(model))
    loss = CausalLMLoss(model, loss_chunk=7, keep_activations=kept)
    value = loss(tokens, labels, mask, num_tokens)
    value.backward()
    assert abs(value.item() - expected.item()) < 2e-6
    for key, param in model.named_parameters():
        if gradients[key] is None:  # Whisper's cross attention, without an encoder
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad, gradients[key], rtol=1e-4, atol=1e-6)
    assert len(list(loss.parameters())) == len(gradients)


def test_one_chunk_of_logits_is_alive():
    """Computed once, in a single call of the head."""
    model, tokens, labels = make("llama")
    loss = CausalLMLoss(model, loss_chunk=8)
    alive, peak, chunks, calls = 0, 0, 0, []

    def died():
        nonlocal alive
        alive -= 1

    def seen(module, args, output):
        nonlocal alive, peak, chunks
        alive, chunks = alive + 1, chunks + 1
        weakref.finalize(output, died)
        peak = max(peak, alive)
        assert output.numel() <= 8 * 96

    head = loss.__dict__["_head"]
    head._bare.register_forward_hook(seen)
    model.get_output_embeddings().register_forward_hook(lambda *call: calls.append(call[1]))
    value = loss(tokens, labels, None, 35)
    assert (chunks, alive) == (5, 0)
    value.backward()
    assert (chunks, peak, len(calls)) == (5, 1, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 2, 2]),
        ({"keep_activations": 1}, [2, 2, 1]),
        ({"keep_activations": 2}, [2, 1, 1]),
        ({"keep_activations": 3}, [1, 1, 1]),
    ],
)
def test_layers_are_recomputed_only_when_asked_and_the_last_are_those_kept(options, expected):
    model, tokens, labels = make("llama-3")
    loss = CausalLMLoss(model, **options)
    calls = [0, 0, 0]

    def counting(index):
        def count(*_):
            calls[index] += 1

        return count

    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(counting(index))
    loss(tokens, labels, None, 35).backward()
    assert calls == expected


@pytest.mark.slow
def test_kept_layers_change_neither_loss_nor_gradients_and_have_one_graph():
    found = []
    for options in ({}, {"keep_activations": 2}, {"keep_activations": 2, "compile": True}):
        torch._dynamo.reset()
        counters.clear()
        model, tokens, labels = make("llama-3")
        value = CausalLMLoss(model, **options)(tokens, labels, None, 35)
        value.backward()
        found.append([value, *(param.grad for param in model.parameters())])
        # One for the recomputed layer, one for both that are kept, one for the loss.
        assert counters["stats"]["unique_graphs"] == 3 * ("compile" in options)
        assert functorch_config.activation_memory_budget == 1.0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


def test_a_head_of_several_layers_is_refused_in_one_line():
    model = AutoModelForCausalLM.from_config(tiny_config("modernbert-decoder"))
    with pytest.raises(Unsupported, match="more than an output embedding behind its decoder"):
        CausalLMLoss(model)
