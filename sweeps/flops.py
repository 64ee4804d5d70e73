"""Floating-point operations of one trained token under named conventions, and what data sheets say
a GPU does in a second.

Invariant: recomputation is never counted, and a convention that does not apply to a model is None.
All are per label token, of forward and backward; a matrix product of [m, k] and [k, n] is 2 m k n
operations. Tests hold them against torch's FlopCounterMode.

What a convention leaves out or adds, exactly: `6p` counts norms and biases, and an untied input
embedding, none of which is a matrix product (a tied one is: it is the output head), and no
attention scores; `6p_causal` adds the scores that a causal mask leaves, as a kernel that skips the
others computes them; `paper` adds all T x T of them, and takes the hidden size for the width of the
queries, which is the same number in most models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONVENTIONS = ("6p", "6p_causal", "paper")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a transformers config by which a mixture of experts is known: a token meets some of its
parameters only."""

DATASHEET_TFLOPS: Mapping[str, float] = {
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
}
"""Dense bf16 matrix peak by the name that NVML gives, from NVIDIA's data sheets and architecture
white papers: half of a figure that is stated with sparsity; for GeForce the one with fp32
accumulation."""


def datasheet_tflops(gpu: str | None) -> float | None:
    """The data sheet's dense bf16 peak; None for a GPU that is not in the table."""
    return DATASHEET_TFLOPS.get(gpu or "")


def flops_6p(num_params: int) -> float:
    """6 P: two operations a parameter forward, four backward (Kaplan et al., arXiv 2001.08361,
    table 1)."""
    return 6.0 * num_params


def flops_6p_causal(num_params: int, num_layers: int, query_width: int, seq_len: int) -> float:
    """6 P + 6 L q T, q being heads x head dimension: the attention of Chowdhery et al. (arXiv
    2204.02311, appendix B), halved.

    There two products of 2 q T forward and twice that backward make 12 L q T; under a causal mask
    half of it is computed (exactly (T + 1) / 2T of it).
    """
    return flops_6p(num_params) + 6.0 * num_layers * query_width * seq_len


def flops_paper(num_params: int, num_layers: int, hidden_size: int, seq_len: int) -> float:
    """6 P + 12 L h T: reproduces the MegaTrain paper's 256K and 512K rows (arXiv 2604.05091); its
    other rows are 6 P or neither."""
    return flops_6p(num_params) + 12.0 * num_layers * hidden_size * seq_len


def per_token(config: Any, num_params: int, seq_len: int) -> dict[str, float | None]:
    """Operations of a token under each of CONVENTIONS; None where ambiguous.

    config: a transformers config. A mixture of experts has no 6 P; a window shorter than the
    sequence, layers that are not full attention, or a config that does not say how wide attention
    is leave the conventions with attention empty.
    """
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
        return dict.fromkeys(CONVENTIONS)
    found: dict[str, float | None] = {**dict.fromkeys(CONVENTIONS), "6p": flops_6p(num_params)}
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    layers, hidden, heads = (getattr(config, name, None) for name in names)
    if not (layers and hidden and heads) or not _full_attention(config, seq_len):
        return found
    queries = heads * (getattr(config, "head_dim", None) or hidden // heads)
    return found | {
        "6p_causal": flops_6p_causal(num_params, layers, queries, seq_len),
        "paper": flops_paper(num_params, layers, hidden, seq_len),
    }


def _full_attention(config: Any, seq_len: int) -> bool:
    """Whether every layer attends to all earlier tokens of a sequence."""
    kinds = set(getattr(config, "layer_types", None) or ["unknown"])
    window = getattr(config, "sliding_window", None)
    if window is not None and seq_len <= window:
        return kinds <= {"full_attention", "sliding_attention", "unknown"}
    return kinds == {"full_attention"} or (window is None and kinds == {"unknown"})
