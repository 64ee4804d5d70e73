"""What the engine cannot train exactly it refuses when it is made: one line, before any memory."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaModel

from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import EngineConfig, MegaTrain, Recipe, Widths
from engine.config import RefusedError
from sweeps.tiny import tiny_config
from tests.models import make_batch, make_engine, make_model, plain_loss, weights_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def engine_for(model: nn.Module, **arguments: object) -> MegaTrain:
    arguments = {"micro_batch_size": 2, "seq_len": 16, "dtype": torch.float32} | arguments
    return MegaTrain(model, recipe=Recipe(), **arguments)


def t5() -> nn.Module:
    config = T5Config(
        d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=96, dropout_rate=0.0
    )
    return T5ForConditionalGeneration(config)


def tiny(model_type: str, **settings: object) -> nn.Module:
    config = tiny_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


class BetweenLayers(LlamaModel):
    """Doubles the hidden states between its layers, as no layer does itself."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = 2 * layer(hidden, position_embeddings=rotary)
        return type("Output", (), {"last_hidden_state": self.norm(hidden)})


class FromBefore(LlamaForCausalLM):
    """Adds what came before the layers to what came after."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        before = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        after = self.model(inputs_embeds=before, use_cache=False).last_hidden_state
        return type("Output", (), {"logits": self.lm_head(before + after)})


def between_layers() -> nn.Module:
    model = make_model("llama")
    model.model.__class__ = BetweenLayers
    return model


def from_before() -> nn.Module:
    return FromBefore(LlamaConfig(**SIZES))


REFUSED = {
    "t5": (t5, "T5ForConditionalGeneration"),
    "layers called in circles": (lambda: tiny("hrm_text"), "HrmTextForCausalLM"),
    "a second differentiable tensor": (
        lambda: tiny("gemma3n_text"),
        "second differentiable tensor",
    ),
    "layers that read an image": (lambda: tiny("mllama"), "MllamaForCausalLM"),
    "layerdrop": (lambda: tiny("opt", layerdrop=0.5), "calls 0 of its 4 layers|layerdrop"),
    "auxiliary loss": (
        lambda: tiny("mixtral", output_router_logits=True),
        "output_router_logits: got True",
    ),
    "work between the layers": (
        between_layers,
        "changes the hidden states between LlamaDecoderLayers",
    ),
    "a way past the layers": (from_before, "depend on more than what its last layer gives"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_apart_is_refused_when_the_engine_is_made(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        engine_for(make())
    assert str(caught.value).startswith("model")
    assert "\n" not in str(caught.value)


def test_an_mlp_that_cannot_be_chunked_is_refused_when_the_engine_is_made():
    with pytest.raises(RefusedError, match=r"system\.mlp_chunk: got 5"):
        engine_for(tiny("bloom"), config=EngineConfig(mlp_chunk=5))


def test_a_plan_needs_no_attention_and_layers_may_differ():
    """Mamba has no heads, Gemma-3 a text model inside, Gemma-3n a list of sizes, Gemma-4 other
    heads by layer."""
    widths = {
        name: Widths.of(tiny_config(name))
        for name in ("mamba2", "gemma3", "gemma3n_text", "gemma4_text")
    }
    assert {(w.hidden, w.vocab) for w in widths.values()} == {(32, 96)}
    assert {name: w.inner for name, w in widths.items() if name != "mamba2"} == dict.fromkeys(
        list(widths)[1:], 64
    )
    assert [widths["mamba2"].queries, widths["gemma3"].queries] == [0, 4 * 8]
    layers = tiny_config("gemma4_text").per_layer_config
    assert widths["gemma4_text"].queries == max(4 * layer.head_dim for layer in layers) > 4 * 8


def test_a_trial_costs_no_memory_and_changes_nothing_of_the_model():
    model = make_model(
        "gemma3_text",
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    before = {
        name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    numbers = torch.random.get_rng_state()
    engine_for(model, micro_batch_size=1 << 20, seq_len=1 << 20)
    assert torch.equal(numbers, torch.random.get_rng_state())
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert type(value.data) is torch.Tensor, name
        assert torch.equal(before[name], value), name


def test_a_model_that_checkpoints_trains_as_one_that_does_not():
    losses = []
    for checkpointing in (False, True):
        model = make_model("qwen2")
        if checkpointing:
            model.gradient_checkpointing_enable()
        engine = engine_for(model)
        engine.setup(weights_of(make_model("qwen2")))
        losses.append([engine.train_step(make_batch(seed)).item() for seed in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "options", [{}, {"keep_activations": 2, "offload_activations": 1}], ids=str
)
def test_a_layer_may_return_a_tuple_that_its_output_comes_first_in(options):
    model = make_model(
        "gptj",
        attention="eager",
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        n_positions=64,
        n_inner=64,
    )
    batch = make_batch(1)
    engine = make_engine(model, batch=batch, **options)
    torch.testing.assert_close(
        engine.train_step(batch), plain_loss(model, batch).detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("system", ["in_memory", "megatrain"])
def test_the_bench_plans_a_model_without_attention(system):
    sizes = {
        "hidden_size": 32,
        "state_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "intermediate_size": 64,
    }
    model = ModelSpec(name="tiny", model_type="mamba", config=sizes, attn_implementation="eager")
    spec = SystemSpec(model=model, shape=Shape(batch_size=2, seq_len=16), recipe=Recipe())
    plan = build(system, spec).plan()
    assert plan.device_bytes + plan.host_bytes > 0
