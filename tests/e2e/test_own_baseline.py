"""A baseline of a stranger's own is one Python file and one YAML, and no line of this project
changes for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.rowfile import read_rows
from tests.e2e.test_sweeps_cli import ROOT, SMALL, sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CODE = '''
"""Adagrad: plain torch on one device, with another optimizer than the recipe's."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from baselines import footprint
from baselines.loss import loss_of
from baselines.model import count_params, materialise
from baselines.rival import Rival, micro_batches, raise_unless_finite
from baselines.system import Unsupported
from engine import Batch, Plan


class Adagrad(Rival):
    """Plain training on one device, as a `TrainingSystem`."""

    caveat = "Adagrad, where the recipe has AdamW"

    def plan(self) -> Plan:
        """Bytes by kind; allocates nothing."""
        total = count_params(self.spec.model).total
        activations = footprint.activation_bytes(self.spec, self.options)
        bytes_by_kind = {"weights": 4 * total, "moments": 4 * total, "gradients": 4 * total}
        return footprint.plan_on(self.spec.device, bytes_by_kind | activations, {})

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights and make the optimizer."""
        self.model = materialise(self.spec.model, torch.float32, self.spec.device, weights)
        self.loss = loss_of(self.model, self.options)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=self.spec.recipe.lr)

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One step over all micro-batches; the mean loss, unsynchronised."""
        total = torch.zeros((), device=self.spec.device)
        self.optimizer.zero_grad()
        for tokens, labels, mask, places in micro_batches(batch, self.spec.device):
            loss = self.loss(tokens, labels, mask, batch.num_tokens, places)
            loss.backward()
            total += loss.detach()
        raise_unless_finite(total, "the loss", self._step)
        with self._optimizing():
            self.optimizer.step()
        return total

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 copy on the host), one at a time."""
        for name, param in self.model.named_parameters():
            yield name, param.detach().to("cpu", copy=True)

    def save(self, directory: Path) -> None:
        """Unsupported."""
        raise Unsupported("save: Adagrad has no checkpoints; train with system=in_memory")

    resume = save
'''
SETTINGS = """
# Its name in rows and figures.
name: adagrad
# Where its code is.
implementation: own_adagrad:Adagrad
# Compute dtype.
dtype: float32
"""


def test_the_example_would_pass_lint_and_format() -> None:
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    where = ["--stdin-filename", "baselines/adagrad.py", "-"]
    for asked in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *asked, *where],
            input=CODE.removeprefix("\n"),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_baseline_of_ones_own_is_measured(tmp_path: Path) -> None:
    (tmp_path / "conf" / "system").mkdir(parents=True)
    (tmp_path / "own_adagrad.py").write_text(CODE)
    (tmp_path / "conf" / "system" / "adagrad.yaml").write_text(SETTINGS)
    where = [
        f"--config-dir={tmp_path / 'conf'}",
        "system=adagrad",
        "model=tiny",
        "logging=none",
        *SMALL,
    ]
    done = sweep(tmp_path / "out", *where, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr
    (row,) = read_rows(tmp_path / "out" / "rows.jsonl")
    assert (row.system, row.status, row.caveat) == (
        "adagrad",
        "ok",
        "Adagrad, where the recipe has AdamW",
    )
    assert row.tokens_per_s > 0
    assert row.losses[-1] < row.losses[0]
    assert row.plan["device"]["moments"] == 4 * row.num_params
