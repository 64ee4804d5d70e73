"""PublishedMegaTrain: the MegaTrain authors' own code, from a checkout that the user names, in the
order of their training script.

Invariant: none of it is in this repository and none is imported before `setup`. What is given to it
is what every system gets (model, weights, batches, recipe); what it does otherwise, bf16 weights
without an fp32 master above all, the row says. Written against commit 919520f of
github.com/DLYuanGod/MegaTrain: examples/sft/train.py, infinity/model/cpu_master.py,
infinity/config/training.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines import authors, footprint
from baselines.deepspeed.setup import import_deepspeed, require_deepspeed, sole_builder
from baselines.model import config_of, count_params, materialise
from baselines.rival import (
    Rival,
    adamw_groups,
    adamw_settings,
    raise_unless_finite,
    require_cuda,
    set_lr,
)
from baselines.system import SystemSpec, Unsupported
from engine import (
    IGNORE_INDEX,
    Batch,
    Plan,
    Widths,
    dtype_name,
    layer_activation_bytes,
    pinned_rounding,
)

CODE = "the published MegaTrain code"
REPOSITORY = "DLYuanGod/MegaTrain"
PACKAGE = "infinity"
"""What the authors' package is called."""
KNOWN_BY = f"{PACKAGE}/model/cpu_master.py"
ATTENTION = ("flash_attention_2", "sdpa", "eager")
"""What their configuration takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedOptions(authors.CheckoutOptions):
    """Options of `PublishedMegaTrain`; the defaults are the authors'."""

    checkpoint_interval: int = 4
    """Layers between two kept activations."""
    gradient_slabs: int = 12
    """Pinned host buffers that layers' gradients leave through."""


class _NoMask:
    """Passed as the mask: their code moves it to the device and hands it on, and a 2-D one is not
    what sdpa takes."""

    def to(self, device: torch.device) -> None:
        """Nothing: sdpa is then causal."""


class PublishedMegaTrain(Rival):
    """The authors' CPUMasterModel with DeepSpeedCPUAdam; CUDA only, one micro-batch a step."""

    options_class = PublishedOptions
    options: PublishedOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        require_cuda(spec.device, CODE)
        self.checkout = authors.checked(self.options.checkout, REPOSITORY, KNOWN_BY)
        if spec.shape.num_micro_batches > 1:
            raise Unsupported(
                f"{CODE} does not divide the loss by the micro-batches: "
                f"shape.num_micro_batches is {spec.shape.num_micro_batches}, use 1"
            )
        if spec.model.attn_implementation not in ATTENTION:
            raise Unsupported(
                f"{CODE} takes {', '.join(ATTENTION)}, and "
                f"model.attn_implementation is {spec.model.attn_implementation}"
            )
        require_deepspeed()
        self.caveat = (
            f"{dtype_name(spec.dtype)} weights are the master; the last label of each sequence is "
            "not trained on"
        )
        self._model: Any = None

    def plan(self) -> Plan:
        """Closed-form bytes: on the device two layers, flat and as modules, what is outside them
        with its gradients, and logits."""
        spec, count, itemsize = self.spec, count_params(self.spec.model), self.spec.dtype.itemsize
        config = config_of(spec.model)
        tokens, interval = spec.shape.num_tokens, self.options.checkpoint_interval
        hidden = itemsize * tokens * config.hidden_size
        # Every chunk's log-probabilities live until the backward of the loss.
        layers = layer_activation_bytes(Widths.of(config), tokens, itemsize) + interval * hidden
        device = {
            "weights": itemsize * (count.outer + 4 * count.largest_layer),
            "gradients": itemsize * (count.outer + 2 * count.largest_layer),
            "checkpoints": (count.num_layers // interval + 2) * hidden,
            "activations": max(itemsize * tokens * config.vocab_size, layers),
        }
        layer = itemsize * count.largest_layer
        slabs = [layer] * self.options.gradient_slabs + [itemsize * count.outer]
        flats = [layer] * (count.num_layers + 2)
        host = {
            "weights": itemsize * count.total + sum(flats),
            "master": 0,
            "moments": 8 * count.total,
            "gradients": itemsize * count.total + sum(slabs),
            "staging": sum(map(pinned_rounding, (*slabs, *flats))),
        }
        return footprint.plan_on(spec.device, device, host)

    def dtypes(self) -> dict[str, str]:
        """The weights are their own master."""
        compute = dtype_name(self.spec.dtype)
        return super().dtypes() | {"master": compute, "gradients": compute}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Import the authors' package and give it the module that every system trains."""
        spec, recipe, options = self.spec, self.spec.recipe, self.options
        theirs = authors.imported(self.checkout, PACKAGE, CODE)
        deepspeed = import_deepspeed(spec.device)
        model = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
        self._named = list(model.named_parameters())
        config = theirs.CPUMasterConfig(
            model_name=spec.model.name,
            dataset_name="none",  # it insists on one; batches are ours
            device=spec.device.index or 0,
            dtype=spec.dtype,
            attn_implementation=spec.model.attn_implementation,
            max_seq_len=spec.shape.seq_len,
            batch_size=spec.shape.batch_size,
            checkpoint_interval=options.checkpoint_interval,
            num_grad_slabs=options.gradient_slabs,
        )
        self._model = theirs.CPUMasterModel(model, config)
        with sole_builder():
            self._optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
                adamw_groups(recipe, self._model.get_parameters()),
                **adamw_settings(recipe),
                adamw_mode=True,
            )

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Their step: loss and gradients, clipping and AdamW on the CPU, weights to the device.
        They read the loss on the host."""
        assert self._model is not None, "setup comes first"
        tokens, labels = batch.tokens[0], batch.labels[0]
        assert batch.attention_mask is None, "no padded batches: their sdpa would not mask them"
        if batch.position_ids is not None:
            raise Unsupported(
                f"{CODE} takes no position ids, so packed documents would see "
                "each other; train on data=stdlib"
            )
        # They shift the labels themselves; the last of a sequence would need one token more.
        unshifted = torch.full_like(labels, IGNORE_INDEX)
        unshifted[:, 1:] = labels[:, :-1]
        flash = self.spec.model.attn_implementation == "flash_attention_2"
        mask = torch.ones_like(tokens) if flash else _NoMask()
        loss, *_ = self._model.forward_and_backward(tokens, mask, unshifted)
        try:
            raise_unless_finite(loss, "the loss", self._step)
            self._update()
        finally:
            self._model.zero_grad()
            self._optimizer.zero_grad()
        return torch.tensor(loss, dtype=torch.float32)

    def _update(self) -> None:
        """Clipping, AdamW and the weights' way back."""
        recipe = self.spec.recipe
        with self._optimizing():
            if recipe.clip_norm > 0:
                weights = self._model.get_parameters()
                norm = torch.nn.utils.clip_grad_norm_(weights, recipe.clip_norm)
                self.gradient_norm = norm.float()
                raise_unless_finite(norm, "the gradient norm", self._step)
            set_lr(self._optimizer, recipe.lr_at(self._step))
            self._optimizer.step()
            self._model._sync_params_to_gpu()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, the weight in fp32 on the host), one at a time."""
        for name, param in self._named:
            yield name, param.detach().to(torch.float32, copy=True)

    def save(self, directory: Path) -> None:
        """Unsupported: the published code does not save."""
        raise Unsupported(
            f"save: {CODE} has no checkpoints, so nothing was written; train with system=megatrain"
        )

    def resume(self, directory: Path) -> None:
        """Unsupported: the published code does not save."""
        self.save(directory)

    def close(self) -> None:
        """Stop their worker and free the memory; idempotent."""
        if self._model is not None:
            self._model.cleanup()
            self._model = self._optimizer = None
            del self._named
        super().close()
