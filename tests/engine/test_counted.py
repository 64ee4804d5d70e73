"""What a layer takes, counted on fake tensors when the engine is made: held against real ones, and
what the plan makes of it."""

from typing import Any

import pytest
import torch

from engine import EngineConfig, Machine, MegaTrain, Rates, Recipe, layer_activation_bytes
from engine.layers.decoder import Decoder
from engine.layers.live import LiveBytes
from engine.layers.rehearsal import count_layers, rehearse
from engine.layers.template import Template
from tests.models import make_batch, make_engine, make_model

SHAPE = (2, 64)
"""Rows and length of a micro-batch."""
KNOWN, UNKNOWN = ("qwen2", "llama"), ("qwen3", "olmo2")
"""The closed form knows pre-norm layers; not norms of queries and keys, nor norms behind."""


def counted(model_type: str, **options: Any) -> tuple[int, int]:
    decoder = Decoder(make_model(model_type), mlp_chunk=options.get("chunk", 0))
    rehearse(decoder, dtype=torch.float32, device=torch.device("cpu"), micro_batch=SHAPE)
    return count_layers(decoder, dtype=torch.float32, micro_batch=SHAPE, **options)


def real_layer(model_type: str, **options: Any) -> tuple[Template, tuple[Any, ...]]:
    """The first layer's template, and weights, input and call with values."""
    batch = make_batch(0, rows=SHAPE[0], seq_len=SHAPE[1])
    decoder = make_engine(make_model(model_type), batch=batch, **options)._decoder
    template = decoder.templates[0]
    names = template.module.named_parameters()
    weights = {name: torch.randn(p.shape, requires_grad=True) for name, p in names}
    recording = decoder.record(torch.zeros(SHAPE, dtype=torch.int64), None)
    return template, (weights, torch.randn(*SHAPE, 32), recording.calls[0], 0)


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("model_type", [*KNOWN, *UNKNOWN, "olmo"])
def test_it_is_what_real_tensors_take(monkeypatch, model_type, chunk):
    """Attention's kernel on a CPU takes nothing for itself."""
    monkeypatch.setattr("engine.layers.live.kernel_bytes", lambda *_: 0)
    held, peak = counted(model_type, chunk=chunk)
    template, given = real_layer(model_type, mlp_chunk=chunk)
    weights, hidden, call, _ = given
    grad = torch.randn_like(hidden)
    existing = (hidden, grad, weights, call.kwargs)
    with LiveBytes(existing) as live:
        _, grads = template.backward(*given, grad)
    assert live.most - sum(found.nbytes for found in grads) == pytest.approx(peak, rel=0.01)
    with LiveBytes(existing) as live:
        graph = template.forward_with_graph(*given)
        assert live.now == pytest.approx(held, rel=0.01)
    del graph


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_compiled_it_is_what_the_graph_saves(model_type):
    held, peak = counted(model_type, compiled=True)
    assert peak == 0
    template, given = real_layer(model_type, compile=True)
    saved = dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden, output = template.forward_with_graph(*given)
    for tensor in (hidden, *given[0].values(), *given[2].kwargs["position_embeddings"]):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) + output.nbytes == pytest.approx(held, rel=0.02)


def planned(model_type: str, **options: Any) -> MegaTrain:
    """Nothing is allocated, so no GPU is needed."""
    names = ("matmul_flops", "adamw_params", "weights_params", "moments_params")
    names += ("h2d_bytes", "d2h_bytes", "device_bytes")
    return MegaTrain(
        make_model(model_type),
        recipe=Recipe(lr=1e-3),
        micro_batch_size=SHAPE[0],
        seq_len=SHAPE[1],
        device="cuda",
        machine=Machine(rates=Rates(**dict.fromkeys(names, 1e12)), device_memory=10**12),
        config=EngineConfig(**options),
    )


@pytest.mark.parametrize("options", [{}, {"mlp_chunk": 16}, {"compile": True}], ids=str)
@pytest.mark.parametrize("model_type", [*KNOWN, *UNKNOWN])
def test_the_plan_takes_it_where_the_closed_form_is_less(model_type, options):
    work = planned(model_type, **options).work
    held, peak = work.counted
    chunk, compiled = options.get("mlp_chunk", 0), options.get("compile", False)
    known, in_all = (
        layer_activation_bytes(
            work.widths, work.tokens, 2, backward=backward, compiled=compiled, mlp_chunk=chunk
        )
        for backward in (False, True)
    )
    if model_type in KNOWN:
        assert held == pytest.approx(known, rel=0.05)
    elif not compiled or model_type == "olmo2":  # a compiled graph norms queries and keys again
        assert held > known
    assert work.layer_bytes(backward=False) == max(held, known)
    expected = in_all + max(0, held - known) if compiled else max(peak, in_all)
    assert work.layer_bytes(backward=True) == expected


def test_what_fake_tensors_cannot_do_leaves_the_closed_form(monkeypatch):
    def fails(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(Template, "forward_with_graph", fails)
    assert planned("qwen3").work.counted == (0, 0)
