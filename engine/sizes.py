"""Closed-form bytes of a run, by kind. Nothing here allocates.

Invariant: every byte that the engine allocates at setup appears here under its own kind, so plan beside
observed is a comparison and not a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from engine.layers.head import num_chunks
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
    heads: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        """From a transformers config: of its text model where there are several, of the widest layer where layers differ."""
        config = config.get_text_config(decoder=True) if hasattr(config, "text_config") else config
        if not getattr(config, "is_heterogeneous", False):
            return cls._of_layer(config)
        each = [cls._of_layer(layer) for layer in config.per_layer_config]
        return cls(**{f.name: max(getattr(widths, f.name) for widths in each) for f in fields(cls)})

    @classmethod
    def _of_layer(cls, config: Any) -> Widths:
        """A layer without attention, as Mamba's, has no heads."""
        heads = _number(config, "num_attention_heads")
        width = _number(config, "head_dim") or (config.hidden_size // heads if heads else 0)
        return cls(
            hidden=config.hidden_size,
            inner=_number(config, "intermediate_size") or 4 * config.hidden_size,
            queries=heads * width,
            keys=(_number(config, "num_key_value_heads") or heads) * width,
            vocab=config.vocab_size,
            heads=heads,
        )


def _number(config: Any, name: str) -> int:
    """A size as the config has it, the largest where it has one a layer, 0 where it has none."""
    value = getattr(config, name, None) or 0
    return max(value) if isinstance(value, (list, tuple)) else value


def layer_activation_bytes(
    config: Any, tokens: int, itemsize: int, *, backward: bool = True, compiled: bool = False, mlp_chunk: int = 0
) -> int:
    """Bytes that one decoder layer's graph holds, its output too, and where `backward` the temporaries of its backward.

    config: a transformers config. Counted for a pre-norm layer with rotary attention through a fused kernel and a dense
    gated MLP. Eager: each norm keeps an fp32 copy of its input, the normalised and the scaled values; attention its queries,
    keys, values and output; the MLP gate, activation, up and product; the backward two MLP-wide temporaries. Compiled
    (template.py): gate and up, queries, keys, values, attention's output and what is added to the residual; the
    backward rebuilds the rest, four MLP-wide temporaries. Within 1% of the allocator's peaks with layers of the 3B, 7B
    and 14B shapes at 32,768 tokens.

    mlp_chunk: tokens that the MLP takes at a time (chunked.py), 0 all. Where it is fewer the layer is eager but for the MLP, of
    which nothing is kept. Its backward holds a chunk's MLP-wide values, its input's gradient and fp32 sums of its weights'; that
    of the norm before it, later, five fp32 temporaries, when all but that norm's fp32 copy is gone. The larger is the peak.
    """
    w = Widths.of(config)
    attention = itemsize * 2 * (w.queries + w.keys) + 4 * w.heads  # and the softmax's log-sums
    if 0 < mlp_chunk < tokens:
        kept = attention + 2 * (4 + 2 * itemsize) * w.hidden + itemsize * w.hidden
        mlp = itemsize * (w.hidden * tokens + (6 * w.inner + w.hidden) * mlp_chunk) + 4 * 3 * w.inner * w.hidden
        norm = (5 * 4 - 2 * itemsize) * w.hidden * tokens
        return tokens * kept + backward * max(mlp, norm)
    if compiled:
        kept, temporary = attention + itemsize * 2 * (w.inner + w.hidden), 4 * w.inner + w.hidden
    else:
        norms = 2 * (4 + 2 * itemsize) * w.hidden
        kept, temporary = attention + norms + itemsize * (4 * w.inner + w.hidden), 2 * w.inner + w.hidden
    return tokens * (kept + backward * itemsize * temporary)


def offloaded_bytes(config: Any, tokens: int, itemsize: int, *, compiled: bool = False, mlp_chunk: int = 0) -> int:
    """Bytes of a layer's graph that can wait on the host: all but its output, which is the next layer's input."""
    output = tokens * Widths.of(config).hidden * itemsize
    return layer_activation_bytes(config, tokens, itemsize, backward=False, compiled=compiled, mlp_chunk=mlp_chunk) - output


def logits_bytes(vocab_size: int, tokens: int, itemsize: int, *, compiled: bool = False) -> int:
    """Bytes of one chunk's logits at their peak: fp32 log-softmax and two gradients; compiled, as computed and one gradient."""
    return tokens * vocab_size * (2 * itemsize if compiled else 12)


def device_bytes(
    pipeline: Pipeline,
    layouts: Sequence[Layout],
    config: Any,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    loss_chunk: int,
    *,
    compiled: bool = False,
    mlp_chunk: int = 0,
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
    widths = Widths.of(config)
    hidden = tokens * widths.hidden * size
    chunk, matrix = min(tokens, loss_chunk), max(layouts[0].numel, layouts[-1].numel)
    logits = logits_bytes(widths.vocab, chunk, size, compiled=compiled)
    head = max(logits, (chunk * widths.vocab + matrix) * size)  # then one gradient of the logits and the head's own
    layer_bytes = partial(layer_activation_bytes, config, tokens, size, compiled=compiled, mlp_chunk=mlp_chunk)
    kept = num_micro_batches * layer_bytes(backward=False)
    moved = num_micro_batches * offloaded_bytes(config, tokens, size, compiled=compiled, mlp_chunk=mlp_chunk)
    graph = layer_bytes() + layer * size  # and a layer's gradients
    temporary = graph - layer_bytes(backward=False)
    back = min(p.offloaded_layers, max(1, p.kept_layers)) * moved  # fetched ahead of their backward
    peaks = [
        _forward_peak(p, kept, moved),
        p.kept_layers * kept + head,
        p.kept_layers * kept + temporary if p.kept_layers else 0,
        back + (graph if p.kept_layers + p.offloaded_layers < p.num_layers else temporary),
    ]
    return {
        "weights": weights * size,
        "gradients": slabs * size + wide,
        "checkpoints": (saved + 2) * num_micro_batches * hidden,
        "kept": p.kept_layers * kept,
        "activations": max(peaks) - p.kept_layers * kept,
    }


def _forward_peak(p: Pipeline, kept: int, moved: int) -> int:
    """Most bytes at once of kept activations and of those that have not left yet."""
    drops, held, most = p.drops(), 0, 0
    for layer in range(1, p.head):
        held -= moved * sum(due == layer for due in drops.values())
        held += kept if p.is_kept(layer) else moved if p.is_offloaded(layer) else 0
        most = max(most, held)
    return most
