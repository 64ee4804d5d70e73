"""SlideFormer: its authors' own code, from a checkout that the user names.

Each layer is updated on the CPU as soon as its gradients are there, inside the backward: a step is
one backward, and no norm can be known before it. Invariant: none of that code is in this repository
and none is imported before `setup`; the loss is that of every other system, from the same model,
weights and batches, and what the updates do otherwise than the recipe asks is in the row. Written
against commit 69350a4 of github.com/RegiaYoung/SlideFormer: main_bench.py, offload_transformer.py,
transformer_layer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines import authors, footprint
from baselines.model import config_of, count_params, materialise
from baselines.options import text
from baselines.rival import (
    Rival,
    adamw_settings,
    raise_unless_finite,
    require_cuda,
    require_plain_layers,
)
from baselines.system import SystemSpec, Unsupported
from engine import Batch, Plan, Widths, dtype_name, layer_activation_bytes, pinned_rounding

CODE = "the SlideFormer code"
REPOSITORY = "RegiaYoung/SlideFormer"
MODULE = "offload_transformer"
"""The authors' module that puts the others together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlideFormerOptions:
    """Options of `SlideFormer`; the defaults are the authors'."""

    preset: str | None = text("a word")
    """Label of the settings in rows and figures; it changes nothing."""
    checkout: str | None = text("the path of a clone")
    """Folder of a clone of the authors' repository, or one that it lies in."""
    double_buffer: bool = False
    """Three layers on the device at a time instead of two, and gradients on a stream of their
    own."""


def _layer_inputs(
    decoder: Any, hidden: torch.Tensor, mask: None = None, positions: None = None
) -> list[dict[str, Any]]:
    """What each layer is given beside its hidden state, without a mask: attention is causal."""
    places = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotation = decoder.rotary_emb.to(hidden.device)(hidden, places)
    return [{"attention_mask": None, "position_embeddings": rotation} for _ in decoder.layers]


class SlideFormer(Rival):
    """The authors' offloader with its layer-wise AdamW; CUDA only, one micro-batch a step."""

    options_class = SlideFormerOptions
    options: SlideFormerOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        require_cuda(spec.device, CODE)
        self.checkout = authors.checked(self.options.checkout, REPOSITORY, f"{MODULE}.py")
        require_plain_layers(spec, "SlideFormer")
        if spec.dtype != torch.bfloat16:
            raise ValueError(
                f"system.dtype: got {dtype_name(spec.dtype)}, allowed bfloat16 with SlideFormer; "
                "leave it out"
            )
        if spec.shape.num_micro_batches > 1:
            raise Unsupported(
                f"{CODE} updates in every backward: shape.num_micro_batches is "
                f"{spec.shape.num_micro_batches}, use 1"
            )
        said = []
        if spec.recipe.clip_norm > 0:
            said.append(f"no clipping, where the recipe clips at {spec.recipe.clip_norm:g}")
        if spec.recipe.weight_decay and not spec.recipe.decays(1):
            said.append("norms and biases decay too")
        self.caveat = "; ".join(said) or None
        self._model: Any = None

    def plan(self) -> Plan:
        """Closed-form bytes: on the device whole layers with their gradients, one of them at work;
        on the host fp32 weights with moments, and every layer's input."""
        spec, count, itemsize = self.spec, count_params(self.spec.model), self.spec.dtype.itemsize
        config, tokens = config_of(spec.model), self.spec.shape.num_tokens
        units = 3 if self.options.double_buffer else 2
        unit = itemsize * max(count.largest + config.hidden_size, count.largest_layer)
        hidden = itemsize * tokens * config.hidden_size
        # Chunks of tokens whose logits take no more than all hidden states, and the head's gradient
        # and theirs beside its weight.
        head = 2 * hidden + itemsize * count.largest + 2 * hidden
        layer = layer_activation_bytes(Widths.of(config), tokens, itemsize)
        device = {
            "weights": units * unit,
            "gradients": units * unit,
            "checkpoints": 4 * hidden,  # two that are fetched, the last and the one at work
            "activations": max(head, layer),
        }
        buffers = [unit] * (units - 1)  # of gradients
        buffers += [itemsize * count.largest] if config.tie_word_embeddings else []
        pinned = [unit] + [hidden] * count.num_layers  # converted weights, layers' inputs
        host = {
            "weights": 0,
            "master": 4 * count.total,
            "moments": 8 * count.total,
            "gradients": sum(size + pinned_rounding(size) for size in buffers),
            "staging": sum(size + pinned_rounding(size) for size in pinned),
        }
        return footprint.plan_on(spec.device, device, host)

    def dtypes(self) -> dict[str, str]:
        """Gradients stay in the compute dtype; the master is fp32."""
        return super().dtypes() | {"gradients": dtype_name(self.spec.dtype)}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Import the authors' code and give it the module that every system trains.

        Its own way to the layers' inputs calls an older transformers, and its head leaves out the
        last label of every sequence, for it shifts labels itself: both are given here.
        """
        spec, recipe = self.spec, self.spec.recipe
        with torch.cuda.device(spec.device):
            theirs = authors.imported(self.checkout, MODULE, CODE)
            theirs.prepare_layer_inputs = _layer_inputs
            model: Any = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
            self._named = list(model.named_parameters())
            settings = adamw_settings(recipe) | {"bias_correction": True, "adamw_mode": True}
            self._model = theirs.SlideFormerOffloader(
                model,
                spec.device,
                spec.dtype,
                double_buffer=self.options.double_buffer,
                enable_timing=False,
                enable_memory_stats=False,
                auto_backward_in_forward=False,
                optimizer_kwargs=settings | {"num_layer": len(model.get_decoder().layers) + 2},
            )
        head = self._model.output_layer

        def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            normed = head.norm_layer(hidden).flatten(0, 1)
            found: torch.Tensor = head.lce(head.lm_head.weight, normed, labels.flatten(), bias=None)
            return found

        head.__dict__["forward"] = loss
        self._model.train()

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Forward and backward, in which every layer is updated."""
        assert self._model is not None, "setup comes first"
        if batch.attention_mask is not None or batch.position_ids is not None:
            raise Unsupported("SlideFormer takes whole sequences here, without a mask or positions")
        device, model = self.spec.device, self._model
        tokens, labels = (part[0].to(device) for part in (batch.tokens, batch.labels))
        model.update_learning_rate(self.spec.recipe.lr_at(self._step))
        loss: torch.Tensor = model(tokens, labels=labels).loss
        loss.backward()  # type: ignore[no-untyped-call]
        model.wait_for_completion()
        raise_unless_finite(loss, "the loss", self._step, "updates were made")
        self._step += 1
        return loss.detach().float()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the host), one at a time."""
        for name, param in self._named:
            yield name, param.detach().to("cpu", torch.float32, copy=True)

    def save(self, directory: Path) -> None:
        """Unsupported: the code resumes no optimizer."""
        raise Unsupported(
            f"save: {CODE} resumes no optimizer, so nothing was written; train with "
            "system=megatrain"
        )

    def resume(self, directory: Path) -> None:
        """Unsupported: the code resumes no optimizer."""
        self.save(directory)

    def close(self) -> None:
        """Stop its threads and free the memory; idempotent."""
        if self._model is not None:
            for name in ("update_executor", "h2d_executor", "d2h_executor"):
                getattr(self._model, name).shutdown()
            self._model = None
            del self._named
        super().close()
