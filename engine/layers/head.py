"""Final norm, output head and loss, forward and, in training, backward, in chunks of tokens.

Invariant: one chunk's logits are alive at a time; each chunk is differentiated before the next is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from engine.layers.autograd import gradients
from engine.layers.decoder import Decoder
from engine.recipe import IGNORE_INDEX
from engine.sizes import chunks


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies in fp32, 0-dim. logits: [rows, tokens, vocabulary]; labels: int64
    [rows, tokens], -100 ignored."""
    return F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def loss_alone(
    decoder: Decoder,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_tokens: int,
    chunk: int,
    summed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = summed_cross_entropy,
) -> torch.Tensor:
    """The loss of `loss_and_gradients`, without a gradient."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in chunks(labels.shape[0], labels.shape[1], chunk):
        total += summed(decoder.logits(hidden[part]), labels[part]) / num_tokens
    return total


def loss_and_gradients(
    decoder: Decoder,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_tokens: int,
    chunk: int,
    parameters: Sequence[torch.Tensor],
    add: Callable[[Sequence[torch.Tensor | None]], None],
    summed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = summed_cross_entropy,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of `hidden`) of one micro-batch.

    hidden: [rows, seq_len, hidden]; labels: int64 [rows, seq_len], -100 ignored. The loss is the
    sum of the tokens' cross-entropies over `num_tokens`, fp32, 0-dim. `add` is given each chunk's
    gradients of `parameters`; `summed` is `summed_cross_entropy` or a compiled version of it.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden)
    for part in chunks(labels.shape[0], labels.shape[1], chunk):
        piece = hidden[part].detach().requires_grad_()
        with torch.enable_grad():
            loss = summed(decoder.logits(piece), labels[part]) / num_tokens
        grads = gradients(loss, [piece, *parameters])
        assert grads[0] is not None
        grad_hidden[part] = grads[0]
        add(grads[1:])
        total += loss.detach()
        del (
            grads
        )  # the head's own, as large as its weights, would be alive beside the next chunk's logits
    return total, grad_hidden
