"""Any decoder-only transformers model: first-step loss and every gradient equal the plain
model's."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from engine import Batch, EngineConfig, MegaTrain, Recipe
from engine.layers.decoder import Decoder
from engine.layers.offload import Offloaded
from engine.layers.template import share_templates
from engine.step import Kind
from tests.models import (
    engine_gradients,
    make_batch,
    make_engine,
    make_model,
    plain_loss,
    train,
    weights_of,
)

pytestmark = pytest.mark.slow

DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
"""Its router has a buffer, in the model's dtype."""
ARCHITECTURES = {
    "llama": ("llama", "sdpa", {}),
    "llama-tied": ("llama", "sdpa", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", "sdpa", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", "sdpa", {"head_dim": 16}),
    "mistral-sliding-window": ("mistral", "sdpa", {"sliding_window": 5}),
    "qwen2-mixed-windows": (
        "qwen2",
        "sdpa",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "num_hidden_layers": 4,
        },
    ),
    "gemma2": (
        "gemma2",
        "eager",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "num_hidden_layers": 4},
    ),
    "gpt2": (
        "gpt2",
        "sdpa",
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox-parallel": ("gpt_neox", "sdpa", {}),
    "mixtral-experts": ("mixtral", "sdpa", {"num_local_experts": 4}),
    "phi3": ("phi3", "sdpa", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt-norm-registered-first": (
        "opt",
        "sdpa",
        {"ffn_dim": 64, "dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 32},
    ),
    "opt-projected": (
        "opt",
        "sdpa",
        {"ffn_dim": 64, "dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 16},
    ),
    "deepseek_v3-experts": ("deepseek_v3", "sdpa", DEEPSEEK),
}


RECOMPUTED = {"checkpoint_interval": 2}
OFFLOADED = {"micro_batches": 2, "offload_activations": 2, "keep_activations": 1}
"""Some layers save more than the closed form says, and eager attention its scores: what has no room
stays on the device."""


CHUNKED = {**OFFLOADED, "mlp_chunk": 5}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    "options", [RECOMPUTED, {**RECOMPUTED, "micro_batches": 2}, OFFLOADED, CHUNKED], ids=str
)
def test_first_step_equals_the_plain_model(name, options, monkeypatch):
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    options = dict(options)
    micro_batches = options.pop("micro_batches", 1)
    model_type, attention, settings = ARCHITECTURES[name]
    model = make_model(model_type, attention=attention, **settings)
    batch = make_batch(1, micro_batches=micro_batches)
    if model_type == "opt":  # its MLP is part of the layer
        options.pop("mlp_chunk", None)
    engine = make_engine(model, batch=batch, poison=True, **options)
    loss = engine.train_step(batch)
    expected = plain_loss(model, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    gradients = engine_gradients(engine)
    for parameter_name, parameter in model.named_parameters():
        reference = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            gradients.pop(parameter_name),
            reference,
            rtol=1e-4,
            atol=2e-6,
            msg=lambda m, n=parameter_name: f"{n}: {m}",
        )
    assert not gradients


@pytest.mark.parametrize("name", ["deepseek_v3-experts", "opt-norm-registered-first"])
def test_two_contributions_in_bfloat16_train_as_the_plain_model(name):
    """A buffer in bfloat16 tells templates apart; a head without parameters of its own has sums to
    round too."""
    model_type, attention, settings = ARCHITECTURES[name]
    model = make_model(
        model_type, attention=attention, dtype=torch.bfloat16, **settings, tie_word_embeddings=True
    )
    batch = make_batch(1, micro_batches=2)
    engine = make_engine(model, batch=batch)
    expected = plain_loss(model, batch)
    expected.backward()
    torch.testing.assert_close(engine.train_step(batch), expected.detach(), rtol=0, atol=5e-3)
    gradients = engine_gradients(engine)
    wholes = {n: p.grad.float() for n, p in model.named_parameters()}
    norm = torch.cat([g.flatten() for g in wholes.values()]).norm()
    error = torch.cat([(gradients[n] - g).flatten() for n, g in wholes.items()]).norm()
    assert error < 0.05 * norm


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_offloaded_experts_change_no_bit(model_type, monkeypatch):
    """A gate and its partner are halves of one product. With other strides than theirs a kernel
    rounds otherwise."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    }
    model = make_model(model_type, hidden_size=128, head_dim=32, **experts)
    batch = make_batch(0, micro_batches=2, seq_len=7)
    engines = [
        make_engine(model, batch=batch, **{name: 3})
        for name in ("keep_activations", "offload_activations")
    ]
    for engine in engines:
        engine.train_step(batch)
        engine.drain()
    kept, offloaded = (engine_gradients(engine) for engine in engines)
    assert [name for name in kept if not torch.equal(kept[name], offloaded[name])] == []


def test_what_is_offloaded_comes_back_with_its_strides_and_moves_once(monkeypatch):
    """A compiled backward asserts them."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    source = torch.randn(4, 6, 30).requires_grad_()
    kept = Offloaded(weights={}, home=torch.zeros(1), shared=set(), capacity=1 << 20)
    with kept.hooks():
        parts = (source * 2).transpose(0, 1).split(10, dim=-1)
        output = parts[0] * parts[1] + parts[2].exp() * parts[0].expand(1, 6, 4, 10)
    (expected,) = torch.autograd.grad(output.sum(), source, retain_graph=True)
    saved = [
        t
        for node in nodes_of(output)
        for n in dir(node)
        if n.startswith("_saved_")
        for t in [getattr(node, n)]
    ]
    strides = [t.stride() for t in saved if isinstance(t, torch.Tensor)]
    assert (30, 180, 1) in strides
    slab = torch.empty(kept.num_bytes, dtype=torch.uint8)
    assert len(list(kept.copies(slab))) == 2  # the product, and what exp returned
    for piece, place in kept.copies(slab):
        place.copy_(piece)
    kept.drop()
    kept.stage()
    for piece, place in kept.copies(slab):
        piece.copy_(place)
    assert torch.equal(torch.autograd.grad(output.sum(), source)[0], expected)


def nodes_of(output):
    """All of a graph's."""
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(below for below, _ in node.next_functions)
    return seen


@pytest.mark.slow
def test_experts_that_no_single_graph_can_hold_are_compiled_as_two(monkeypatch):
    """In fp32 on the CPU they are an operator of transformers, which `vjp` cannot pass."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        "torch.compile", functools.partial(torch.compile, backend="aot_eager")
    )  # seconds, not minutes
    model = make_model("mixtral", num_local_experts=4, num_hidden_layers=1)
    expected = train(make_engine(model), 2)
    with pytest.warns(
        UserWarning,
        match=r"^system\.compile: the recomputation of Mixtral\w+ and its backward are two graphs",
    ):
        losses, parameters = train(make_engine(model, compile=True), 2)
    torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-5)


def test_layers_that_differ_in_configuration_have_templates_of_their_own():
    alternating = make_engine(
        make_model("gemma2", attention="eager", head_dim=8, sliding_window=5, num_hidden_layers=4)
    )
    templates = alternating._decoder.templates
    assert templates[0] is templates[2]
    assert templates[1] is templates[3]
    assert templates[0] is not templates[1]
    assert [t.module.self_attn.sliding_window for t in templates[:2]] == [5, None]


UNLIKE = {
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 4,
        "expert_layer_offset": 2,
        "num_experts": 4,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0, 3],
    },
}
"""Models whose layers have unlike parameters: Mamba, attention, dense MLPs and experts."""


@pytest.mark.parametrize("options", [{"depth": 1}, {"gradient_slabs": 2}], ids=str)
@pytest.mark.parametrize("model_type", UNLIKE)
def test_unlike_layers_train_as_the_plain_model(model_type, options):
    model, recipe = make_model(model_type, **UNLIKE[model_type]), Recipe(lr=1e-3, clip_norm=0.5)
    batch = make_batch(0, micro_batches=2)
    engine = make_engine(model, recipe=recipe, batch=batch, poison=True, **options)
    assert len({layout.numel for layout in engine.work.layouts[1:-1]}) > 1
    losses, norms = [], []
    for step in range(3):
        losses += train(engine, 1, micro_batches=2, first=step)[0]
        norms.append(engine._executor.memory.verdict[1].item())
    expected = plain_training(model, recipe)
    torch.testing.assert_close((losses, norms), expected, rtol=2e-6, atol=0)


def plain_training(model: nn.Module, recipe: Recipe) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of three steps of torch's own AdamW."""
    settings = {"betas": (recipe.beta1, recipe.beta2), "weight_decay": recipe.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, **settings)
    losses, norms = [], []
    for step in range(3):
        loss = plain_loss(model, make_batch(step, micro_batches=2))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def engine_of(model: nn.Module, batch: Batch, **arguments: Any) -> MegaTrain:
    """An engine over `model` itself, with what was changed in it."""
    weights, (number, rows, seq_len) = weights_of(model), batch.tokens.shape
    shape = {"num_micro_batches": number, "micro_batch_size": rows, "seq_len": seq_len}
    engine = MegaTrain(model, recipe=Recipe(), dtype=torch.float32, **shape, **arguments)
    engine.setup(weights)
    return engine


def test_layers_whose_buffers_differ_have_templates_of_their_own():
    """The correction bias of DeepSeek-V3's router is a buffer and decides which expert runs."""
    model, batch = make_model("deepseek_v3", **EXPERTS), make_batch(1)
    for index, layer in enumerate(model.model.layers[1:]):
        layer.mlp.gate.e_score_correction_bias[index] = 1.0
    expected = plain_loss(model, batch).detach()
    engine = engine_of(model, batch)
    assert len(set(engine._decoder.templates)) == 3
    torch.testing.assert_close(engine.train_step(batch), expected, rtol=1e-6, atol=0)


EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}


def test_layers_that_differ_in_a_private_setting_have_templates_of_their_own():
    model = make_model("qwen2")
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layer._scale = index % 2
    templates = share_templates(layers)
    assert templates[0] is templates[2]
    assert templates[0] is not templates[1]


def test_layers_of_one_configuration_share_one_template():
    assert len({id(t) for t in make_engine(make_model("qwen2"))._decoder.templates}) == 1


def test_templates_hold_no_weights_and_weights_are_views_of_the_slot():
    engine = make_engine(make_model("qwen2"))
    assert all(p.is_meta for t in engine._decoder.templates for p in t.module.parameters())
    memory, loads = (
        engine.executor.memory,
        [op for op in engine.executor.ops if op.kind is Kind.LOAD and op.slot >= 0],
    )
    for op in loads:
        first, last = (
            memory.home(op).data_ptr(),
            memory.home(op).data_ptr() + memory.home(op).nbytes,
        )
        for view in memory.weights(op).values():
            assert first <= view.data_ptr() < last


class TimesIndex(nn.Module):
    """What a layer of the library may do: read the number of its layer in the forward."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + self.layer_idx)


@pytest.mark.parametrize("options", [{}, {"keep_activations": 3}], ids=str)
def test_a_layer_that_uses_its_index_gets_its_own(options):
    """One template, three different results."""
    model, batch = make_model("qwen2"), make_batch(1)
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm = nn.Sequential(layer.input_layernorm, TimesIndex(index))
    expected = plain_loss(model, batch)
    expected.backward()
    references = {name: parameter.grad for name, parameter in model.named_parameters()}
    engine = engine_of(model, batch, config=EngineConfig(**options))
    assert len(set(engine._decoder.templates)) == 1
    torch.testing.assert_close(engine.train_step(batch), expected.detach(), rtol=1e-6, atol=0)
    for name, found in engine_gradients(engine).items():
        torch.testing.assert_close(found, references[name], rtol=1e-4, atol=2e-6)


def test_padding_reaches_the_layers_as_the_models_own_mask():
    """A 2-D mask must not reach scaled_dot_product_attention; each micro-batch has its own."""
    model = make_model("qwen2")
    batch = make_batch(1, micro_batches=2, rows=3)
    mask = torch.ones_like(batch.tokens)
    mask[0, 1, 10:] = 0
    mask[0, 2, :4] = 0
    mask[1, 0, 7:] = 0
    labels = batch.labels.masked_fill(mask == 0, -100)
    padded = Batch(tokens=batch.tokens, labels=labels, attention_mask=mask)
    assert padded.num_tokens == int(mask.sum())
    engine = make_engine(model, batch=padded)
    loss = engine.train_step(padded)
    expected = plain_loss(model, padded)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    gradients = engine_gradients(engine)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=2e-6)


DROPOUTS = {
    "attention": ("qwen2", {"attention_dropout": 0.1}),
    "a module": ("gpt_neox", {"hidden_dropout": 0.1}),
    "an attribute": ("opt", {"dropout": 0.1, "ffn_dim": 64, "word_embed_proj_dim": 32}),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_refused_with_one_line(name):
    model_type, settings = DROPOUTS[name]
    with pytest.raises(ValueError, match=r"dropout.* is 0\.1, allowed 0") as caught:
        make_engine(make_model(model_type, **settings))
    assert "\n" not in str(caught.value)


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(ValueError, match="no list of decoder layers"):
        Decoder(torch.nn.Linear(2, 2))


def test_layers_of_mixed_classes_are_refused():
    model = make_model("qwen2")
    model.model.layers[1] = nn.Identity()
    with pytest.raises(ValueError, match="no list of decoder layers"):
        Decoder(model)


def test_layers_that_share_a_part_are_refused():
    model = make_model("qwen2")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match="decoder layers share parameters"):
        Decoder(model)


def test_layers_connected_by_more_than_hidden_states_are_refused():
    """Gemma-4 gives every layer an input of its own, which has parameters of its own."""
    settings = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "head_dim": 8}
    model = make_model("gemma4_text", global_head_dim=8, num_kv_shared_layers=0, **settings)
    with pytest.raises(ValueError, match="a second differentiable tensor"):
        Decoder(model).record(make_batch(0).tokens[0], None)


class Shifted(nn.Embedding):
    """An embedding that adds what another module owns."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.owner[0].weight


def test_a_parameter_used_before_the_layers_may_be_registered_after():
    """It moves to embed, whose gradients are summed after the layers'."""
    model, batch = make_model("qwen2"), make_batch(1, micro_batches=2)
    model.shift = nn.LayerNorm(32, bias=False)
    model.model.embed_tokens.__class__ = Shifted
    model.model.embed_tokens.owner = (model.shift,)  # a tuple registers nothing
    expected = plain_loss(model, batch)
    expected.backward()
    references = {name: parameter.grad for name, parameter in model.named_parameters()}
    engine = engine_of(model, batch)
    torch.testing.assert_close(engine.train_step(batch), expected.detach(), rtol=1e-6, atol=0)
    gradients = engine_gradients(engine)
    assert gradients["shift.weight"].any()
    for name, reference in references.items():
        torch.testing.assert_close(gradients[name], reference, rtol=1e-4, atol=2e-6)
