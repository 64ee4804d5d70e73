"""Loss on the text that no system trains on: of the library's plain model, with the parameters that
a system trained.

Invariant: it comes after the measurement and changes nothing in it; every system is asked the same
way, through `parameters()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from baselines.loss import CausalLMLoss
from baselines.model import decoder_layers, materialise
from baselines.rival import micro_batches
from baselines.system import TrainingSystem
from engine import IGNORE_INDEX, Batch
from sweeps.config import Cell
from sweeps.data import Stream
from sweeps.text import stream_of


def trained(system: TrainingSystem, cell: Cell) -> nn.Module:
    """The plain model on the CPU, in the dtype of the cell, with the system's parameters as they
    are after its last step."""
    spec = cell.spec()
    return materialise(spec.model, spec.dtype, torch.device("cpu"), system.parameters())


def batches(cell: Cell) -> list[Batch]:
    """The same text for the system itself."""
    return batches_of(stream_of(cell), cell.measure.heldout_tokens)


def batches_of(stream: Stream[Any], num_tokens: int) -> list[Batch]:
    """The first held-out sequences, as many at once as the stream's micro-batches have.

    The last batch is filled up with sequences without labels, so that all are of one shape.
    """
    alone, num_rows = list(stream.heldout(num_tokens)), stream.shape.micro_batch_size
    return [
        _joined(alone[first : first + num_rows], num_rows)
        for first in range(0, len(alone), num_rows)
    ]


def _joined(alone: Sequence[Batch], num_rows: int) -> Batch:
    filled = dataclasses.replace(alone[0], labels=torch.full_like(alone[0].labels, IGNORE_INDEX))
    rows = [*alone, *[filled] * (num_rows - len(alone))]
    places = [row.position_ids for row in rows if row.position_ids is not None]
    return Batch(
        tokens=torch.cat([row.tokens for row in rows], dim=1),
        labels=torch.cat([row.labels for row in rows], dim=1),
        position_ids=torch.cat(places, dim=1) if places else None,
    )


@torch.no_grad()
def loss(model: nn.Module, cell: Cell) -> float | None:
    """Mean over the label tokens of `measure.heldout_tokens`, a sequence at a time on the cell's
    device, nats; None: no text."""
    spec = cell.spec()
    layers = decoder_layers(model)  # all kept: there is no backward to recompute them for
    plain = CausalLMLoss(model.to(spec.device).eval(), keep_activations=len(layers))
    total, num_tokens = 0.0, 0
    for batch in stream_of(cell).heldout(cell.measure.heldout_tokens):
        ((tokens, labels, mask, places),) = micro_batches(batch, spec.device)
        total += float(plain(tokens, labels, mask, 1, places))
        num_tokens += batch.num_tokens
    return total / num_tokens if num_tokens else None
