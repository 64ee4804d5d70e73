"""Bytes of one decoder layer's activations and of a piece of the logits, in closed form, from the
widths of a model.

Exact for pre-norm layers; `layers/rehearsal.py` counts what others take.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from engine.layers.live import kernel_bytes


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Values a token of each part of a decoder layer and of the logits."""

    hidden: int
    inner: int
    """The MLP's own width."""
    queries: int
    keys: int
    """All keys; the values have as many."""
    vocab: int
    heads: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        """From a transformers config: of its text model where there are several, of the widest
        layer where layers differ."""
        if hasattr(config, "text_config"):
            config = config.get_text_config(decoder=True)
        if not getattr(config, "is_heterogeneous", False):
            return cls._of_layer(config)
        each = [cls._of_layer(layer) for layer in config.per_layer_config]
        return cls(**{f.name: max(getattr(w, f.name) for w in each) for f in fields(cls)})

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
    widths: Widths,
    tokens: int,
    itemsize: int,
    *,
    backward: bool = True,
    compiled: bool = False,
    mlp_chunk: int = 0,
) -> int:
    """Bytes that one decoder layer's graph holds, its output too, and where `backward` the
    temporaries of its backward.

    Counted for a pre-norm layer with rotary attention through a fused kernel and a dense gated MLP.
    Eager: each norm keeps an fp32 copy of its input, the normalised and the scaled values;
    attention its queries, keys, values and output; the MLP gate, activation, up and product; the
    backward two MLP-wide temporaries. Compiled (layers/template.py): gate and up, queries, keys,
    values, attention's output and what is added to the residual; the backward rebuilds the rest,
    four MLP-wide temporaries. Within 1% of the allocator's peaks with layers of the 3B, 7B and 14B
    shapes at 32,768 tokens.

    mlp_chunk: tokens that the MLP and the norms take at a time (layers/chunked.py), 0 all. Where it
    is fewer the layer is eager but for these. Beside attention's it keeps what each norm and each
    sum with the residual gives. Its backward, without the output, is at its peak in the MLP, with a
    chunk's MLP-wide values, its input's gradient and fp32 sums of its weights'; or in attention,
    when what is behind it is gone, with the gradients of its output, queries, keys, values and the
    residual.
    """
    w = widths
    attention = itemsize * 2 * (w.queries + w.keys) + 4 * w.heads  # and the softmax's log-sums
    if 0 < mlp_chunk < tokens:
        kept = attention + itemsize * 4 * w.hidden
        mlp = itemsize * (6 * w.inner + w.hidden) * mlp_chunk
        sums = 4 * 3 * w.inner * w.hidden
        attends = itemsize * 2 * (w.queries + w.keys - w.hidden) + kernel_bytes(
            w.queries, w.keys, itemsize
        )
        return tokens * kept + (max(mlp + sums, attends * tokens) if backward else 0)
    if compiled:
        kept = attention + itemsize * 2 * (w.inner + w.hidden)
        temporary = 4 * w.inner + w.hidden
    else:
        norms = 2 * (4 + 2 * itemsize) * w.hidden
        kept = attention + norms + itemsize * (4 * w.inner + w.hidden)
        temporary = 2 * w.inner + w.hidden
    return tokens * (kept + (itemsize * temporary if backward else 0))


def logits_bytes(vocab_size: int, tokens: int, itemsize: int, *, compiled: bool = False) -> int:
    """Bytes of one chunk's logits at their peak: fp32 log-softmax and two gradients; compiled, as
    computed and one gradient."""
    return tokens * vocab_size * (2 * itemsize if compiled else 12)
