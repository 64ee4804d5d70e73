"""The gradients' norm, by which they are clipped, against float64: of tensors at size and of whole
steps."""

import math
from collections.abc import Iterable

import pytest
import torch

from baselines.in_memory import InMemory
from baselines.model import initial_weights
from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import Recipe, norm_of
from engine.layout import BLOCK_ALIGNMENT
from tests.models import COMMON, engine_gradients, make_batch, make_engine, make_model

PIECE = 1 << 20


def exact(tensors: Iterable[torch.Tensor]) -> float:
    """The norm in float64, a piece at a time."""
    pieces = (piece for one in tensors for piece in one.reshape(-1).split(PIECE))
    return math.sqrt(math.fsum(piece.double().square().sum().item() for piece in pieces))


def random_block(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, unlike in every row of BLOCK_ALIGNMENT; made piece by piece."""
    block = torch.empty(num_rows, BLOCK_ALIGNMENT, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(512, BLOCK_ALIGNMENT, generator=generator)
    for number, rows in enumerate(block.split(512)):
        rows.copy_(some[: len(rows)] * (1 + number % 7))
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [10**6, 10**7, 10**8])
def test_the_norm_of_a_block_is_that_of_float64_at_any_size(numel, dtype):
    """torch's norm of the whole block in fp32 is 1e-5, 4e-4 and 1e-2 low."""
    block = random_block(numel // BLOCK_ALIGNMENT, dtype)
    assert norm_of([block]).item() == pytest.approx(exact([block]), rel=2e-7)


def test_the_norm_of_tensors_of_all_shapes_is_that_of_all_elements():
    """Many rows too, whose norms are no fewer than a large embedding has."""
    shapes = [(65, 33), (7,), (3, 4, 5), (), (4_000_000, 2)]
    tensors = [*map(torch.randn, shapes), torch.full((2, 2), 1e18)]
    for held in (tensors[:5], tensors, tensors[1:2]):
        assert norm_of(held).item() == pytest.approx(exact(held), rel=2e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_of_what_is_not_finite_is_not_finite(bad):
    assert not norm_of([torch.tensor([[1.0, bad]]), torch.ones(2)]).isfinite()


MODELS = {
    "a block of a million": ("qwen2", {"vocab_size": 32768, "tie_word_embeddings": True}),
    "unlike layers": (
        "qwen3_moe",
        {
            "mlp_only_layers": [1],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "intermediate_size": 200,
            "decoder_sparse_step": 1,
        },
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_norm_of_a_step_is_that_of_its_gradients(name, dtype):
    model_type, settings = MODELS[name]
    model = make_model(model_type, dtype=dtype, **settings)
    engine = make_engine(model, recipe=Recipe(lr=1e-3, clip_norm=0.5))
    for step in range(2):
        engine.train_step(make_batch(step))
        engine.drain()
        norm, scale = engine._executor.memory.verdict[1:].tolist()
        expected = exact(engine_gradients(engine).values())
        assert norm == pytest.approx(expected, rel=3e-7)
        assert scale == pytest.approx(0.5 / (expected + 1e-6), rel=3e-7)


def in_memory(vocab_size: int, clip_norm: float) -> InMemory:
    config = {**COMMON, "vocab_size": vocab_size, "tie_word_embeddings": True}
    spec = SystemSpec(
        model=ModelSpec(name="tiny", model_type="qwen2", config=config),
        shape=Shape(batch_size=2, seq_len=16, num_micro_batches=1),
        recipe=Recipe(lr=1e-3, clip_norm=clip_norm),
        dtype=torch.float32,
    )
    system = build("in_memory", spec)
    system.setup(initial_weights(spec.model, 7, spec.dtype, spec.device))
    return system


def test_the_reference_clips_by_the_exact_norm_on_the_cpu():
    found = []
    for clip_norm in (0.0, 1e-3):
        system = in_memory(262_144, clip_norm)
        system.train_step(make_batch(0))
        found.append(exact(master.grad for master in system._masters.values()))
        system.close()
    assert found[1] * (1 + 1e-6 / found[0]) == pytest.approx(1e-3, rel=1e-6)
