"""Bytes that are alive, counted tensor by tensor: on fake tensors, what a layer takes of a device
that is not here."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKWARDS = frozenset(
    f"_scaled_dot_product_{name}_backward"
    for name in ("cudnn_attention", "efficient_attention", "flash_attention")
) | {"_scaled_dot_product_flash_attention_for_cpu_backward"}
"""Of fused attention: each is given an output's gradient, queries, keys and values."""


def kernel_bytes(queries: int, keys: int, itemsize: int) -> int:
    """Bytes that the backward of a fused attention kernel may take beside its operands: an fp32 sum
    of the queries' gradient, and where several queries share a key and a value the gradients of
    these for each query (dQ_accum, dK_fullhead, dV_fullhead in scaled_dot_product_flash_attention.h
    of cuDNN's frontend). On an H200 cuDNN took that and 0.1 GB, 15.1 GB for 524,288 tokens of
    Qwen2.5-7B (docs/log.md, 193). queries, keys: numbers of values."""
    return 4 * queries + (2 * itemsize * queries if keys < queries else 0)


class LiveBytes(TorchDispatchMode):
    """Of the tensors that operations made since it began and that are still there; and their most,
    with what an attention kernel takes for itself."""

    def __init__(self, existing: Any) -> None:
        """existing: a tree of tensors that are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        tensors = (leaf for leaf in tree_leaves(existing) if isinstance(leaf, torch.Tensor))
        self._known = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        beside = 0
        if func.overloadpacket.__name__ in BACKWARDS:
            queries, keys = args[1:3]
            beside = kernel_bytes(queries.numel(), keys.numel(), queries.element_size())
        self.most = max(self.most, self.now + beside)
        return output

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes
