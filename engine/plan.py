"""Closed-form bytes of a run, by kind. Nothing here allocates.

Invariant: every byte that the engine allocates at setup appears here under its own kind, so plan beside
observed is a comparison and not a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.head import num_chunks
from engine.layout import Layout
from engine.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted peak bytes: `device` and `host` map a kind (weights, master, moments, ...) to bytes."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Predicted device peak, bytes."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Predicted host peak, bytes."""
        return sum(self.host.values())


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Values a token of each part of a decoder layer and of the logits."""

    hidden: int
    inner: int
    """Of the MLP."""
    queries: int
    keys: int
    """Of the keys; the values have as many."""
    vocab: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        """From a transformers config."""
        heads: int = config.num_attention_heads
        width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            hidden=config.hidden_size,
            inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            queries=heads * width,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * width,
            vocab=config.vocab_size,
        )


def layer_activation_bytes(config: Any, tokens: int, itemsize: int, *, backward: bool = True, compiled: bool = False) -> int:
    """Bytes that one decoder layer's graph holds and, where `backward`, the largest temporaries of its backward.

    config: a transformers config. Counted for a pre-norm layer with rotary attention through a fused kernel and a
    gated MLP, run eagerly: each norm keeps an fp32 copy of its input, the normalised and the scaled values; the
    projections, rotary and attention keep queries, keys and values before and after; the MLP keeps gate, activation,
    up and product; the backward holds three MLP-wide and two hidden-wide temporaries at once. `compiled`: what
    torch.compile was seen to keep (3B and 7B shapes, within 5%): gate, up and product; queries, keys, values and the
    attention's output; three values of the hidden width.
    """
    w = Widths.of(config)
    kept = 2 * (4 + 2 * itemsize) * w.hidden + itemsize * (4 * w.queries + 5 * w.keys + 4 * w.inner)
    if compiled:
        kept = itemsize * (3 * w.inner + 2 * w.queries + 2 * w.keys + 3 * w.hidden)
    return tokens * (kept + backward * itemsize * (3 * w.inner + 2 * w.hidden))


def logits_bytes(vocab_size: int, tokens: int, itemsize: int) -> int:
    """Bytes of one chunk's logits: as computed and its gradient, in fp32 and its gradient and log-softmax."""
    return tokens * vocab_size * (2 * itemsize + 12)


def device_bytes(
    pipeline: Pipeline,
    layouts: Sequence[Layout],
    config: Any,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    loss_chunk: int,
    *,
    compiled: bool = False,
) -> dict[str, int]:
    """Peak device bytes by kind, without optimizer state. shape: (number of micro-batches, rows, seq_len)."""
    num_micro_batches, rows, seq_len = shape
    size, tokens = dtype.itemsize, rows * seq_len
    p, layer = pipeline, max(layout.numel for layout in layouts[1:-1])
    outer = layouts[0].numel + layouts[-1].numel
    blocks = range(p.num_blocks)
    weights, slabs = (
        sum(layouts[b].numel for b in blocks if owns(b)) + p.depth * layer * (not all(map(owns, blocks)))
        for owns in (p.owns_weights, p.owns_gradients)
    )
    chunked = num_chunks(rows, seq_len, loss_chunk) * num_micro_batches > 1
    wide = (layer * (num_micro_batches > 1) + outer * chunked) * 4 if dtype != torch.float32 else 0
    saved = -(-(p.num_layers - p.kept_layers) // p.checkpoint_interval) + p.checkpoint_interval - 1
    head = logits_bytes(config.vocab_size, min(tokens, loss_chunk), size) + outer * size
    hidden = tokens * config.hidden_size * size
    return {
        "weights": weights * size,
        "gradients": slabs * size + wide,
        "checkpoints": (saved + 2) * num_micro_batches * hidden,
        "kept": p.kept_layers * num_micro_batches * layer_activation_bytes(config, tokens, size, backward=False, compiled=compiled),
        # The head and one layer's backward never overlap in time.
        "activations": max(layer_activation_bytes(config, tokens, size, compiled=compiled) + layer * size, head),
    }
