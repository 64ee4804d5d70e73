"""The training loss of every baseline, next-token cross entropy, and which layers are recomputed.

Invariant: the value is that of the library's own code, layer by layer and, in chunks
(`baselines.head`), from the last hidden state on.

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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from baselines.head import Head, decoder_path, summed_cross_entropy
from baselines.model import decoder_layers
from baselines.options import CommonOptions
from baselines.system import Unsupported
from engine import KEEP_BUDGET, RefusedError, packed, refuse_mixing


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
        self._keeps_apart = False
        # Not submodules: their parameters are the model's own.
        self.__dict__["_head"] = head = Head(model, loss_chunk)
        self.__dict__["_decoder"] = model.get_submodule(decoder_path(model))
        self.__dict__["_layers"] = layers  # whose class a system may exchange
        if compile:
            head.summed = torch.compile(summed_cross_entropy, dynamic=False, fullgraph=True)
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
        loss: torch.Tensor = self.__dict__["_head"].module(
            hidden.flatten(0, 1), labels.flatten(), num_tokens
        )
        return loss

    def _refuse_mixing(self) -> None:
        if self._keeps_apart:
            return
        try:
            refuse_mixing(self.__dict__["_decoder"], self.__dict__["_layers"])
        except RefusedError as error:
            raise Unsupported(str(error)) from None
        self._keeps_apart = True


def loss_of(model: nn.Module, options: CommonOptions) -> CausalLMLoss:
    """The loss of `model` as `options` say."""
    return CausalLMLoss(
        model,
        loss_chunk=options.loss_chunk,
        keep_activations=options.keep_activations,
        compile=options.compile,
    )
