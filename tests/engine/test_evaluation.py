"""An evaluation between steps is the plain model's loss and changes no bit of what follows; the
gradient norm is that of its own step."""

from functools import partial
from typing import Any

import pytest
import torch

from engine import Batch, MegaTrain, Recipe, RefusedError
from tests.engine.test_packed import MIXING, apart, packed_batch
from tests.models import assert_same, make_batch, make_engine, make_model, plain_loss, train
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow

RECIPE = Recipe(lr=1e-2, clip_norm=0.5)
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"depth": 1, "streams": 1, "late_moments": False},
    {"depth": 3, "streams": 2, "checkpoint_interval": 2, "gradient_slabs": 2},
    {"device_optimizer": 3, "keep_activations": 2, "streams": 2},
    {"device_optimizer": 6, "keep_activations": 4, "depth": 1},
    {"offload_activations": 2, "keep_activations": 1, "device_optimizer": 3},
    {"offload_activations": 4, "optimizer_overlap": False},
]


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """The tensors of these models are small: without this none would be offloaded."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)


def plain(engine: MegaTrain, model: torch.nn.Module) -> torch.nn.Module:
    """A plain model with the engine's parameters."""
    held = make_model("qwen2", num_hidden_layers=len(model.model.layers))
    held.load_state_dict(dict(engine.parameters()), strict=False)
    return held


CASES = [(placement, torch.float32) for placement in PLACEMENTS]
CASES += [(PLACEMENTS[0], torch.bfloat16), (PLACEMENTS[5], torch.bfloat16)]


@pytest.mark.parametrize(("placement", "dtype"), CASES, ids=str)
def test_an_evaluation_between_steps_changes_no_bit(models, placement, dtype):
    """Before the first, and with steps, updates and moments under way; of another number of
    micro-batches too."""
    batch = make_batch(0, micro_batches=2)
    given = {"recipe": RECIPE, "batch": batch, **placement}
    expected = train(make_engine(models[dtype], **given), 4, micro_batches=2)
    engine = make_engine(models[dtype], lanes=TwinLanes(seed=1), poison=True, **given)
    losses, found = [], []
    state = torch.get_rng_state()
    for step in range(4):
        found.append(engine.evaluate(make_batch(50, micro_batches=1 + step)))
        losses.append(engine.train_step(make_batch(step, micro_batches=2)))
    assert torch.equal(torch.get_rng_state(), state)
    engine.drain()
    assert_same(([loss.item() for loss in losses], dict(engine.parameters())), expected)
    assert all(one.dtype == torch.float32 and one.shape == () for one in found)
    if dtype == torch.float32:
        last = make_batch(50, micro_batches=3)
        with torch.no_grad():
            wanted = plain_loss(plain(engine, models[dtype]), last)
        torch.testing.assert_close(engine.evaluate(last), wanted, rtol=1e-5, atol=0)


def test_an_evaluation_is_that_of_the_updates_that_were_under_way(models):
    """And the moments that wait still wait: they are the next step's."""
    engine = make_engine(models[torch.float32], recipe=RECIPE, lanes=TwinLanes(seed=2))
    assert engine.blocks.two_passes
    engine.train_step(make_batch(0))
    found = engine.evaluate(make_batch(9))
    assert sorted(engine.executor._late) == list(engine.blocks.hosted)
    with torch.no_grad():
        expected = plain_loss(plain(engine, models[torch.float32]), make_batch(9))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("placement", [{}, {"device_optimizer": 2, "keep_activations": 1}], ids=str)
def test_packed_documents_are_evaluated_as_documents_apart(placement):
    model, batch = make_model("llama"), packed_batch()
    engine = make_engine(model, batch=batch, **placement)
    expected = apart(model, batch).detach()
    torch.testing.assert_close(engine.evaluate(batch), expected, rtol=1e-5, atol=0)
    engine.close()


def test_padding_is_not_seen_by_an_evaluation(models):
    whole = make_batch(3)
    labels, mask = whole.labels.clone(), torch.ones_like(whole.labels)
    labels[0, 0, 10:], mask[0, 0, 11:] = -100, 0
    batch = Batch(tokens=whole.tokens, labels=labels, attention_mask=mask)
    engine = make_engine(models[torch.float32])
    expected = plain_loss(models[torch.float32], batch).detach()
    torch.testing.assert_close(engine.evaluate(batch), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{"keep_activations": 4}, {"mlp_chunk": 5}, {}], ids=str)
def test_compiled_layers_evaluate_alike(models, options, monkeypatch):
    """The compiler's own work is left to another test: graphs are made alike for any backend."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    engine = make_engine(models[torch.float32], compile=True, **options)
    expected = plain_loss(models[torch.float32], make_batch(0)).detach()
    torch.testing.assert_close(engine.evaluate(make_batch(0)), expected, rtol=1e-5, atol=0)
    loss = engine.train_step(make_batch(0))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_one_chunk_of_logits_without_a_graph_is_alive_in_an_evaluation(models):
    engine, batch = make_engine(models[torch.float32], loss_chunk=16), make_batch(0)
    inner, seen = engine._decoder.logits, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        output = inner(hidden)
        seen.append((output.shape[:-1].numel(), output.requires_grad))
        return output

    engine._decoder.logits = logits
    engine.evaluate(batch)
    assert seen == [(16, False)] * 2


def test_an_evaluation_that_raises_leaves_training_as_it_was():
    model, batch = make_model("bloom", attention="eager", **MIXING["bloom"]), packed_batch()
    train_on = Batch(tokens=batch.tokens, labels=batch.labels)
    losses = []
    for raises in (False, True):
        engine = make_engine(model, batch=batch, recipe=RECIPE)
        found = [engine.train_step(train_on)]
        if raises:
            with pytest.raises(RefusedError, match=r"^batch\.position_ids"):
                engine.evaluate(batch)
        found += [engine.train_step(train_on) for _ in range(2)]
        losses.append([loss.item() for loss in found])
        engine.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 2, 8), (0, 2, 16)], ids=str)
def test_an_evaluation_of_another_shape_is_one_line(models, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^batch\.tokens: got torch\.int64 of shape") as caught:
        make_engine(models[torch.float32]).evaluate(Batch(tokens=tokens, labels=tokens))
    assert "\n" not in str(caught.value)


def test_each_steps_gradient_norm_stays_and_is_that_before_clipping(models):
    norms, losses = [], []
    for clip_norm in (0.05, 100.0):
        recipe = Recipe(lr=1e-9, clip_norm=clip_norm)  # next to no update
        engine = make_engine(models[torch.float32], recipe=recipe, lanes=TwinLanes(seed=1))
        assert engine.gradient_norm is None
        found = []
        for step in range(3):
            losses.append(engine.train_step(make_batch(step)))
            found.append(engine.gradient_norm)
        engine.drain()
        norms.append(torch.stack(found))
        assert norms[-1][-1] == engine.executor.memory.verdict[1]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    assert len(set(norms[0].tolist())) == 3


def test_without_clipping_there_is_no_gradient_norm(models):
    engine = make_engine(models[torch.float32], recipe=Recipe(clip_norm=0.0))
    engine.train_step(make_batch(0))
    assert engine.gradient_norm is None
