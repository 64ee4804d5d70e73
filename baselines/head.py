"""From the last hidden state to the loss: the output head in chunks of tokens, each differentiated
as soon as it was computed, as the engine does.

Invariant: one chunk's logits are alive at a time and computed once. The library's own code computes
them, scales and soft caps included; the head's module is called once a micro-batch, so what
DeepSpeed and FSDP2 hang on it sees one call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from baselines.model import find_decoder
from baselines.system import Unsupported
from engine import IGNORE_INDEX


class _DecoderOutput:
    """What a decoder returned, with nothing in it but the last hidden state."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _GivenHidden(nn.Module):
    """Stands where the decoder stood and returns the hidden states it is given."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _DecoderOutput:
        """`inputs_embeds` as the decoder's output."""
        return _DecoderOutput(inputs_embeds)


def decoder_path(model: nn.Module) -> str:
    """Name of the module that runs from the tokens to the hidden states that the head is given.

    The base model, or the decoder in it where that is half of an encoder and decoder, as of OPT and
    Whisper.
    """
    path, _ = find_decoder(model)
    prefix: Any = model.base_model_prefix
    base = prefix if prefix in dict(model.named_children()) else path.partition(".")[0]
    return f"{base}.decoder" if path.startswith(f"{base}.decoder.") else base


def _without_hooks(module: nn.Module) -> nn.Module:
    """A shallow copy without hooks, which are for the module's own call; submodules are shared."""
    bare = copy.copy(module)
    for attribute, value in vars(nn.Module()).items():
        if "_hooks" in attribute:
            bare.__dict__[attribute] = copy.copy(value)
    bare.__dict__["_modules"] = dict(module._modules)
    return bare


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at that path, below copies without hooks of what is above it."""
    *above, name = path.split(".")
    for step in above:
        inner = _without_hooks(model.get_submodule(step))
        model._modules[step] = inner
        model = inner
    model._modules[name] = module


def summed_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum over the label tokens, 0-dim fp32. logits: [tokens, vocabulary]."""
    return F.cross_entropy(logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")


Found = tuple[torch.Tensor, list[torch.Tensor | None]]
"""A loss, and its gradient for each input."""


class Differentiated(torch.autograd.Function):
    """A loss whose gradients were found together with it; the backward hands them out, once."""

    @staticmethod
    def forward(ctx: Any, find: Callable[[], Found], *inputs: torch.Tensor) -> torch.Tensor:
        """The loss that `find` finds, with its gradient for each of `inputs`."""
        loss, ctx.gradients = find()
        return loss

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        """Those gradients, times the loss's own."""
        found = ctx.__dict__.pop("gradients")
        return None, *(None if one is None else one.mul_(given[0]) for one in found)


class Head:
    """The forward of a causal LM's output embedding: of hidden states alone their logits, as ever;
    with labels the loss of a micro-batch."""

    def __init__(self, model: nn.Module, loss_chunk: int) -> None:
        """loss_chunk: tokens whose logits exist at a time. Becomes the forward of the model's.

        Raises Unsupported where more than that embedding is trained behind the decoder.
        """
        self._chunk = loss_chunk
        self.summed: Callable[..., torch.Tensor] = summed_cross_entropy
        found: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.module: nn.Module = found
        self._plain, self._bare = found.forward, _without_hooks(found)
        # The causal LM without its decoder: the library's code from hidden states to logits.
        self._tail = _without_hooks(model)
        _put(self._tail, decoder_path(model), _GivenHidden())
        name = next(name for name, module in model.named_modules() if module is found)
        _put(self._tail, name, self._bare)
        if set(self._tail.parameters()) != set(found.parameters()) or list(found.children()):
            raise Unsupported(
                f"model: {type(model).__name__} has more than an output embedding behind its "
                "decoder, allowed are models that have that alone; choose another model"
            )
        found.__dict__["forward"] = self

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor = 1,
    ) -> torch.Tensor:
        """The sum of the label tokens' cross entropies over `num_tokens`, 0-dim fp32. hidden:
        [tokens, hidden]; labels: int64 [tokens], -100 ignored."""
        if labels is None:
            logits: torch.Tensor = self._plain(hidden)
            return logits
        # As they are in this call: gathered, where they were spread.
        self._bare.__dict__["_parameters"] = dict(self.module._parameters)
        trained = [one for one in self.module.parameters() if one.requires_grad]
        if not torch.is_grad_enabled():
            return self._found(hidden, labels, num_tokens, None)[0]

        def find() -> Found:
            return self._found(hidden, labels, num_tokens, trained)

        loss: torch.Tensor = Differentiated.apply(find, hidden, *trained)  # type: ignore[no-untyped-call]
        return loss

    def _found(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        num_tokens: int | torch.Tensor,
        trained: Sequence[torch.Tensor] | None,
    ) -> Found:
        def summed(piece: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            output = self._tail(inputs_embeds=piece[None], use_cache=False)
            return self.summed(output.logits[0], target)

        return found_in_chunks(summed, hidden, labels, num_tokens, trained, self._chunk)


def found_in_chunks(
    summed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    num_tokens: int | torch.Tensor,
    trained: Sequence[torch.Tensor] | None,
    chunk: int,
) -> Found:
    """The loss, `summed` over chunks of hidden states and labels, and its gradients: of `hidden`
    and of each of `trained`. Without `trained`, no gradient. The last chunk first, as a backward
    would have it."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if trained is not None else hidden
    sums: list[torch.Tensor | None] = [None] * len(trained or ())
    for start in reversed(range(0, len(labels), chunk)):
        part = slice(start, start + chunk)
        piece = hidden[part].detach().requires_grad_()
        with torch.set_grad_enabled(trained is not None):  # logits go as soon as they were used
            loss = summed(piece, labels[part]) / num_tokens
        total += loss.detach()
        if trained is None:
            continue
        found = torch.autograd.grad(loss, [piece, *trained], allow_unused=True)
        of_hidden[part] = found[0]
        sums = [_sum(*pair) for pair in zip(sums, found[1:], strict=True)]
        del found  # as large as the head, it would be alive beside the next chunk's logits
    return total, [of_hidden, *sums]


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)
