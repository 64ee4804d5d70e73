"""One stateless module per layer configuration; its parameters are views of a device slot, never
copies.

Invariant: a template holds no weights (its own parameters live on the meta device), and layers
share one only if everything but their index is equal: classes, shapes, buffers and every plain
attribute of every submodule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.func import functional_call

from engine.config import RefusedError
from engine.layers.autograd import gradients
from engine.layers.chunked import ChunkedMLP, chunked_norms, is_only_added
from engine.layers.compiled import JointPull
from engine.layers.randomness import refuse_random

INDEX = "layer_idx"
"""The one attribute in which layers of one configuration differ; set on every call."""
IGNORED = frozenset({*vars(nn.Module()), INDEX})
"""Attributes that are no part of a configuration: those that every module has."""


KEEP_BUDGET = 0.9
"""Below 1, torch.compile's partitioner rebuilds elementwise results in the backward instead of
keeping them: a third fewer bytes for 1 ms of a 7B layer's 76. Values from 0.7 to 0.9 gave the same
graphs; at 0.5 it rebuilds products too."""
KEEPING = functorch_config.patch(activation_memory_budget=KEEP_BUDGET)
"""Made once: every patch makes a context variable, which the thread's context keeps for good."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the model passes to one layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Template:
    """A decoder layer without weights."""

    def __init__(self, layer: nn.Module, *, mlp_chunk: int = 0) -> None:
        """mlp_chunk: tokens that the layer's MLP and norms take at a time, 0 all. Raises ValueError
        where it has no `mlp`."""
        self.module = copy.deepcopy(layer)
        for owner in self.module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    owner._parameters[name] = meta
        self.mlp = ChunkedMLP(self.module, mlp_chunk) if mlp_chunk else None
        norms = chunked_norms(self.module, mlp_chunk) if mlp_chunk else ()
        self._chunked = () if self.mlp is None else (self.mlp, *norms)
        copies = (part.module for part in self._chunked)
        self._indexed = [m for m in (*self.module.modules(), *copies) if hasattr(m, INDEX)]
        self.num_outputs = 0
        """Length of the tuple that the layer returns, its output first; 0 where it returns the
        output alone."""
        self._call: Callable[..., Any] = self._plain
        self._pull: JointPull | None = None
        self.unchecked = False
        """Whether the next forward is the first that must draw no random numbers."""

    @property
    def runs_once(self) -> bool:
        """Whether a call runs the layer once: not the first forward, nor a chunked MLP's first
        recomputation where `learn_outputs` did not tell."""
        return not self.unchecked and (self.mlp is None or self.mlp.only_added is not None)

    def compile(self) -> None:
        """Compile the layer once for all layers of this configuration: weights are inputs.

        Recomputation and backward become one graph, in which what no gradient needs is dead code:
        of a gated MLP the last product, a quarter of the layer's recomputation. Where the MLP is
        chunked, a chunk of it and of each norm is what is compiled.
        """
        for part in self._chunked:
            part.compile()
        if self._chunked:
            return
        self._call = torch.compile(self._plain, dynamic=False)
        self._pull = JointPull(self._plain, type(self.module).__name__)

    def _plain(
        self,
        weights: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # A template's parameters are never tied (__init__ makes each anew); looking for ties would
        # take longer than the call.
        outputs = functional_call(self.module, weights, (hidden, *args), kwargs, tie_weights=False)
        return outputs[0] if self.num_outputs else outputs

    def forward(
        self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, call: Call, index: int
    ) -> torch.Tensor:
        """The layer's output. weights: local name -> view of a slot; hidden: [micro_batch, seq_len,
        hidden].

        Raises ValueError where it is no tensor, or where `unchecked` and random numbers were drawn
        for it.
        """
        self._set_index(index)
        given = (dict(weights), hidden, call.args, dict(call.kwargs))
        if self.unchecked:
            run, plain = partial(self._call, *given), partial(self._plain, *given)
            output = refuse_random(self.module, hidden.device, run, again=plain)
            self.unchecked = False
        else:
            output = self._call(*given)
        self._check(output, hidden)
        return output  # type: ignore[no-any-return]

    def learn_outputs(
        self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, call: Call, index: int
    ) -> torch.Tensor:
        """`forward`, which finds `num_outputs` and, where its MLP is chunked, whether a
        recomputation needs that MLP's output. Raises RefusedError where the output is not hidden
        states like `hidden`."""
        self._set_index(index)
        self.num_outputs = 0
        outputs = self._plain(dict(weights), hidden, call.args, dict(call.kwargs))
        if isinstance(outputs, tuple) and outputs:
            self.num_outputs, outputs = len(outputs), outputs[0]
        self._check(outputs, hidden)
        if self.mlp is not None and outputs.requires_grad:
            self.mlp.only_added = is_only_added(outputs)
        return outputs  # type: ignore[no-any-return]

    def _check(self, output: Any, hidden: torch.Tensor) -> None:
        if isinstance(output, torch.Tensor) and output.shape == hidden.shape:
            return
        name, got = type(self.module).__name__, type(output).__name__
        got = f"{got} of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else got
        raise RefusedError(
            f"model: {name} returns {got}, allowed hidden states of shape {list(hidden.shape)} as "
            "it is given; choose another model"
        )

    def _set_index(self, index: int) -> None:
        for module in self._indexed:
            setattr(module, INDEX, index)

    def backward(
        self,
        weights: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        call: Call,
        index: int,
        grad_output: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Recompute with a graph and differentiate at once: (gradient of `hidden`, gradients in the
        order of `weights`).

        A weight that is frozen, or that the output does not depend on, has gradient None in its own
        place.
        """
        if self._pull is not None:
            self._set_index(index)
            found = self._pull(weights, hidden, call.args, call.kwargs, grad_output)
            if found is not None:
                return found
        return self.differentiate(
            weights, *self._recomputed(weights, hidden, call, index), grad_output
        )

    def _recomputed(
        self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, call: Call, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `forward_with_graph`, but the output has no values where no gradient depends on
        them, and then no memory either."""
        if self.mlp is None or self.mlp.only_added is False:
            return self.forward_with_graph(weights, hidden, call, index)
        self.mlp.unread = True
        try:
            kept = self.forward_with_graph(weights, hidden, call, index)
        finally:
            self.mlp.unread = False
        if self.mlp.only_added is None:
            self.mlp.only_added = is_only_added(kept[1])
        if self.mlp.only_added:
            kept[1].data = kept[1].new_empty(()).expand_as(kept[1])
            return kept
        del kept
        return self.forward_with_graph(weights, hidden, call, index)

    def num_rebuilt(self, *, kept: bool) -> int:
        """Parameters whose products a backward runs beside those of the layer's recomputation: a
        chunked MLP's, if it was kept or its output is read."""
        return (
            self.mlp.num_params if self.mlp is not None and (kept or not self.mlp.only_added) else 0
        )

    def forward_with_graph(
        self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, call: Call, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, output) with the graph between them."""
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad(), KEEPING:
            return hidden, self.forward(weights, hidden, call, index)

    def differentiate(
        self,
        weights: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        output: torch.Tensor,
        grad_output: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """What `backward` returns, of a graph that is there."""
        grad_hidden, *grads = gradients(output, [hidden, *weights.values()], grad_output)
        assert grad_hidden is not None
        return grad_hidden, grads


def share_templates(layers: Sequence[nn.Module], *, mlp_chunk: int = 0) -> list[Template]:
    """One template a layer; layers of one configuration get the same object. Raises ValueError as
    `Template`."""
    found: dict[Any, Template] = {}
    shared = []
    for layer in layers:
        key = _configuration(layer)
        if key not in found:
            found[key] = Template(layer, mlp_chunk=mlp_chunk)
        shared.append(found[key])
    return shared


def _configuration(layer: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for path, module in layer.named_modules():
        attributes = tuple(
            (name, _plain(value))
            for name, value in sorted(vars(module).items())
            if name not in IGNORED
        )
        buffers = tuple((name, *_content(b)) for name, b in module.named_buffers(recurse=False))
        shapes = tuple(
            (name, tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in module.named_parameters(recurse=False)
        )
        parts.append((path, type(module), attributes, buffers, shapes))
    return tuple(parts)


def _content(buffer: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and a digest of the bytes; numpy has no bfloat16."""
    flat = buffer.detach().cpu().reshape(-1)
    return tuple(buffer.shape), buffer.dtype, hash(flat.view(torch.uint8).numpy().tobytes())


def _plain(value: Any) -> Any:
    """Something that compares equal for equal settings; other objects only with themselves."""
    if isinstance(
        value, (int, float, str, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)
    ):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(_plain(item) for item in value))
    if isinstance(value, partial):
        return (
            partial,
            _plain(value.func),
            _plain(value.args),
            _plain(tuple(sorted(value.keywords.items()))),
        )
    return (type(value), id(value))
