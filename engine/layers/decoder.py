"""A decoder-only `transformers` model taken apart: what comes before the layers, the layers, what
comes after.

No list of families: the layers are the ModuleList of the classes in `_no_split_modules`; what each
is called with is learnt by running the model's own forward over layers that only record. Invariant:
every parameter belongs to exactly one block (embed, one layer, head), tied parameters to embed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from engine.config import RefusedError
from engine.layers.packing import packed, refuse_mixing, refuse_unmasked
from engine.layers.randomness import refuse_random
from engine.layers.template import Call, Template, share_templates
from engine.layout import Layout, pack

T = TypeVar("T")
BEFORE, AFTER = "before the layers", "after the layers"
"""The parts of a model that are not its layers."""


class _LastLayerReachedError(Exception):
    """Ends a recording run before the final norm and the head."""


class _NotThere:
    """Stands for what a layer returns beside the hidden states: who only keeps it may, who uses it
    finds nothing in it."""


@dataclass(kw_only=True)
class Recording:
    """One micro-batch's way into the layers."""

    hidden: torch.Tensor
    """[micro_batch, seq_len, hidden], attached to the graph of the embedding."""
    calls: list[Call]


CONNECTED = "layers that only the hidden states connect"


class Decoder:
    """The parts of one model skeleton. Its layer modules are replaced by recorders for good."""

    def __init__(self, model: nn.Module, *, mlp_chunk: int = 0) -> None:
        """mlp_chunk: as `Template` takes it."""
        self.model = model
        self.prefix, layers = find_layers(model)
        _refuse_auxiliary_loss(model)
        _refuse_dropout(model)
        _switch_off_checkpointing(model)
        self.layers = layers
        self.templates: list[Template] = share_templates(layers, mlp_chunk=mlp_chunk)
        self.blocks: list[dict[str, torch.Size]] = _blocks(model, self.prefix, layers)
        self.frozen = _frozen(model)
        """Full names of parameters that are not trained."""
        self.tied = True
        """Whether what is before the layers is used after them too, as far as is known."""
        self._known: set[str] = set()
        self._keeps_apart = False
        self._inject: torch.Tensor | None = None
        self._passed: torch.Tensor | None = None
        self._first: list[torch.Tensor] = []
        self._calls: list[Call] = []
        self._last = self.num_layers - 1
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
            pack(
                block.items(),
                {name for name in block if self.full_name(number, name) in self.frozen},
            )
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
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name] for name in self.blocks[0] | self.blocks[-1]}

    def assign(self, used_before: set[str]) -> None:
        """Move to embed what is registered after the layers but used before them; the names are
        full ones."""
        head = self.blocks[-1]
        self.blocks[0] |= {name: shape for name, shape in head.items() if name in used_before}
        self.blocks[-1] = {name: shape for name, shape in head.items() if name not in used_before}

    def record(
        self,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        *,
        last: int = -1,
    ) -> Recording:
        """Run the model as far as the call of layer `last`, which is the last of all where it is
        negative.

        tokens: int64 [micro_batch, seq_len] on the device; the others as in `Batch`. Raises
        ValueError where random numbers are drawn on the way, the model does not call each layer
        once, or packed documents would see each other.
        """
        self._last = last % self.num_layers
        if position_ids is not None and not self._keeps_apart:
            refuse_mixing(self.model, self.layers)
        run = partial(self._run, tokens, attention_mask, position_ids)
        hidden, calls = self._checked(BEFORE, tokens.device, run)
        if len(calls) != self._last + 1:
            raise self._refusal(
                f"calls {len(calls)} of its {self.num_layers} layers",
                "all of them, one after another",
            )
        if position_ids is not None and not self._keeps_apart:
            self._check_masks(calls, position_ids)
        return Recording(hidden=hidden[0], calls=calls)

    def _run(
        self,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], list[Call]]:
        self._calls, self._first = [], []
        given = {} if position_ids is None else {"position_ids": position_ids}
        with contextlib.suppress(_LastLayerReachedError), packed(position_ids):
            self.model(input_ids=tokens, attention_mask=attention_mask, use_cache=False, **given)
        self._passed = None
        calls, first = self._calls, self._first
        self._calls, self._first = [], []
        return first, calls

    def _check_masks(self, calls: Sequence[Call], position_ids: torch.Tensor) -> None:
        """RefusedError where a layer gets no mask; looked at once, at the first batch with a
        border."""
        if (position_ids[:, 1:] == 0).any():
            given = [list(tensors((call.args, call.kwargs))) for call in calls]
            refuse_unmasked(self.model, given, position_ids)
            self._keeps_apart = True

    def expect_no_random_numbers(self) -> None:
        """Leave out the look at the generators, which fake tensors do not move."""
        self._known |= {BEFORE, AFTER}

    def _checked(self, part: str, device: torch.device, run: Callable[[], T]) -> T:
        """What `run` returns; at the first of each part ValueError where it draws random
        numbers."""
        if part in self._known:
            return run()
        found = refuse_random(self.model, device, run)
        self._known.add(part)
        return found

    def embeds_like(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model takes for embeddings of as many tokens; as wide as `hidden` but where a
        projection lies between."""
        width = getattr(self.model.get_input_embeddings(), "embedding_dim", hidden.shape[-1])  # type: ignore[operator]
        return (
            hidden.detach()
            if width == hidden.shape[-1]
            else hidden.new_zeros((*hidden.shape[:-1], width))
        )

    def logits(self, hidden: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        """Final norm, head and soft cap of [rows, tokens, hidden]: the model's own tail,
        differentiable in `hidden`.

        given: what the model is called with, like `embeds_like`; its values do not matter.
        """
        self._inject = hidden
        try:
            run = partial(
                self.model,
                inputs_embeds=self.embeds_like(hidden) if given is None else given,
                use_cache=False,
            )
            output = self._checked(AFTER, hidden.device, run)
        finally:
            self._inject = None
        return output.logits  # type: ignore[no-any-return]

    def _record(self, index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states", None)
        if self._inject is not None:
            return self._outputs(index, self._inject if index == self.num_layers - 1 else hidden)
        self._check_call(index, hidden, (args[1:], kwargs))
        if index == 0:
            self._first.append(hidden)
        self._calls.append(Call(args=args[1:], kwargs=kwargs))
        if index == self._last:
            raise _LastLayerReachedError
        self._passed = hidden
        return self._outputs(index, hidden)

    def _outputs(self, index: int, hidden: torch.Tensor) -> Any:
        """`hidden` as the layer would return it."""
        number = self.templates[index].num_outputs
        return (hidden, *(_NotThere() for _ in range(1, number))) if number else hidden

    def _check_call(self, index: int, hidden: Any, others: Any) -> None:
        name = type(self.layers[index]).__name__
        if not isinstance(hidden, torch.Tensor):
            raise self._refusal(
                f"calls {name} without hidden states", "layers that are given them first"
            )
        if index != len(self._calls):
            raise self._refusal(
                f"calls layer {index} after {len(self._calls)} calls", "each layer once, in order"
            )
        if index and hidden is not self._passed:
            raise self._refusal(
                f"changes the hidden states between {name}s",
                "layers that take what the one before gave",
            )
        for value in leaves_of(others):
            if isinstance(value, _NotThere):
                raise self._refusal(
                    f"gives {name} what another returned beside the hidden states", CONNECTED
                )
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise self._refusal(f"calls {name} with a second differentiable tensor", CONNECTED)

    def _refusal(self, got: str, allowed: str) -> RefusedError:
        return RefusedError(
            f"model: {type(self.model).__name__} {got}, allowed {allowed}; choose another model"
        )


def find_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Where the decoder layers are in the model, and the layers: the one rule, for every system.

    They are the first list whose members are all of the library's `_no_split_modules` classes, in
    what the model says decodes its text. Raises RefusedError where there is none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    decoder = get_decoder()
    paths = {module: path for path, module in model.named_modules()}
    for start in (paths.get(decoder, ""), ""):
        for module, path in paths.items():
            if (
                not path.startswith(start)
                or not isinstance(module, nn.ModuleList)
                or not len(module)
            ):
                continue
            if {type(layer).__name__ for layer in module} <= names:
                return path, list(module)
    raise RefusedError(
        f"model: {type(model).__name__} has no list of decoder layers; allowed are decoder-only "
        "transformers models"
    )


def _refuse_auxiliary_loss(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            raise RefusedError(
                "model.config.output_router_logits: got True, allowed False; set it to False, for "
                "the loss is the cross-entropy alone, without the auxiliary one of the routers"
            )


def _switch_off_checkpointing(model: nn.Module) -> None:
    """The engine recomputes the layers itself."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 - no attribute of nn.Module


def _refuse_dropout(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name in ("p", "attention_dropout", "dropout"):
            value = getattr(module, name, 0.0)
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"model.config: {path}.{name} is {value}, allowed 0; set every dropout of the "
                    "model to 0"
                )


def _frozen(model: nn.Module) -> frozenset[str]:
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    if len(frozen) == len(list(model.named_parameters())):
        raise ValueError(
            "model: got requires_grad=False on every parameter, allowed are models with something "
            "to train; call model.requires_grad_(True)"
        )
    return frozen


def _blocks(
    model: nn.Module, prefix: str, layers: Sequence[nn.Module]
) -> list[dict[str, torch.Size]]:
    """Parameter shapes of embed, each layer, head. What is registered after the layers is head,
    unless tied to what is before."""
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
        raise RefusedError(
            "model: decoder layers share parameters; allowed are layers with weights of their own; "
            "choose another model"
        )
    return [before, *inner, after]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))


def leaves_of(value: Any) -> Iterator[Any]:
    """All that is in nested tuples, lists and mappings."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value
