"""megatrain against in_memory on the CPU: 50 steps, losses within 1e-6 relative and every parameter
within 1e-5 in fp32."""

from functools import cache

import pytest
import torch

from baselines.model import initial_weights
from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import Batch, Recipe
from tests.models import COMMON

pytestmark = pytest.mark.slow

NUM_STEPS = 50
NUM_LAYERS = 4


def spec_of(
    accumulation: int, clip_norm: float, tied: bool, dtype: torch.dtype, **options: object
) -> SystemSpec:
    config = {**COMMON, "tie_word_embeddings": tied, "num_hidden_layers": NUM_LAYERS}
    config.pop("pad_token_id")
    return SystemSpec(
        model=ModelSpec(name="tiny", model_type="qwen2", config=config),
        shape=Shape(batch_size=4, seq_len=8, num_micro_batches=accumulation),
        recipe=Recipe(
            lr=1e-3, clip_norm=clip_norm, schedule="cosine", warmup_steps=5, total_steps=NUM_STEPS
        ),
        dtype=dtype,
        options=options,
    )


def batches(accumulation: int) -> list[Batch]:
    """The same sequences whatever the accumulation; their token statistics are learnable."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, 96, (4, 9), generator=generator).pow(2) % 96
        tokens = tokens.view(accumulation, 4 // accumulation, 9)
        found.append(
            Batch(tokens=tokens[..., :-1].contiguous(), labels=tokens[..., 1:].contiguous())
        )
    return found


def train(system: str, spec: SystemSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer = build(system, spec)
    try:
        trainer.setup(initial_weights(spec.model, 7, spec.dtype, spec.device))
        losses = [trainer.train_step(batch) for batch in batches(spec.shape.num_micro_batches)]
        trainer.drain()
        return torch.stack([loss.detach().clone() for loss in losses]), dict(trainer.parameters())
    finally:
        trainer.close()


@cache
def reference(
    accumulation: int, clip_norm: float, tied: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return train(
        "in_memory", spec_of(accumulation, clip_norm, tied, dtype, keep_activations=NUM_LAYERS)
    )


PAIRS = [(1, 2), (2, 1), (4, 3)]
"""(checkpoint interval, depth); any other pair gives the same bits (test_engine.py), so each case
below takes one of them."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "clip_norm", [1e-2, 1e3, 0.0], ids=["clipped", "clip-inactive", "clip-off"]
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_fp32_50_steps(accumulation, clip_norm, tied):
    interval, depth = PAIRS[
        ([1e-2, 1e3, 0.0].index(clip_norm) + (accumulation > 1) + tied) % 3
    ]  # every pair meets every value
    expected = reference(accumulation, clip_norm, tied, torch.float32)
    options = {"depth": depth, "checkpoint_interval": interval, "loss_chunk": 24, "num_threads": 1}
    losses, parameters = train(
        "megatrain", spec_of(accumulation, clip_norm, tied, torch.float32, **options)
    )
    torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(
            parameters[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert expected[0][-1] < expected[0][0]


@pytest.mark.parametrize(
    "options",
    [{"mlp_chunk": 16, "offload_activations": 1}, {"mlp_chunk": 5, "keep_activations": 2}],
    ids=str,
)
def test_fp32_50_steps_with_the_mlp_in_chunks(options):
    expected = reference(1, 1e-2, False, torch.float32)
    losses, parameters = train(
        "megatrain", spec_of(1, 1e-2, False, torch.float32, num_threads=1, **options)
    )
    torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(
            parameters[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("accumulation", "tied", "mlp_chunk"),
    [(1, False, 0), (4, True, 0), (1, False, 12), (4, True, 5)],
)
def test_bf16_with_fp32_master_50_steps(accumulation, tied, mlp_chunk):
    expected = reference(accumulation, 1.0, tied, torch.bfloat16)
    options = {"loss_chunk": 12, "mlp_chunk": mlp_chunk, "num_threads": 1}
    losses, _ = train("megatrain", spec_of(accumulation, 1.0, tied, torch.bfloat16, **options))
    assert (losses - expected[0]).abs().max() < 2e-3


def test_accumulation_does_not_change_the_maths():
    one, four = (reference(n, 1e-2, True, torch.float32)[0] for n in (1, 4))
    torch.testing.assert_close(one, four, rtol=1e-5, atol=0)
