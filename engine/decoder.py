"""A decoder-only `transformers` model taken apart: what comes before the layers, the layers, what comes after.

No list of families: the layers are the ModuleList of the classes in `_no_split_modules`; what each is called
with is learnt by running the model's own forward over layers that only record. Invariant: every parameter
belongs to exactly one block (embed, one layer, head), tied parameters to embed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from engine.layout import Layout, pack
from engine.randomness import refuse_random
from engine.template import Template, share_templates

T = TypeVar("T")


class _LastLayerReachedError(Exception):
    """Ends a recording run before the final norm and the head."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the model passes to one layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(kw_only=True)
class Recording:
    """One micro-batch's way into the layers."""

    hidden: torch.Tensor
    """[micro_batch, seq_len, hidden], attached to the graph of the embedding."""
    calls: list[Call]


class Decoder:
    """The parts of one model skeleton. Its layer modules are replaced by recorders for good."""

    def __init__(self, model: nn.Module, *, mlp_chunk: int = 0) -> None:
        """mlp_chunk: as `Template` takes it."""
        self.model = model
        self.prefix, layers = _find_layers(model)
        _refuse_dropout(model)
        self.layers = layers
        self.templates: list[Template] = share_templates(layers, mlp_chunk=mlp_chunk)
        self.blocks: list[dict[str, torch.Size]] = _blocks(model, self.prefix, layers)
        self.frozen = _frozen(model)
        """Full names of parameters that are not trained."""
        self._known: set[str] = set()
        self._inject: torch.Tensor | None = None
        self._first: list[torch.Tensor] = []
        self._calls: list[Call] = []
        for index, layer in enumerate(layers):
            layer.forward = partial(self._record, index)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def full_name(self, block: int, name: str) -> str:
        """The model's name of a block's parameter."""
        return f"{self.prefix}.{block - 1}.{name}" if 1 <= block <= self.num_layers else name

    def layouts(self) -> list[Layout]:
        """Where the parameters of each block lie, and which of them are frozen."""
        return [
            pack(block.items(), {name for name in block if self.full_name(number, name) in self.frozen})
            for number, block in enumerate(self.blocks)
        ]

    def bind(self, device: torch.device, outer: Mapping[str, torch.Tensor]) -> None:
        """Put buffers on `device` and make the outer parameters views of device memory."""
        for template in self.templates:
            template.unchecked = True
        for module in [self.model, *(t.module for t in self.templates)]:
            for name, buffer in list(module.named_buffers()):
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner)._buffers[leaf] = buffer.to(device)
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            if name.startswith(self.prefix + "."):
                continue
            owner, _, leaf = name.rpartition(".")
            if id(parameter) not in parameters:
                bound = nn.Parameter(outer[name].detach(), parameter.requires_grad)
                parameters[id(parameter)] = bound
            self.model.get_submodule(owner)._parameters[leaf] = parameters[id(parameter)]

    def outer_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters outside the layers by name, as bound."""
        wanted = self.blocks[0] | self.blocks[-1]
        return {name: p for name, p in self.model.named_parameters() if name in wanted}

    def record(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> Recording:
        """Run the model as far as its last layer's call. tokens: int64 [micro_batch, seq_len] on the device.

        Raises ValueError where random numbers are drawn on the way, or the model does not call each layer once.
        """
        hidden, calls = self._checked("before the layers", tokens.device, partial(self._run, tokens, attention_mask))
        if len(calls) != self.num_layers:
            raise ValueError(
                f"model: {type(self.model).__name__} called {len(calls)} of its {self.num_layers} layers, "
                "allowed are models that call every layer once; choose another model"
            )
        return Recording(hidden=hidden[0], calls=calls)

    def _run(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[list[torch.Tensor], list[Call]]:
        self._calls = []
        hidden: list[torch.Tensor] = []
        self._first = hidden
        with contextlib.suppress(_LastLayerReachedError):
            self.model(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        calls, self._calls = self._calls, []
        return hidden, calls

    def _checked(self, part: str, device: torch.device, run: Callable[[], T]) -> T:
        """What `run` returns; at the first of each part ValueError where it draws random numbers."""
        if part in self._known:
            return run()
        found = refuse_random(self.model, device, run)
        self._known.add(part)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm, head and soft cap of [rows, tokens, hidden]: the model's own tail, differentiable in `hidden`."""
        embeds = hidden.detach()
        width = getattr(self.model.get_input_embeddings(), "embedding_dim", hidden.shape[-1])  # type: ignore[operator]
        if width != hidden.shape[-1]:  # a projection comes before the layers, as in OPT's smallest
            embeds = hidden.new_zeros((*hidden.shape[:-1], width))
        self._inject = hidden
        try:
            run = partial(self.model, inputs_embeds=embeds, use_cache=False)
            output: torch.Tensor = self._checked("after the layers", hidden.device, run).logits
        finally:
            self._inject = None
        return output

    def _record(self, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden: torch.Tensor = args[0] if args else kwargs.pop("hidden_states")
        last = index == self.num_layers - 1
        if self._inject is not None:
            return self._inject if last else hidden
        if index == 0:
            self._first.append(hidden)
        for value in tensors((args[1:], kwargs)):
            if value.requires_grad:
                raise ValueError(
                    f"model: {type(self.layers[index]).__name__} is called with a second differentiable tensor; "
                    "allowed are layers that only the hidden states connect; choose another model"
                )
        self._calls.append(Call(args=args[1:], kwargs=kwargs))
        if last:
            raise _LastLayerReachedError
        return hidden


def _find_layers(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and {type(layer).__name__ for layer in module} <= names:
            return path, list(module)
    raise ValueError(f"model: {type(model).__name__} has no list of decoder layers; allowed are decoder-only transformers models")


def _refuse_dropout(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name in ("p", "attention_dropout", "dropout"):
            value = getattr(module, name, 0.0)
            if isinstance(value, float) and value > 0:
                raise ValueError(f"model.config: {path}.{name} is {value}, allowed 0; set every dropout of the model to 0")


def _frozen(model: nn.Module) -> frozenset[str]:
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    if len(frozen) == len(list(model.named_parameters())):
        raise ValueError(
            "model: got requires_grad=False on every parameter, allowed are models with something to train; "
            "call model.requires_grad_(True)"
        )
    return frozen


def _blocks(model: nn.Module, prefix: str, layers: Sequence[nn.Module]) -> list[dict[str, torch.Size]]:
    """Parameter shapes of embed, each layer, head. What is registered after the layers is head, unless tied to what is before."""
    before: dict[str, torch.Size] = {}
    after: dict[str, torch.Size] = {}
    seen_layers = False
    for name, parameter in model.named_parameters():
        if name.startswith(prefix + "."):
            seen_layers = True
        else:
            (after if seen_layers else before)[name] = parameter.shape
    inner = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    shared = {id(p) for layer in layers for p in layer.parameters()}
    if len(shared) != sum(len(block) for block in inner):
        raise ValueError(
            "model: decoder layers share parameters; allowed are layers with weights of their own; choose another model"
        )
    return [before, *inner, after]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
