"""Whether a model keeps packed documents apart: tried, not looked up.

A tiny model of the type is run on documents packed into one sequence and on each by itself.
Invariant: a type whose logits differ is refused in one line, before any cell runs.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from baselines.model import build_skeleton, decoder_layers, skip_packed_sequence_check
from baselines.system import ModelSpec, Unsupported
from engine import RefusedError, packed, refuse_mixing
from sweeps.tiny import VOCAB, tiny_config

LENGTHS = (5, 1, 7, 11)
"""Tokens of the documents, of which the second is alone with itself."""
LARGEST = 1e-4
"""Difference of logits over the largest logit, which rounding may make."""


def require(spec: ModelSpec) -> None:
    """ValueError, one line, where packed documents would see each other, or where that cannot be
    tried."""
    model = build_skeleton(spec, torch.bfloat16)
    try:
        refuse_mixing(model, decoder_layers(model))
        why = _found(spec.model_type, spec.attn_implementation)
    except RefusedError as error:
        why = str(error).partition(", allowed")[0]
    except Unsupported as error:
        why = str(error)
    if why:
        raise ValueError(
            f"model.model_type: got {spec.model_type!r} for data.files, whose documents are packed "
            f"into sequences ({why}), allowed types that keep documents apart, such as llama or "
            "qwen2; choose another, model.attn_implementation=sdpa, or data=stdlib"
        )


@lru_cache
def _found(model_type: str, attention: str) -> str:
    """What is wrong with the type, or why it cannot be tried; nothing where documents do not see
    each other."""
    try:
        difference = _difference(model_type, attention)
    except Exception as error:  # whatever a model raises that takes no packed documents
        return " ".join(str(error).split())[:200]
    return "" if difference <= LARGEST else f"tried tiny, its logits differ by {difference:.0e}"


@torch.no_grad()
def _difference(model_type: str, attention: str) -> float:
    """Largest difference of a logit, packed and apart, over the largest logit."""
    from transformers import AutoModelForCausalLM

    skip_packed_sequence_check()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        from_config: Any = AutoModelForCausalLM.from_config
        model = from_config(tiny_config(model_type), attn_implementation=attention).float()
        for parameter in model.parameters():
            parameter.mul_(4.0)  # tokens weigh on each other
        tokens = torch.randint(2, VOCAB, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with packed(positions):
        together = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    places = pairwise(accumulate(LENGTHS, initial=0))
    parts = [model(input_ids=tokens[:, i:j], use_cache=False).logits for i, j in places]
    apart = torch.cat(parts, dim=1)
    return float((together - apart).abs().max() / apart.abs().max())
