"""Several documents in one sequence: which models keep them apart, and how the library is told.

Invariant: no document sees another. A packed batch brings position ids that begin at 0 in every
document; the model's own forward makes its masks from them, and a model that would mix documents
all the same is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import nn

from engine.config import RefusedError

_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)
ATTENTION = ("sdpa", "eager")
ALLOWED = (
    "allowed models all of whose layers mix tokens by attention under a mask that follows the "
    "position ids (model.attn_implementation sdpa or eager); choose one, or do not pack documents"
)


@contextlib.contextmanager
def packed(position_ids: torch.Tensor | None) -> Iterator[None]:
    """The block runs a model's forward on packed documents, or not where there are no position
    ids."""
    token = _INSIDE.set(position_ids is not None)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def is_packed() -> bool:
    """Whether a forward on packed documents is running, which nobody need then ask the device."""
    return _INSIDE.get()


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Number of each token's document in its row, from 0; int64 [rows, tokens], on the device.

    position_ids: [rows, tokens]. A document begins where a position does not follow the one before.
    """
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)


def refuse_mixing(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """RefusedError, one line, for a model that takes no position ids, or one with a layer that
    carries tokens on by a convolution, as state-space layers do."""
    name, config = type(model).__name__, getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", ATTENTION[0])
    if attention not in ATTENTION:
        raise RefusedError(f"batch.position_ids: got packed documents for {attention}, {ALLOWED}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise RefusedError(f"batch.position_ids: got packed documents for {name}, {ALLOWED}")
    for index, layer in enumerate(layers):
        if any(isinstance(module, nn.Conv1d) for module in layer.modules()):
            raise RefusedError(
                f"batch.position_ids: got packed documents for {name}, whose layer {index} "
                f"convolves over tokens, {ALLOWED}"
            )


def refuse_unmasked(
    model: nn.Module, given: Sequence[Sequence[torch.Tensor]], position_ids: torch.Tensor
) -> None:
    """RefusedError, one line, where a layer is called without a mask between documents.

    given: the tensors that each layer is called with. The masks are looked at, for there are models
    that make them without the position ids they take.
    """
    numbers = document_numbers(position_ids)
    across = numbers[:, None, :, None] != numbers[:, None, None, :]
    for index, values in enumerate(given):
        masks = [v for v in values if v.ndim == 4 and v.shape[-2:] == across.shape[-2:]]
        if not masks or any((_seen(mask) & across).any() for mask in masks):
            raise RefusedError(
                f"batch.position_ids: got packed documents for {type(model).__name__}, whose layer "
                f"{index} is given no mask between documents, {ALLOWED}"
            )


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """Which pairs of tokens an attention mask lets through, whether it is one to add or not."""
    return mask if mask.dtype == torch.bool else mask > -1e4
