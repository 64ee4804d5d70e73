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
from engine.schedule import Pipeline


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


def layer_activation_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Bytes that one decoder layer's graph holds, plus the largest temporaries of its backward.

    config: a transformers config. Counted for a pre-norm layer with rotary attention through a fused kernel and a
    gated MLP, run eagerly: each norm keeps an fp32 copy of its input, the normalised and the scaled values; the
    projections, rotary and attention keep queries, keys and values before and after; the MLP keeps gate, activation,
    up and product; the backward holds three MLP-wide and two hidden-wide temporaries at once.
    """
    hidden: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or 4 * hidden
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width
    kept = 2 * (4 + 2 * itemsize) * hidden + itemsize * (4 * queries + 5 * keys + 4 * inner)
    return tokens * (kept + itemsize * (3 * inner + 2 * hidden))


def logits_bytes(vocab_size: int, tokens: int, itemsize: int) -> int:
    """Bytes of one chunk's logits: as computed and its gradient, in fp32 and its gradient and log-softmax."""
    return tokens * vocab_size * (2 * itemsize + 12)


def device_bytes(
    pipeline: Pipeline, layouts: Sequence[Layout], config: Any, dtype: torch.dtype, shape: tuple[int, int, int], loss_chunk: int
) -> dict[str, int]:
    """Peak device bytes by kind. shape: (number of micro-batches, rows, seq_len)."""
    num_micro_batches, rows, seq_len = shape
    size, tokens = dtype.itemsize, rows * seq_len
    layer = max(layout.numel for layout in layouts[1:-1])
    outer = layouts[0].numel + layouts[-1].numel
    chunked = num_chunks(rows, seq_len, loss_chunk) * num_micro_batches > 1
    wide = (layer * (num_micro_batches > 1) + outer * chunked) * 4 if dtype != torch.float32 else 0
    saved = -(-pipeline.num_layers // pipeline.checkpoint_interval) + pipeline.checkpoint_interval - 1
    head = logits_bytes(config.vocab_size, min(tokens, loss_chunk), size) + outer * size
    hidden = tokens * config.hidden_size * size
    return {
        "weights": (pipeline.depth * layer + outer) * size,
        "gradients": (pipeline.depth * layer + outer) * size + wide,
        "checkpoints": (saved + 2) * num_micro_batches * hidden,
        # The head and one layer's backward never overlap in time.
        "activations": max(layer_activation_bytes(config, tokens, size) + layer * size, head),
    }
