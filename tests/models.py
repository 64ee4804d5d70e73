"""Tiny random decoder-only models and batches for the engine's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Batch, EngineConfig, Machine, MegaTrain, Rates, Recipe
from tests.twin import poisoned

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def make_model(
    model_type: str = "qwen2",
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> nn.Module:
    """A model with its own random initial weights; the same for the same seed. Norms and biases are
    perturbed too."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
        parameter.data.copy_(parameter.data.bfloat16())
    return model.to(dtype)


def weights_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Detached copies of the parameters."""
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def make_batch(
    seed: int, *, micro_batches: int = 1, rows: int = 2, seq_len: int = 16, vocab: int = 96
) -> Batch:
    """Random tokens and their shifted labels."""
    tokens = torch.randint(
        0, vocab, (micro_batches, rows, seq_len + 1), generator=torch.Generator().manual_seed(seed)
    )
    return Batch(tokens=tokens[..., :-1].contiguous(), labels=tokens[..., 1:].contiguous())


def make_engine(
    model: nn.Module,
    *,
    recipe: Recipe | None = None,
    batch: Batch | None = None,
    poison: bool = False,
    **arguments: Any,
) -> MegaTrain:
    """An engine over a fresh copy of `model`'s configuration, loaded with its weights. poison: see
    tests/twin.py."""
    batch = batch or make_batch(0)
    num_micro_batches, rows, seq_len = batch.tokens.shape
    names = set(EngineConfig.__dataclass_fields__)
    config = EngineConfig(
        **{"loss_chunk": 24, "num_threads": 1} | {k: v for k, v in arguments.items() if k in names}
    )
    skeleton = AutoModelForCausalLM.from_config(
        model.config, attn_implementation=model.config._attn_implementation
    )
    for mine, given in zip(skeleton.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(given.requires_grad)
    dtype = next(model.parameters()).dtype
    rest = {k: v for k, v in arguments.items() if k not in names}
    if torch.device(rest.get("device", "cpu")).type == "cuda":  # no probe, and two passes of AdamW
        rest = {"machine": Machine(rates=replace(H200, adamw_params=1e9))} | rest
    engine = MegaTrain(
        skeleton.to(dtype),
        recipe=recipe or Recipe(lr=1e-3),
        micro_batch_size=rows,
        seq_len=seq_len,
        num_micro_batches=num_micro_batches,
        config=config,
        **{"dtype": dtype} | rest,
    )
    engine.setup(weights_of(model))
    return poisoned(engine) if poison else engine


def plain_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The step's loss by one plain forward of everything at once."""
    mask = None if batch.attention_mask is None else batch.attention_mask.flatten(0, 1)
    logits = model(
        input_ids=batch.tokens.flatten(0, 1), attention_mask=mask, use_cache=False
    ).logits
    return (
        F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum")
        / batch.num_tokens
    )


def engine_gradients(engine: MegaTrain) -> dict[str, torch.Tensor]:
    """The gradients of the last step, fp32, by name, from the host slabs (one a block)."""
    store, decoder = engine._store, engine._decoder
    assert store is not None
    found = {}
    for block, layout in enumerate(store.spec.layouts):
        for field, view in layout.items(store.slabs[block]):
            found[decoder.full_name(block, field.name)] = view.float().clone()
    return found


def train(
    engine: MegaTrain, num_steps: int = 4, micro_batches: int = 1, first: int = 0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [
        engine.train_step(make_batch(first + step, micro_batches=micro_batches))
        for step in range(num_steps)
    ]
    engine.drain()
    return [loss.item() for loss in losses], dict(engine.parameters())


def assert_same(
    one: tuple[list[float], dict[str, torch.Tensor]],
    other: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


H200 = Rates(
    matmul_flops=7.7e14,
    adamw_params=7.2e9,
    weights_params=8e9,
    moments_params=1.1e10,
    h2d_bytes=5.5e10,
    d2h_bytes=5.5e10,
    device_bytes=4e12,
)
"""About what conf/rates has for a GPU that is not here."""
