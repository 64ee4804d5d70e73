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
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines import authors, footprint, swapping
from baselines.model import config_of, count_params, materialise
from baselines.options import Rule, text
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
from engine import (
    Batch,
    Plan,
    SwapFolder,
    Widths,
    dtype_name,
    layer_activation_bytes,
    pinned_rounding,
)

CODE = "the SlideFormer code"
REPOSITORY = "RegiaYoung/SlideFormer"
MODULE = "offload_transformer"
"""The authors' module that puts the others together."""
LIGER = ("0.6.4", "0.6.5", "0.7.0")
"""Versions of liger-kernel whose cross entropy has the arguments that theirs gives it."""
SHARES = (0.0, 0.5, 1.0)
"""What of the moments their code can have on a disk: neither, the first, both."""
PREFIX = "slideformer-"
"""How the names of our folders on a disk begin (engine/swap.py)."""
LARGEST_WRITE = 0x7FFFF000
"""Bytes that Linux writes at a time. tensornvme 0.1.0 asks once for each moment of a layer, and
does not look at how many were written (csrc/uring.cpp)."""
LAYERS_AT_A_TIME = 3
"""Of those on a disk, whose moments are in memory: one is read, one is updated, one is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlideFormerOptions(authors.CheckoutOptions):
    """Options of `SlideFormer`; the defaults are the authors'."""

    double_buffer: bool = False
    """Three layers on the device at a time instead of two, and gradients on a stream of their
    own."""
    nvme_offload_fraction: float = dataclasses.field(
        default=0.0,
        metadata={
            "rule": Rule(
                lambda value: not isinstance(value, bool) and value in SHARES,
                "0, 0.5 or 1; choose one of these",
            )
        },
    )
    """Share of the moments that lie in a file in `nvme_path`: with 0.5 the first ones."""
    nvme_path: str | None = text("the path of a folder")
    """Folder on a local disk."""


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
        self._root: Path | None = None
        self._folder: SwapFolder | None = None
        if self.options.nvme_offload_fraction:
            self._root = swapping.root_of(self.options.nvme_path)
            self._require_short_writes()
            said.append("moments on a disk, through the page cache")
        self.caveat = "; ".join(said) or None
        self._model: Any = None

    def _require_short_writes(self) -> None:
        """Unsupported where a moment of a layer is more than one write takes."""
        needed = 4 * _largest_unit(self.spec)
        if needed > LARGEST_WRITE:
            raise Unsupported(
                f"system.nvme_offload_fraction: a moment of the largest layer has {needed:,} "
                f"bytes, allowed {LARGEST_WRITE:,} with {CODE}, for it does not see what a write "
                "leaves undone; choose a smaller model"
            )

    def plan(self) -> Plan:
        """Closed-form bytes: on the device whole layers with their gradients, one of them at work;
        on the host fp32 weights with moments, those that are not on a disk, and every layer's
        input."""
        spec, count, itemsize = self.spec, count_params(self.spec.model), self.spec.dtype.itemsize
        config, tokens = config_of(spec.model), self.spec.shape.num_tokens
        units = 3 if self.options.double_buffer else 2
        largest, share = _largest_unit(spec), self.options.nvme_offload_fraction
        unit = itemsize * largest
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
            "moments": int(8 * (1 - share) * count.total)
            + int(8 * share) * min(LAYERS_AT_A_TIME * largest, count.total),
            "gradients": sum(size + pinned_rounding(size) for size in buffers),
            "checkpoints": count.num_layers * (hidden + pinned_rounding(hidden)),
            "staging": unit + pinned_rounding(unit),
        }
        plan = footprint.plan_on(spec.device, device, host)
        return dataclasses.replace(plan, disk={"optimizer": self._disk_bytes} if share else {})

    @property
    def _disk_bytes(self) -> int:
        """Of the file, from whose gaps a layer takes the first that is large enough."""
        return int(8 * self.options.nvme_offload_fraction) * count_params(self.spec.model).total

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
            settings |= self._on_disk()
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

    def _on_disk(self) -> dict[str, Any]:
        """What their optimizer is given for moments on a disk, with a folder of its own there.

        Unsupported where the disk has no room, or its code is missing or may not run.
        """
        if self._root is None:
            return {}
        _require_uring()
        self._folder = swapping.claimed(self._root, PREFIX, self._disk_bytes)
        return {
            "nvme_offload_fraction": self.options.nvme_offload_fraction,
            "offload_dir": str(self._folder.path),
        }

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Forward and backward, in which every layer is updated. OSError, in one line, where the
        disk of its moments is full: their code would not say so."""
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
        if self._root is not None and (error := swapping.full(self._root)) is not None:
            raise error
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
        if self._folder is not None:
            swapping.given_back(self._folder)
            self._folder = None
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


def _largest_unit(spec: SystemSpec) -> int:
    """Parameters of the largest of what it loads: a layer, the embedding, the head and its norm."""
    count, width = count_params(spec.model), int(config_of(spec.model).hidden_size)
    return max(count.largest + width, count.largest_layer)


def _require_uring() -> None:
    """Unsupported, in one line, where tensornvme is missing or the kernel refuses io_uring."""
    try:
        uring = importlib.import_module("tensornvme._C").probe_backend("uring")
    except ImportError as error:
        told = " ".join(str(error).split())
        raise Unsupported(
            f"{CODE} writes moments to a disk through tensornvme, which does not import ({told}); "
            "pip install tensornvme, which is built with cmake, libaio and liburing"
        ) from None
    if not uring:
        raise Unsupported(
            f"{CODE} writes moments to a disk through io_uring, which is not to be had here; leave "
            "out system.nvme_offload_fraction"
        )
