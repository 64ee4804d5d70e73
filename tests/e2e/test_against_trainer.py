"""A run of `sweeps.train` against the Trainer of transformers, a trainer that nobody here wrote:
the same checkpoint, order of the data and AdamW, in fp32. The rate is constant, for a warm-up there
begins at 0 and here at lr / warmup_steps."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from sweeps import train
from sweeps.text import stream_of
from tests.baselines.test_checkpoint import made

pytestmark = pytest.mark.slow

STEPS, ROWS, LENGTH = 100, 4, 24
TOLERANCE = 1e-5
"""Largest relative difference of a loss."""


class Sequences(Dataset):
    """The sequences of the run's first epoch, in its order, as the Trainer wants them: it shifts
    labels itself."""

    def __init__(self, sequences: torch.Tensor) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.sequences[index].long()
        return {"input_ids": tokens, "labels": tokens}


class Recorder(Trainer):
    """Keeps every loss unrounded, and the order of the data."""

    losses: list[float]

    def _get_train_sampler(self, *_):
        return None

    def training_step(self, *given, **more):
        loss = super().training_step(*given, **more)
        self.losses.append(float(loss))
        return loss


def by_trainer(checkpoint: Path, sequences: torch.Tensor, folder: Path) -> list[float]:
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=1.0,
        adam_beta2=0.99,
        optim="adamw_torch",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Recorder(model=model, args=arguments, train_dataset=Sequences(sequences))
    trainer.losses = []
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize("system", ["megatrain", "in_memory"])
def test_the_losses_are_those_of_transformers_own_trainer(system, tmp_path, monkeypatch):
    monkeypatch.setenv(train.STARTED, "1")
    made("qwen2").float().save_pretrained(tmp_path / "checkpoint")
    overrides = [
        f"system={system}",
        "system.dtype=float32",
        "model=checkpoint",
        f"model.checkpoint={tmp_path / 'checkpoint'}",
        f"shape.batch_size={ROWS}",
        f"shape.seq_len={LENGTH}",
        "data.max_bytes=65536",
        "recipe.lr=3e-3",
        "recipe.warmup_steps=0",
        "recipe.weight_decay=0.1",
        "recipe.decayed=matrices",
        "recipe.beta2=0.99",
        "logging=none",
        f"train.steps={STEPS}",
        f"output_dir={tmp_path / 'run'}",
    ]
    assert train.main(overrides) == 0
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    mine = torch.tensor([json.loads(line)["loss"] for line in lines], dtype=torch.float64)
    cell, _ = train.compose_train(overrides)
    epoch = stream_of(cell).epoch(0)
    sequences = torch.stack([epoch[index] for index in range(STEPS * ROWS)])
    theirs = by_trainer(tmp_path / "checkpoint", sequences, tmp_path / "trainer")
    theirs = torch.tensor(theirs, dtype=torch.float64)
    assert mine[-1] < 0.8 * mine[0]
    assert torch.max(torch.abs(mine - theirs) / theirs) < TOLERANCE
