"""What a layer's attention gave in its forward, for its recomputation: of all that is recomputed it
alone costs the square of the length.

A fused kernel's output and log-sum-exp are all that its own backward needs beside queries, keys and
values, which are recomputed. Invariant: what is given back is what the same kernel gave for the
same call; where attention is no fused kernel nothing is kept and it is computed again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from engine.layers.offload import Moved, Offloaded

KERNELS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
)
"""Fused attention: each returns its output, its log-sum-exp, and what else its backward takes."""
NAME = "scaled_dot_product_attention"
Call = tuple[Any, Any]
"""A kernel, and what it returned."""


class Results:
    """Of the attention of one layer in one step, call by call over all micro-batches."""

    def __init__(self, moved: Offloaded | None = None) -> None:
        """moved: takes the tensors, where these wait on the host."""
        self.moved = moved
        self._calls: list[Call | None] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While the layer's forward runs: keep what its attention gives."""
        with _each_call(_Keeping(self)):
            yield

    @contextlib.contextmanager
    def given(self, *, last: bool) -> Iterator[None]:
        """While the layer runs again, all micro-batches in the same order: give it back. last: it
        is not needed any more."""
        with _each_call(_Giving(self, last)):
            yield

    def keep(self, kernel: Any, found: Any) -> None:
        """The next call's."""
        pack = torch.Tensor.detach if self.moved is None else self.moved.pack
        self._calls.append((kernel, tree_map_only(torch.Tensor, pack, found)))

    def give(self, number: int, kernel: Any, *, last: bool) -> Any:
        """What that call gave."""
        call = self._calls[number]
        assert call is not None, "given for the last time before"
        assert call[0] is kernel, f"attention is {kernel}, and was {call[0]}"
        if last:
            self._calls[number] = None
        unpack = (lambda packed: packed) if self.moved is None else self.moved.unpack
        back = tree_map_only((torch.Tensor, Moved), unpack, call[1])
        return tree_map_only(torch.Tensor, torch.Tensor.detach, back)


class _Keeping(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in KERNELS:
            self._results.keep(func, found)
        return found


class _Giving(TorchDispatchMode):
    def __init__(self, results: Results, last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results, self._last, self._next = results, last, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KERNELS:
            return func(*args, **(kwargs or {}))
        found = self._results.give(self._next, func, last=self._last)
        self._next += 1
        return found


_PLAIN: Callable[..., torch.Tensor] = getattr(F, NAME)
_MODE: ContextVar[TorchDispatchMode | None] = ContextVar("mode", default=None)
"""Under which this thread's attention runs."""
_INSIDE, _LOCK = [0], threading.Lock()
"""Threads that are inside of `_each_call`."""


def _attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As for a backward, so that it is one kernel whether there is a graph or none."""
    mode = _MODE.get()
    if mode is None:
        return _PLAIN(query, *args, **kwargs)
    if torch.is_grad_enabled():
        with mode:
            return _PLAIN(query, *args, **kwargs)
    with torch.enable_grad(), mode:
        return _PLAIN(query.detach().requires_grad_(), *args, **kwargs).detach()


@contextlib.contextmanager
def _each_call(mode: TorchDispatchMode) -> Iterator[None]:
    """While it lasts, this thread's attention runs under `mode`."""
    token = _MODE.set(mode)
    with _LOCK:
        _INSIDE[0] += 1
        setattr(F, NAME, _attend)
    try:
        yield
    finally:
        _MODE.reset(token)
        with _LOCK:
            _INSIDE[0] -= 1
            if not _INSIDE[0]:
                setattr(F, NAME, _PLAIN)
