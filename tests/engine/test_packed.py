"""Documents packed into one sequence: no document sees another, in the engine and in every loss of
the baselines."""

import dataclasses
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import masking_utils

from baselines.in_memory import InMemory
from baselines.loss import CausalLMLoss
from baselines.model import skip_packed_sequence_check
from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec, Unsupported
from engine import Batch, Masks, Recipe, RefusedError, find_layers, packed
from tests.models import COMMON, engine_gradients, make_engine, make_model, weights_of

pytestmark = pytest.mark.slow

LENGTHS = [[[5, 4, 7], [1, 15]], [[16], [2, 1, 6, 7]]]
"""Micro-batches, rows, documents; some are one token long, one fills its row."""
FAMILIES = {
    "llama": ("llama", "sdpa", {}),
    "llama-eager": ("llama", "eager", {}),
    "qwen2-mixed-windows": (
        "qwen2",
        "sdpa",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "gemma3": (
        "gemma3_text",
        "sdpa",
        {
            "head_dim": 8,
            "sliding_window": 3,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": ("gpt2", "sdpa", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "gptj": ("gptj", "eager", {"rotary_dim": 4}),
}
"""Rotary positions, sliding windows, learned positions, and positions that layers look up."""


def packed_batch(lengths: list[list[list[int]]] = LENGTHS, seed: int = 0) -> Batch:
    """Random documents; the label of a document's last token is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 96, (len(lengths), len(lengths[0]), 16), generator=generator)
    positions = torch.stack(
        [
            torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
            for rows in lengths
        ]
    )
    labels = F.pad(tokens[..., 1:], (0, 1), value=-100)
    last = F.pad(positions[..., 1:] == 0, (0, 1), value=True)
    labels = labels.masked_fill(last, -100)
    return Batch(tokens=tokens, labels=labels, position_ids=positions)


def apart(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The step's loss with every document run by itself."""
    total = torch.zeros(())
    parts = (batch.tokens.flatten(0, 1), batch.labels.flatten(0, 1), batch.position_ids)
    for tokens, labels, positions in zip(parts[0], parts[1], parts[2].flatten(0, 1), strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, stop in pairwise(starts):
            logits = model(input_ids=tokens[None, start:stop], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, labels[start:stop], reduction="sum")
    return total / batch.num_tokens


def reference(model: nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    loss = apart(model, batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6, msg=name)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers as it comes, whatever was told it before; put back afterwards."""
    name = "find_packed_sequence_indices"
    monkeypatch.setattr(masking_utils, name, getattr(masking_utils, name))


def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    skip_packed_sequence_check()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_masks_that_are_counted_are_those_that_there_are(family, monkeypatch):
    """What layers are given, by its memory; what their graphs save of it, in a copy."""
    told(monkeypatch)
    model_type, attention, settings = FAMILIES[family]
    model = make_model(model_type, attention=attention, dtype=torch.bfloat16, **settings)
    batch, given, saved = packed_batch(), {}, {}
    layers = find_layers(model)[1]

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        note(given, (value for value in (*args, *kwargs.values()) if torch.is_tensor(value)))

    def note(seen: dict[int, torch.Tensor], values: Any) -> None:
        for value in values:
            if value.ndim == 4 and tuple(value.shape[-2:]) == (16, 16) and value.shape[1] == 1:
                seen[value.untyped_storage().data_ptr()] = value

    def keep(value: torch.Tensor) -> torch.Tensor:
        note(saved, [value])
        return value

    for layer in layers:
        layer.register_forward_pre_hook(look, with_kwargs=True)
    with packed(batch.position_ids[0]), saved_tensors_hooks(keep, lambda value: value):
        kept = model(input_ids=batch.tokens[0], position_ids=batch.position_ids[0], use_cache=False)
    masks = Masks.of(model.config, *batch.tokens.shape[1:], 2)
    assert sum(value.untyped_storage().nbytes() for value in given.values()) == masks.given > 0
    copies = [value for place, value in saved.items() if place not in given]
    assert sum(value.nbytes for value in copies) == masks.saved * len(layers)
    assert kept.logits.requires_grad


def test_plans_count_the_masks_of_packed_documents_alone():
    shape = Shape(batch_size=4, seq_len=16, num_micro_batches=2)
    spec = SystemSpec(
        model=ModelSpec(name="tiny", model_type="qwen2", config=COMMON), shape=shape,
        recipe=Recipe(lr=1e-3), options={"keep_activations": 1},
    )  # fmt: skip
    for name, micro_batches, given in (("in_memory", 1, 1), ("fsdp2", 1, 1), ("megatrain", 2, 2)):
        plain = build(name, spec).plan().device
        counted = build(name, dataclasses.replace(spec, packed=True)).plan().device
        assert "masks" not in plain
        assert counted["masks"] == given * 2 * 16 * 16
        more = sum(counted.values()) - sum(plain.values())
        assert more >= counted["masks"] + micro_batches * 2 * 16 * 16 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_train_the_engine_as_documents_apart(family, monkeypatch):
    told(monkeypatch)
    model_type, attention, settings = FAMILIES[family]
    model, batch = make_model(model_type, attention=attention, **settings), packed_batch()
    expected_loss, expected = reference(model, batch)
    engine = make_engine(model, recipe=Recipe(lr=1e-3, clip_norm=0.0), batch=batch)
    loss = engine.train_step(batch)
    engine.drain()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert_close(engine_gradients(engine), expected)
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [0, 3])
def test_packed_documents_have_the_loss_of_documents_apart(family, keep, monkeypatch):
    told(monkeypatch)
    model_type, attention, settings = FAMILIES[family]
    model, batch = make_model(model_type, attention=attention, **settings), packed_batch()
    expected_loss, expected = reference(model, batch)
    model.zero_grad()
    loss, total = CausalLMLoss(model, loss_chunk=9, keep_activations=keep), 0.0
    for m in range(2):
        part = loss(batch.tokens[m], batch.labels[m], None, batch.num_tokens, batch.position_ids[m])
        part.backward()
        total += part.item()
    assert total == pytest.approx(expected_loss, rel=1e-6)
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def spec_of(model_type: str, **settings: Any) -> SystemSpec:
    config = {**COMMON, **settings}
    return SystemSpec(
        model=ModelSpec(name="tiny", model_type=model_type, config=config),
        shape=Shape(batch_size=4, seq_len=16, num_micro_batches=2),
        recipe=Recipe(lr=1e-3),
        dtype=torch.float32,
    )


def test_a_baseline_trains_packed_documents_as_the_engine_does(monkeypatch):
    told(monkeypatch)
    model = make_model("qwen2")
    system = InMemory(spec_of("qwen2"))
    system.setup(weights_of(model))
    engine = make_engine(model, recipe=Recipe(lr=1e-3), batch=packed_batch())
    for seed in range(3):
        batch = packed_batch(seed=seed)
        losses = [one.train_step(batch).item() for one in (system, engine)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for one in (system, engine):
        one.drain()
    ours = dict(engine.parameters())
    for name, value in system.parameters():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5, msg=name)
    engine.close()
    system.close()


def test_the_engine_needs_nobody_to_tell_the_library(library):
    """transformers finds the borders by itself, with a look at the device."""
    model, batch = make_model("llama"), packed_batch()
    engine = make_engine(model, batch=batch)
    assert engine.train_step(batch).item() == pytest.approx(apart(model, batch).item(), rel=1e-6)
    engine.close()


def test_a_batch_that_is_not_packed_gets_no_mask(monkeypatch):
    """Told by nobody that documents are packed, the library takes its unmasked kernels."""
    told(monkeypatch)
    model, batch = make_model("llama"), packed_batch()
    engine = make_engine(model, batch=batch)
    plain = Batch(tokens=batch.tokens, labels=batch.labels)
    calls = []
    for given in (batch, plain):
        places = None if given.position_ids is None else given.position_ids[0]
        calls.append(engine._decoder.record(given.tokens[0], None, places).calls[0])
    assert calls[0].kwargs["attention_mask"].shape[-2:] == (16, 16)
    assert calls[1].kwargs["attention_mask"] is None
    engine.close()


def test_borders_that_move_compile_nothing_anew(monkeypatch):
    """A graph is made anew by what guards it, whatever backend it goes to; this one is quick."""
    told(monkeypatch)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make_model("llama", num_hidden_layers=2)
    engine = make_engine(model, batch=packed_batch(), compile=True)
    losses = [engine.train_step(packed_batch()).item()]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([[[9, 7], [16]], [[3, 13], [16]]], LENGTHS):
            losses.append(engine.train_step(packed_batch(lengths, seed=len(losses))).item())
    assert losses[0] == pytest.approx(apart(model, packed_batch()).item(), rel=1e-5)
    engine.close()


MIXING = {
    "mamba": {"state_size": 4},
    "jamba": {"num_experts": 1, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 4},
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3, "head_dim": 8},
    "bloom": {"n_head": 4, "n_layer": 2},
}
"""State-space layers, alone and among others, a linear recurrence, and a model without position
ids."""


@pytest.mark.parametrize("model_type", MIXING)
def test_a_model_that_would_mix_documents_is_refused_in_one_line(model_type, monkeypatch):
    told(monkeypatch)
    model, batch = make_model(model_type, attention="eager", **MIXING[model_type]), packed_batch()
    engine = make_engine(model, batch=batch)
    with pytest.raises(RefusedError, match=r"^batch\.position_ids: got packed.*choose") as caught:
        engine.train_step(batch)
    assert "\n" not in str(caught.value)
    engine.close()
    loss = CausalLMLoss(model)
    with pytest.raises(Unsupported, match=r"^batch\.position_ids"):
        loss(batch.tokens[0], batch.labels[0], None, 10, batch.position_ids[0])


def test_a_layer_without_a_mask_is_refused(monkeypatch):
    """As under attention that takes its borders from elsewhere."""
    told(monkeypatch)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: None)
    batch = packed_batch()
    engine = make_engine(make_model("llama"), batch=batch)
    with pytest.raises(RefusedError, match="is given no mask between documents"):
        engine.train_step(batch)
    engine.close()


def test_a_mask_that_does_not_follow_the_position_ids_is_refused(monkeypatch):
    """OPT takes them for its learned positions, and makes its mask without them."""
    told(monkeypatch)
    batch = packed_batch()
    engine = make_engine(
        make_model("opt", attention="eager", dropout=0.0, word_embed_proj_dim=32, ffn_dim=64),
        batch=batch,
    )
    with pytest.raises(RefusedError, match="is given no mask between documents"):
        engine.train_step(batch)
    engine.close()


def test_padded_and_packed_is_one_line():
    batch = packed_batch()
    both = Batch(
        tokens=batch.tokens,
        labels=batch.labels,
        attention_mask=torch.ones_like(batch.tokens),
        position_ids=batch.position_ids,
    )
    engine = make_engine(make_model("llama"), batch=batch)
    with pytest.raises(ValueError, match=r"^batch\.position_ids: got them beside"):
        engine.train_step(both)
    engine.close()
