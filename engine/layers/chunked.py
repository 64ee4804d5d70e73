"""A decoder layer's MLP and norms in chunks of tokens: nothing MLP-wide of the whole sequence ever
exists, and no norm's fp32 values of it.

Invariant: between forward and backward a chunked module holds its input alone; the backward
recomputes a chunk and differentiates it before the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from engine.config import RefusedError
from engine.layers.autograd import gradients
from engine.layers.compiled import Grads, JointPull, Weights


class Chunked:
    """The forward of a module that treats every token alone, `chunk` tokens at a time."""

    unread = False
    """Whether nobody reads the output: it is then allocated, not computed."""

    def __init__(self, module: nn.Module, chunk: int) -> None:
        """module: its `forward` is replaced."""
        # the copy shares its parameters and keeps its forward
        self.module, self._chunk = copy.copy(module), chunk
        self._names = [name for name, _ in module.named_parameters()]
        self.run: Callable[..., torch.Tensor] = self._run
        self.pull: Callable[..., Grads] = self._pull
        module.forward = self

    def compile(self) -> None:
        """Compile a chunk's forward, and its recomputation with its backward."""
        self.run = torch.compile(self._run, dynamic=False)
        joint = JointPull(
            lambda weights, piece, *_: self._run(weights, piece), type(self.module).__name__
        )

        def pull(weights: Weights, piece: torch.Tensor, grad_output: torch.Tensor) -> Grads:
            return joint(weights, piece, (), {}, grad_output) or self._pull(
                weights, piece, grad_output
            )

        self.pull = pull

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's output. hidden: [..., hidden]."""
        if args or kwargs:
            raise _refusal(self._chunk, self.module, "is called with more than hidden states")
        return _Chunked.apply(self, hidden, *(p for _, p in self.module.named_parameters()))  # type: ignore[no-untyped-call]

    def pieces(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """[1, chunk, hidden] views of [..., hidden]; the last may be shorter."""
        row = values.detach().view(1, -1, values.shape[-1])
        return [
            row[:, start : start + self._chunk] for start in range(0, row.shape[1], self._chunk)
        ]

    def named(self, weights: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The module's parameters, given in its order, as leaves of their own."""
        values = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
        return dict(zip(self._names, values, strict=True))

    def _run(self, weights: Weights, piece: torch.Tensor) -> torch.Tensor:
        output = functional_call(self.module, dict(weights), (piece,), tie_weights=False)
        if not isinstance(output, torch.Tensor):
            raise _refusal(self._chunk, self.module, f"returns {type(output).__name__}")
        if output.dtype != piece.dtype:
            raise _refusal(self._chunk, self.module, f"returns {output.dtype} for {piece.dtype}")
        return output

    def _pull(self, weights: Weights, piece: torch.Tensor, grad_output: torch.Tensor) -> Grads:
        """Gradients of one chunk and of the weights, None where one is frozen or nothing depends on
        it."""
        piece = piece.detach().requires_grad_()
        with torch.enable_grad():
            output = self.run(weights, piece)
        grad_piece, *grads = gradients(output, [piece, *weights.values()], grad_output)
        assert grad_piece is not None
        return grad_piece, grads


class ChunkedMLP(Chunked):
    """A decoder layer's `mlp`."""

    def __init__(self, layer: nn.Module, chunk: int) -> None:
        """layer: its MLP's `forward` is replaced. Raises ValueError where it has none."""
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise _refusal(chunk, layer, "has no mlp")
        super().__init__(mlp, chunk)
        self.num_params = sum(parameter.numel() for parameter in mlp.parameters())
        self.only_added: bool | None = None
        """What `is_only_added` says of a layer's output; None while it is not known, at the latest
        until the first backward."""


def chunked_norms(layer: nn.Module, chunk: int) -> list[Chunked]:
    """The layer's own norms, their forward replaced; not those inside of its attention."""
    return [Chunked(module, chunk) for module in layer.children() if _is_norm(module)]


def _is_norm(module: nn.Module) -> bool:
    """Whether its parameters are all vectors; or, where it has none, it is called so."""
    dims = [parameter.dim() for parameter in module.parameters()]
    return max(dims) == 1 if dims else "Norm" in type(module).__name__


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Chunked, hidden: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.part = part
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, *weights)
        output = torch.empty_like(hidden)
        if not part.unread:
            leaves = part.named(weights)
            for piece, place in zip(part.pieces(hidden), part.pieces(output), strict=True):
                place.copy_(part.run(leaves, piece))
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        part: Chunked = ctx.part
        hidden, *weights = ctx.saved_tensors
        leaves = part.named(weights)
        grad_hidden = torch.empty_like(hidden)
        sums: list[torch.Tensor | None] = [None] * len(weights)
        pieces = (part.pieces(values) for values in (hidden, grad_output.contiguous(), grad_hidden))
        for piece, grad, place in zip(*pieces, strict=True):
            grad_piece, grads = part.pull(leaves, piece, grad)
            place.copy_(grad_piece)
            _add(sums, grads)
            del grad_piece, grads  # the next chunk's would be alive beside them
        rounded = (s if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True))
        return None, grad_hidden, *rounded


def _add(sums: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> None:
    """Sum in fp32; what no gradient came for stays None."""
    for index, grad in enumerate(grads):
        if grad is None:
            continue
        total = sums[index]
        if total is None:
            sums[index] = grad.to(torch.float32, copy=True)
        else:
            total.add_(grad)


def is_only_added(output: torch.Tensor) -> bool:
    """Whether all that reads a chunked MLP's output is the sum that `output` is: then no gradient
    depends on its values.

    So it is in pre-norm layers. Where a norm follows the MLP, that norm's gradient does; a scaled
    residual or a sum of three is not told from that.
    """
    root, seen = output.grad_fn, set()
    todo = [root]
    while todo:
        node = todo.pop()
        assert node is not None
        seen.add(node)
        below = {n for n, _ in node.next_functions if n is not None}
        if node is not root and any(isinstance(_part(n), ChunkedMLP) for n in below):
            return False
        todo.extend(below - seen)
    return root is not None and root.name() == "AddBackward0"


def _part(node: Any) -> Chunked | None:
    """What a node of a graph ran, if that is chunked."""
    return getattr(node, "part", None)


def _refusal(chunk: int, module: nn.Module, why: str) -> RefusedError:
    return RefusedError(
        f"system.mlp_chunk: got {chunk}, allowed 0 for {type(module).__name__}, which {why}; set "
        "system.mlp_chunk=0"
    )
