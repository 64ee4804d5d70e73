"""Loss on the text that no system trains on: of the library's plain model, with the parameters that
a system trained.

Invariant: it comes after the measurement and changes nothing in it; every system is asked the same
way, through `parameters()`.
"""

from __future__ import annotations

import torch
from torch import nn

from baselines.loss import CausalLMLoss
from baselines.model import decoder_layers, materialise
from baselines.system import Shape, TrainingSystem
from sweeps import data
from sweeps.config import Cell


def trained(system: TrainingSystem, cell: Cell) -> nn.Module:
    """The plain model on the CPU, in the dtype of the cell, with the system's parameters as they
    are after its last step."""
    spec = cell.spec()
    return materialise(spec.model, spec.dtype, torch.device("cpu"), system.parameters())


@torch.no_grad()
def loss(model: nn.Module, cell: Cell) -> float | None:
    """Mean over the label tokens of `measure.heldout_tokens`, a sequence at a time on the cell's
    device, nats; None: no text."""
    spec, seq_len = cell.spec(), cell.shape.seq_len
    shape = Shape(batch_size=1, seq_len=seq_len, num_micro_batches=1)
    layers = decoder_layers(model)  # all kept: there is no backward to recompute them for
    plain = CausalLMLoss(model.to(spec.device).eval(), keep_activations=len(layers))
    total, num_tokens = 0.0, 0
    for sequence in data.heldout(data.corpus_of(cell.data), seq_len, cell.measure.heldout_tokens):
        batch = data.pack([sequence], shape)
        total += float(
            plain(batch.tokens[0].to(spec.device), batch.labels[0].to(spec.device), None, 1)
        )
        num_tokens += batch.num_tokens
    return total / num_tokens if num_tokens else None
