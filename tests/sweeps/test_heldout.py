"""Loss on held-out text: the value, how much text, and that every system is asked the same way."""

import pytest
import torch
from torch.nn import functional as F

from baselines.model import initial_weights, materialise
from baselines.registry import build
from sweeps import auto, data, heldout
from sweeps.command import command_of
from sweeps.config import Cell

pytestmark = pytest.mark.slow

SMALL = ["model=tiny", "shape.batch_size=2", "shape.seq_len=16", "measure.heldout_tokens=50"]


def cell_of(*overrides: str) -> Cell:
    auto.register("cpu")
    (cell,) = command_of([*SMALL, *overrides]).cells or []
    return cell


def test_it_is_the_plain_models_mean_cross_entropy_over_the_tail():
    cell = cell_of("system=in_memory")
    spec = cell.spec()
    model = materialise(
        spec.model,
        torch.float32,
        spec.device,
        initial_weights(spec.model, 1, torch.float32, spec.device),
    )
    tail = data.corpus_of(cell.data).heldout[: 3 * 17].view(3, 17).long()
    with torch.no_grad():
        logits = model(input_ids=tail[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tail[:, 1:].flatten())
    assert heldout.loss(model, cell) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("system", ["megatrain", "fsdp2"])
def test_a_system_is_asked_for_what_it_trained(system: str):
    losses = {}
    for name in ("in_memory", system):
        # In bf16 steps of this size amplify a gradient norm that is rounded otherwise to 3e-2.
        cell = cell_of(
            f"system={name}", "system.dtype=float32", "recipe.lr=1e-2", "recipe.warmup_steps=0"
        )
        spec = cell.spec()
        one = build(name, spec)
        one.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
        steps = data.ByteStream(data.corpus_of(cell.data), cell.shape, 0)
        before = heldout.loss(heldout.trained(one, cell), cell)
        for _ in range(6):
            one.train_step(next(steps))
        one.drain()
        losses[name] = heldout.loss(heldout.trained(one, cell), cell)
        one.close()
        assert losses[name] < before - 0.3
    assert losses[system] == pytest.approx(losses["in_memory"], abs=2e-3)


def test_as_many_sequences_as_the_tokens_fill_one_at_least_and_no_more_than_there_are():
    corpus = data.corpus_of(cell_of("data.max_bytes=65536", "data.heldout_fraction=0.01").data)
    assert corpus.heldout.numel() == 655
    shapes = [
        tuple(data.heldout(corpus, 16, num_tokens).shape) for num_tokens in (1, 47, 48, 10**6)
    ]
    assert shapes == [(1, 17), (2, 17), (3, 17), (38, 17)]
    assert len(data.heldout(corpus, 655, 1)) == 0


def test_no_text_no_loss():
    cell = cell_of("system=in_memory", "data.heldout_fraction=0")
    spec = cell.spec()
    model = materialise(
        spec.model, spec.dtype, spec.device, initial_weights(spec.model, 1, spec.dtype, spec.device)
    )
    assert heldout.loss(model, cell) is None


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_system_is_given_the_same_text_in_batches_of_its_shape(num_micro_batches: int):
    cell = cell_of(
        "shape.batch_size=4",
        f"shape.num_micro_batches={num_micro_batches}",
        "measure.heldout_every_window=true",
    )
    rows = 4 // num_micro_batches
    batches = heldout.batches(cell)
    assert {tuple(batch.tokens.shape) for batch in batches} == {(1, rows, 16)}
    alone = list(data.ByteStream(data.corpus_of(cell.data), cell.shape, 0).heldout(50))
    assert sum(batch.num_tokens for batch in batches) == sum(one.num_tokens for one in alone)
    labels = torch.cat([batch.labels[0] for batch in batches])
    assert torch.equal(labels[: len(alone)], torch.cat([one.labels[0] for one in alone]))
    assert (labels[len(alone) :] == -100).all()
