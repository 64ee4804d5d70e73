"""A recomputation with its backward as one compiled graph, in which what no gradient needs is dead
code.

Invariant: a weight that the output does not depend on, or that is frozen, has gradient None, as
without a compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vjp
from torch.utils._pytree import tree_map_only

from engine.layers.autograd import gradients

Weights = Mapping[str, torch.Tensor]
Run = Callable[[dict[str, torch.Tensor], torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""(weights by name, input, further arguments) -> output."""
Grads = tuple[torch.Tensor, list[torch.Tensor | None]]
"""Gradients of the input, and of the weights in their order."""


class _NotWithoutNumbersError(Exception):
    """A layer that has no forward on tensors without numbers."""


class JointPull:
    """Gradients of `run` at an input, without its output."""

    def __init__(self, run: Run, what: str) -> None:
        """what: its name for a warning."""
        self._run, self._what = run, what
        self._compiled = torch.compile(self._pull, dynamic=False)
        self._unused: frozenset[str] | None = None
        self._fails = False

    def __call__(
        self,
        weights: Weights,
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        grad_output: torch.Tensor,
    ) -> Grads | None:
        """None, with a warning at the first time, where no such graph can be made."""
        if self._fails:
            return None
        from torch._dynamo.exc import TorchRuntimeError, Unsupported  # a second of imports

        given = (dict(weights), hidden, args, dict(kwargs))
        try:
            grads, grad_hidden = self._compiled(*given, grad_output)
            if self._unused is None:
                self._unused = self._without_gradient(*given)
        except (TorchRuntimeError, Unsupported, _NotWithoutNumbersError) as error:
            self._fails = True
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"system.compile: the recomputation of {self._what} and its backward are two "
                f"graphs instead of one, which takes longer ({reason})",
                stacklevel=2,
            )
            return None
        return grad_hidden, [None if n in self._unused else grads.get(n) for n in weights]

    def _pull(
        self,
        weights: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad_output: torch.Tensor,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        frozen = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        pull = vjp(lambda w, x: self._run({**w, **frozen}, x, args, kwargs), trained, hidden)[1]
        grads: tuple[dict[str, torch.Tensor], torch.Tensor] = pull(grad_output)
        return grads

    def _without_gradient(
        self, weights: dict[str, torch.Tensor], hidden: torch.Tensor, *rest: Any
    ) -> frozenset[str]:
        """Weights on which the output does not depend, of which `vjp` says zero. Computes nothing.

        Raises _NotWithoutNumbersError where that cannot be told.
        """
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
            names, values = list(weights), list(weights.values())
            leaves = [mode.from_tensor(v.detach()).requires_grad_(v.requires_grad) for v in values]
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, rest)
            root = mode.from_tensor(hidden.detach()).requires_grad_()
            try:
                output = self._run(dict(zip(names, leaves, strict=True)), root, args, kwargs)
            except (RuntimeError, NotImplementedError) as error:
                raise _NotWithoutNumbersError(error) from error
            grads = gradients(output, leaves, torch.empty_like(output))
        return frozenset(name for name, grad in zip(names, grads, strict=True) if grad is None)
