"""Loss on held-out text: the value, that every system is asked the same way, and what a user can get wrong."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from baselines.model import initial_weights, materialise
from baselines.system import build
from sweeps import auto, data, heldout
from sweeps.config import Cell
from sweeps.run import command_of

SMALL = ["model=tiny", "shape.batch_size=2", "shape.seq_len=16", "measure.heldout_sequences=3"]


def cell_of(*overrides: str) -> Cell:
    auto.register("cpu")
    (cell,) = command_of([*SMALL, *overrides]).cells or []
    return cell


def test_it_is_the_plain_models_mean_cross_entropy_over_the_tail():
    cell = cell_of("system=in_memory")
    spec = cell.spec()
    model = materialise(spec.model, torch.float32, spec.device, initial_weights(spec.model, 1, torch.float32, spec.device))
    tail = data.corpus_of(cell.data).heldout[: 3 * 17].view(3, 17).long()
    with torch.no_grad():
        logits = model(input_ids=tail[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tail[:, 1:].flatten())
    assert heldout.loss(model, cell) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("system", ["megatrain", "fsdp2"])
def test_a_system_is_asked_for_what_it_trained(system: str):
    losses = {}
    for name in ("in_memory", system):
        cell = cell_of(f"system={name}", "recipe.lr=1e-2", "recipe.warmup_steps=0")
        spec = cell.spec()
        one = build(name, spec)
        one.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
        steps = data.batches(data.corpus_of(cell.data), cell.shape, 0)
        before = heldout.loss(heldout.trained(one, cell), cell)
        for _ in range(6):
            one.train_step(next(steps))
        one.drain()
        losses[name] = heldout.loss(heldout.trained(one, cell), cell)
        one.close()
        assert losses[name] < before - 0.3
    assert losses[system] == pytest.approx(losses["in_memory"], abs=2e-2)


def test_more_than_is_held_out_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^measure.heldout_sequences: got 40, allowed at most 38 of 16 tokens \(655 bytes"):
        cell_of("data.max_bytes=65536", "data.heldout_fraction=0.01", "measure.heldout_sequences=40", f"output_dir={tmp_path}/out")
    assert not (tmp_path / "out").exists()
