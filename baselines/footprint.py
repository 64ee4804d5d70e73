"""Closed-form bytes that every baseline shares: activations, logits and the workspace of the libraries below.

Invariant: an upper estimate, meant to lie within 15% of the allocator's peak; nothing here allocates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baselines.common import CommonOptions
from baselines.model import build_skeleton, config_of
from baselines.system import ModelSpec, SystemSpec
from engine import Plan, layer_activation_bytes, logits_bytes

CUDA_WORKSPACE_BYTES = 1 << 30
"""cuBLAS and cuDNN workspaces and the allocator's fragments."""


def activation_bytes(spec: SystemSpec, options: CommonOptions) -> dict[str, int]:
    """`checkpoints` and `activations` of one micro-batch, by kind.

    checkpoints: every layer's input (none without checkpointing), the decoder's output and its gradient.
    activations: one layer's graph or one chunk's logits, whichever is larger, for they are never alive together; without
    checkpointing every layer's graph and the logits. Both formulas are the engine's, so that plans differ by schedule
    alone. Compiled, the layer's graph is still counted as if eager, an upper bound: the engine's compiled formula holds for
    its own partitioning. Eager attention adds its scores, in the compute dtype before and after, and their fp32 softmax.
    """
    config = config_of(spec.model)
    itemsize = spec.dtype.itemsize
    tokens = spec.shape.micro_batch_size * spec.shape.seq_len
    graph = layer_activation_bytes(config, tokens, itemsize)
    if spec.model.attn_implementation == "eager":
        graph += tokens * spec.shape.seq_len * config.num_attention_heads * (2 * itemsize + 4)
    logits = logits_bytes(config.vocab_size, min(options.loss_chunk, tokens), itemsize, compiled=options.compile)
    hidden = tokens * config.hidden_size * itemsize
    layers: int = config.num_hidden_layers
    if options.activation_checkpointing:
        return {"checkpoints": (layers + 2) * hidden, "activations": max(graph, logits)}
    return {"checkpoints": 2 * hidden, "activations": layers * graph + logits}


def plan_on(device: torch.device, on_device: Mapping[str, int], on_host: Mapping[str, int]) -> Plan:
    """The plan with the libraries' workspace added; the CPU has none."""
    workspace = CUDA_WORKSPACE_BYTES if device.type == "cuda" else 0
    return Plan(device={**on_device, "workspace": workspace}, host=dict(on_host))


def rounding(num_bytes: int) -> int:
    """Bytes that torch adds to a pinned block: up to the next power of two."""
    return (1 << (num_bytes - 1).bit_length()) - num_bytes


def parameter_sizes(model: ModelSpec) -> list[int]:
    """Elements of each parameter, in the model's order, tied ones once."""
    return [param.numel() for param in build_skeleton(model, torch.bfloat16).parameters()]
