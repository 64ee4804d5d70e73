"""The training loss of every baseline: next-token cross entropy, its head taken in chunks of
tokens.

Invariant: no more than one chunk's logits are alive at a time, in the forward and in the backward,
and the value is that of the library's own `logits` (scales and soft caps included), for the
library's own code computes each chunk.

The first decoder layers are recomputed in the backward, the last `keep_activations` are not: a
layer is, or is not, on its own.

Compiled, every decoder layer's `forward` is one graph (a layer that breaks it is an error, never
quietly eager), with its recomputation inside, where what no gradient needs is not computed again. A
kept layer's graph is partitioned as the engine's, so that both keep the same tensors: activations,
and parameters as the very parameters, never a view that would outlive their release. The hooks of
FSDP2 and DeepSpeed hang on the layer's call and stay outside. Of the head, cross entropy alone is
compiled: its weight's hooks hang on modules inside.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from baselines.model import decoder_layers, find_decoder
from baselines.options import CommonOptions
from baselines.system import Unsupported
from engine import IGNORE_INDEX, KEEP_BUDGET, RefusedError, packed, refuse_mixing


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


def _decoder_path(model: nn.Module) -> str:
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


def _tail_of(model: nn.Module) -> nn.Module:
    """The causal LM without its decoder: the library's code from the last hidden state to the
    logits.

    The head stays the very module that DeepSpeed or FSDP put its hooks on.
    """
    tail = owner = _without_hooks(model)
    *above, name = _decoder_path(model).split(".")
    for step in above:
        inner = _without_hooks(owner.get_submodule(step))
        owner._modules[step] = inner
        owner = inner
    owner._modules[name] = _GivenHidden()
    return tail


def _checkpoint_layers(model: Any, kept: Sequence[Any]) -> None:
    """Recompute each decoder layer but those `kept` in the backward. transformers renamed the
    method after 5.17."""
    if not getattr(model, "supports_gradient_checkpointing", True):
        if not all(hasattr(layer, "gradient_checkpointing") for layer in decoder_layers(model)):
            raise Unsupported(
                f"transformers cannot recompute the layers of {type(model).__name__}; keep all of "
                f"them: system.keep_activations={len(decoder_layers(model))}"
            )
        # JetMoe's layers can, whatever their model says.
        model.supports_gradient_checkpointing = True
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        enable({"use_reentrant": False})
    for layer in kept:
        layer.gradient_checkpointing = False  # each layer looks at its own


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


_WITH_BUDGET = functorch_config.patch(activation_memory_budget=KEEP_BUDGET)
"""Made once: every patch makes a context variable, which the thread's context keeps for good."""


def _kept(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of a compiled layer whose graph stays; the first call compiles."""
    with _WITH_BUDGET:
        return compiled(*args, **kwargs)


def _compile_layers(recomputed: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    """Compile what each decoder layer's call runs between its hooks; layers of one configuration
    and kind share the graph."""
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    for layer in recomputed:
        layer.__dict__["forward"] = compiled(functools.partial(_recomputed, layer.forward))
    for layer in kept:
        layer.__dict__["forward"] = functools.partial(_kept, compiled(layer.forward))


def _summed_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum over the label tokens, 0-dim fp32. logits: [tokens, vocabulary]."""
    return F.cross_entropy(logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")


class CausalLMLoss(nn.Module):
    """A causal LM of transformers, the submodule `model`, as one module from tokens to the loss."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_chunk: int = 4096,
        keep_activations: int = 0,
        compile: bool = False,
    ) -> None:
        """Options as in `CommonOptions`, keep_activations chosen."""
        super().__init__()
        layers = list(decoder_layers(model))
        assert 0 <= keep_activations <= len(layers), "baselines.system.build chooses and checks"
        num_recomputed = len(layers) - keep_activations
        recomputed, kept = layers[:num_recomputed], layers[num_recomputed:]
        self.model = model
        self.loss_chunk = loss_chunk
        self._keeps_apart = False
        # Not a submodule: its parameters are the model's own.
        self.__dict__["_tail"] = _tail_of(model)
        self.__dict__["_decoder"] = model.get_submodule(_decoder_path(model))
        self.__dict__["_layers"] = layers  # whose class a system may exchange
        self._summed: Callable[..., torch.Tensor] = _summed_cross_entropy
        if compile:
            self._summed = torch.compile(_summed_cross_entropy, dynamic=False, fullgraph=True)
            _compile_layers(recomputed, kept)
        elif recomputed:
            _checkpoint_layers(model, kept)

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None,
        num_tokens: int | torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the label tokens' cross entropies over `num_tokens`: 0-dim fp32.

        tokens, labels, attention_mask and position_ids are int64 [batch, seq_len], as in `Batch`;
        labels are already shifted, -100 is ignored. num_tokens counts the label tokens of the whole
        optimizer step, so micro-batches add up. Raises Unsupported where packed documents would see
        each other.
        """
        decoder, given = self.__dict__["_decoder"], {}
        if position_ids is not None:
            self._refuse_mixing()
            given = {"position_ids": position_ids}
        with packed(position_ids):
            output = decoder(
                input_ids=tokens, attention_mask=attention_mask, use_cache=False, **given
            )
        hidden: torch.Tensor = output.last_hidden_state
        rows, targets = hidden.flatten(0, 1), labels.flatten()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunks = (torch.split(part, self.loss_chunk) for part in (rows, targets))
        for chunk, target in zip(*chunks, strict=True):
            # The chunk's logits die with this call and are computed again in its backward.
            total = total + checkpoint(
                self._chunk_loss, chunk, target, use_reentrant=False, preserve_rng_state=False
            )
        return total / num_tokens

    def _refuse_mixing(self) -> None:
        if self._keeps_apart:
            return
        try:
            refuse_mixing(self.__dict__["_decoder"], self.__dict__["_layers"])
        except RefusedError as error:
            raise Unsupported(str(error)) from None
        self._keeps_apart = True

    def _chunk_loss(self, chunk: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = self.__dict__["_tail"](inputs_embeds=chunk[None], use_cache=False)
        return self._summed(output.logits[0], target)


def loss_of(model: nn.Module, options: CommonOptions) -> CausalLMLoss:
    """The loss of `model` as `options` say."""
    return CausalLMLoss(
        model,
        loss_chunk=options.loss_chunk,
        keep_activations=options.keep_activations,
        compile=options.compile,
    )
