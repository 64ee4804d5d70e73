"""SlideFormer: its authors' own code, from a checkout that the user names.

Each layer is updated on the CPU as soon as its gradients are there, inside the backward: a step is
one backward, and no norm can be known before it. Invariant: none of that code is in this repository
and none is imported before `setup`; the loss is that of every other system, from the same model,
weights and batches, and what the updates do otherwise than the recipe asks is in the row. Written
against commit 69350a4 of github.com/RegiaYoung/SlideFormer: scripts/main_bench.py,
offload_transformer.py, transformer_layer.py.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines import authors, footprint
from baselines.model import config_of, count_params, materialise
from baselines.rival import (
    Rival,
    adamw_settings,
    micro_batches,
    raise_unless_finite,
    require_cuda,
    require_plain_layers,
    require_whole,
)
from baselines.system import SystemSpec, Unsupported
from engine import Batch, Plan, Widths, dtype_name, layer_activation_bytes, pinned_rounding

CODE = "the SlideFormer code"
REPOSITORY = "RegiaYoung/SlideFormer"
MODULE = "offload_transformer"
"""The authors' module that puts the others together."""
LIGER = ("0.6.4", "0.6.5", "0.7.0")
"""Versions of liger-kernel whose cross entropy has the arguments that theirs gives it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlideFormerOptions(authors.CheckoutOptions):
    """Options of `SlideFormer`; the defaults are the authors'."""

    double_buffer: bool = False
    """Three layers on the device at a time instead of two, and gradients on a stream of their
    own."""


def layer_inputs(
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
        if (got := platform.machine()) != "x86_64":
            raise Unsupported(f"{CODE} updates on x86_64 alone, and this machine is {got}")
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
        # Two chunks of logits, each up to twice the hidden states; their norm's graph; the head's
        # gradient.
        head = 9 * hidden + itemsize * count.largest
        layer = layer_activation_bytes(Widths.of(config), tokens, itemsize)
        device = {
            "weights": units * unit,
            "gradients": units * unit,
            "checkpoints": 4 * hidden,  # two that are fetched, the last and the one at work
            "activations": max(head, layer),
        }
        buffers = [unit] * (units - 1)  # of gradients
        buffers += [itemsize * count.largest] if config.tie_word_embeddings else []
        host = {
            "weights": 0,
            "master": 4 * count.total,
            "moments": 8 * count.total,
            "gradients": sum(size + pinned_rounding(size) for size in buffers),
            "checkpoints": count.num_layers * (hidden + pinned_rounding(hidden)),
            "staging": unit + pinned_rounding(unit),
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
        _require_liger()
        spec, recipe = self.spec, self.spec.recipe
        with torch.cuda.device(spec.device):
            self._theirs = theirs = authors.imported(self.checkout, MODULE, CODE)
            theirs.prepare_layer_inputs = layer_inputs
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

        head.forward = loss
        self._model.train()

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Forward and backward, in which every layer is updated."""
        assert self._model is not None, "setup comes first"
        require_whole(batch, "SlideFormer")
        model = self._model
        ((tokens, labels, _, _),) = micro_batches(batch, self.spec.device)
        model.update_learning_rate(self.spec.recipe.lr_at(self._step))
        loss: torch.Tensor = model(tokens, labels=labels).loss
        loss.backward()  # type: ignore[no-untyped-call]
        model.wait_for_completion()
        for layer in model.transformer_layers:  # nobody else asks one that has ended for its error
            layer._h2d_future.result()
            layer._d2h_future.result()
        loss = loss.detach()
        raise_unless_finite(loss, "the loss", self._step, "updates were made")
        self._step += 1
        return loss.float()

    def counters(self) -> dict[str, float]:
        """None: updates are inside the backward, and have no clock of their own here."""
        return {}

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
            # Two globals of theirs, which the next system in this process would find.
            self._theirs.init_ac_gpu_prefetch_pool([], self.spec.device)
            sys.modules["sliding_checkpoint"].__dict__["fifo_prefetch_queue"].clear()
            self._model = self._theirs = None
            del self._named
            gc.collect()  # hooks hold the module that has them, and its optimizer
        super().close()


def _require_liger() -> None:
    """Unsupported, in one line, without the kernels of its loss."""
    try:
        found = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found not in LIGER:
        raise Unsupported(
            f"{CODE} needs liger-kernel {', '.join(LIGER)}, and {found} is installed; pip install "
            "'liger-kernel==0.7.0', or megatrain-bench[slideformer]"
        )
