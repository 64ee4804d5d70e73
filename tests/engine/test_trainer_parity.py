"""The engine against transformers' own Trainer, on the quickstart's model and data in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from baselines.model import config_of, initial_weights
from baselines.registry import build
from baselines.system import SystemSpec
from engine import Batch, Recipe
from sweeps import data
from tests.sweeps.test_config import composed

NUM_STEPS, WARMUP, LR = 30, 5, 1e-3
FACTORS: dict[str, Callable[[int], float]] = {
    "constant": lambda step: min(1.0, (step + 1) / WARMUP),
    "linear": lambda step: (
        (step + 1) / WARMUP if step < WARMUP else (NUM_STEPS - step) / (NUM_STEPS - WARMUP)
    ),
}
"""Of the learning rate, written out: the engine's own `lr_at` is what is tested."""


@cache
def quickstart() -> tuple[SystemSpec, tuple[Batch, ...]]:
    """What `make bench` trains without a GPU, in fp32, and its first batches."""
    cell = composed("+experiment=quickstart")
    batches = data.ByteStream(data.corpus_of(cell.data), cell.shape, cell.seed)
    spec = SystemSpec(
        model=cell.model, shape=cell.shape, recipe=recipe("constant"), dtype=torch.float32
    )
    return spec, tuple(itertools.islice(batches, NUM_STEPS))


def recipe(schedule: str) -> Recipe:
    """AdamW as `torch.optim.AdamW` has it by default, warm-up and clipping."""
    return Recipe(
        lr=LR,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=schedule,
        warmup_steps=WARMUP,
        total_steps=NUM_STEPS,
    )


def ours(schedule: str) -> torch.Tensor:
    spec, batches = quickstart()
    trainer = build("megatrain", replace(spec, recipe=recipe(schedule), options={"num_threads": 1}))
    trainer.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
    losses = [trainer.train_step(batch).detach().clone() for batch in batches]
    trainer.drain()
    trainer.close()
    return torch.stack(losses)


class Sequences(IterableDataset[dict[str, torch.Tensor]]):
    """Whole sequences, one byte longer than a batch's rows: the library shifts the labels
    itself."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in quickstart()[1]:
            rows = torch.cat([batch.tokens, batch.labels[..., -1:]], dim=-1).flatten(0, 1)
            yield from ({"input_ids": row, "labels": row} for row in rows)


class Recording(Trainer):
    """Keeps every step's loss, which the log would round to four digits."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.detach().clone()]
        return loss


def theirs(schedule: str, folder: Path) -> torch.Tensor:
    spec, _ = quickstart()
    model = AutoModelForCausalLM.from_config(config_of(spec.model), attn_implementation="sdpa")
    model.load_state_dict(
        dict(initial_weights(spec.model, 0, spec.dtype, spec.device)), strict=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=spec.shape.batch_size,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    schedule_of = torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS[schedule])
    trainer = Recording(
        model=model, args=arguments, train_dataset=Sequences(), optimizers=(optimizer, schedule_of)
    )
    trainer.train()
    return torch.stack(trainer.losses)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FACTORS)
def test_30_steps_are_those_of_the_trainer_of_transformers(schedule: str, tmp_path: Path) -> None:
    expected = theirs(schedule, tmp_path)
    assert expected[-1] < 0.7 * expected[0]
    torch.testing.assert_close(ours(schedule), expected, rtol=0, atol=5e-6)
