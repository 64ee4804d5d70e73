"""Whether a model's configuration can be built and run at all, asked before anything is measured.

Invariant: costs no memory at any size, for parameters are on meta; what cannot be judged without
numbers passes, and is left to the system.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from baselines.checkpoint import CheckpointWeights, require_causal
from baselines.model import build_skeleton, config_of
from baselines.system import ModelSpec, Unsupported

MOST_LAYERS = 10_000
"""Each takes a millisecond to look at."""
MOST_PARAMS = 10**13
"""Their weights, master and moments take 120 TB, which no machine has."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Fields of a config, by their usual names, of which there is at least one each."""


def require_runnable(spec: ModelSpec) -> None:
    """ValueError, one line that names model.config, where the model cannot be built, its forward
    cannot run, or a buffer that follows from the config is not finite; or model.checkpoint, where
    that is not of this model."""
    try:
        if spec.checkpoint is not None:
            require_causal(spec)
        _require_numbers(spec)
        _require_size(spec)
        for name, buffer in build_skeleton(spec, torch.bfloat16).named_buffers():
            if buffer.is_floating_point() and not torch.isfinite(buffer.float()).all():
                raise ArithmeticError(f"{name} is not finite")
        _forward(spec)
        if spec.checkpoint is not None:
            CheckpointWeights(spec)  # looks at names and shapes
    except Unsupported:
        return  # not here, whatever the config: the cell says why
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("model."):
            raise
        raise ValueError(
            f"model.config: got {dict(spec.config)}, allowed what a {spec.model_type} model can be "
            f"built with and run; transformers says {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; correct it"
        ) from None


def _require_numbers(spec: ModelSpec) -> None:
    """What the config gives for the usual sizes and for small constants."""
    config = config_of(spec)
    usual = {own: name for name, own in config.attribute_map.items()}
    for key, value in spec.config.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        most = MOST_LAYERS if usual.get(key, key) == "num_hidden_layers" else math.inf
        if usual.get(key, key) in SIZES and not 1 <= value <= most:
            allowed = ">= 1" if most == math.inf else f"1 to {MOST_LAYERS}"
            raise ValueError(f"model.config.{key}: got {value}, allowed {allowed}; correct it")
        if key.endswith(("eps", "epsilon", "initializer_range")) and not 0 <= value < math.inf:
            raise ValueError(
                f"model.config.{key}: got {value}, allowed a finite number >= 0; correct it"
            )


def _on_meta(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return build_skeleton(spec, dtype)


def _require_size(spec: ModelSpec) -> None:
    num_params = sum(parameter.numel() for parameter in _on_meta(spec, torch.bfloat16).parameters())
    if num_params > MOST_PARAMS:
        raise ValueError(
            f"model.config: got {dict(spec.config)}, which makes {num_params:,} parameters, "
            f"allowed at most {MOST_PARAMS:,}; correct hidden_size, vocab_size or num_hidden_layers"
        )


def _forward(spec: ModelSpec) -> None:
    """Two tokens through the model on meta, in bf16 or else in fp32, which some layers need."""
    tokens: Any = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        _on_meta(spec, torch.bfloat16)(input_ids=tokens)
    except Exception:
        try:
            _on_meta(spec, torch.float32)(input_ids=tokens)
        except Exception as error:
            if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
                raise  # the others ask for a number, which a meta tensor has not
