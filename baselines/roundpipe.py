"""RoundPipe: parameters and optimizer on the host, stages of layers round robin over the GPUs.

RoundPipe gets the model as a sequence of its embedding, its layers and its head with the loss, as
its own presets have it. Invariant: RoundPipe moves weights, activations and gradients and runs its
own AdamW; an update is of the step's own gradients, clipped exactly, and in force before the next
step, unless `stale` asks for RoundPipe's default, which the row then says.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from baselines import footprint
from baselines.deepspeed.setup import add_ninja_to_path, require_compiler, sole_builder
from baselines.head import Differentiated, Found, found_in_chunks, summed_cross_entropy
from baselines.model import config_of, count_params, find_decoder, materialise
from baselines.options import CommonOptions, one_of
from baselines.rival import (
    TorchRival,
    adamw_groups,
    adamw_settings,
    raise_unless_finite,
    require_cuda,
    require_plain_layers,
    require_whole,
    set_lr,
)
from baselines.system import SystemSpec, Unsupported
from engine import Batch, Plan, dtype_name, pinned_rounding

LATE = "its weights are one update behind, as RoundPipe's are by default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPipeOptions(CommonOptions):
    """Options of `RoundPipe`."""

    stale: bool = False
    """Update beside the next step, which then trains on weights one update old."""
    pinned: str = one_of("alloc", "register")
    """How the weights are pinned: by torch, which rounds each up to a power of two, or in place."""


class _Embedding(nn.Module):
    """From tokens to (hidden, cosines, sines, labels), which every layer hands on."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.embed_tokens(tokens)
        places = torch.arange(tokens.shape[1], device=hidden.device)[None]
        return hidden, *self.rotary_emb(hidden, places), labels


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, cosines, sines, labels = given
        found = self.layer(
            hidden, attention_mask=None, position_embeddings=(cosines, sines), use_cache=False
        )
        return found, cosines, sines, labels


class _Loss(nn.Module):
    """From the last hidden state to the loss, chunk by chunk as `baselines.head`."""

    num_tokens = 1
    """Label tokens of the step."""

    def __init__(self, norm: nn.Module, head: nn.Module, chunk: int) -> None:
        super().__init__()
        self.norm, self.head, self.chunk = norm, head, chunk

    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden, _, _, labels = given
        hidden, labels = self.norm(hidden).flatten(0, 1), labels.flatten()
        weight: Any = self.head.weight

        def summed(piece: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return summed_cross_entropy(nn.functional.linear(piece, weight), target)

        def find(trained: list[torch.Tensor] | None) -> Found:
            return found_in_chunks(summed, hidden, labels, self.num_tokens, trained, self.chunk)

        if not torch.is_grad_enabled():
            return find(None)[0]
        loss: torch.Tensor = Differentiated.apply(lambda: find([weight]), hidden, weight)  # type: ignore[no-untyped-call]
        return loss


class RoundPipe(TorchRival):
    """RoundPipe 0.1 on one GPU. Raises Unsupported where it is missing or cannot run the model."""

    options_class: ClassVar[type[CommonOptions]] = RoundPipeOptions
    options: RoundPipeOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        require_cuda(spec.device, "RoundPipe")
        if importlib.util.find_spec("roundpipe") is None:
            raise Unsupported(
                "roundpipe is not installed; pip install 'roundpipe==0.1.1', or "
                "megatrain-bench[roundpipe]"
            )
        if (got := torch.cuda.device_count()) > 1:
            raise Unsupported(
                f"RoundPipe trains on every GPU that it sees, and {got} are visible; set "
                "CUDA_VISIBLE_DEVICES to one"
            )
        require_compiler("RoundPipe's AdamW")
        for name, only in (("keep_activations", 0), ("compile", False)):
            if (got := getattr(self.options, name)) != only:
                raise ValueError(
                    f"system.{name}: got {got}, allowed {only} with RoundPipe, which recomputes "
                    "whole stages of its own copies of layers; leave it out"
                )
        require_plain_layers(spec, "RoundPipe")
        self.caveat = LATE if self.options.stale else None
        self._model: Any = None
        self._named: list[tuple[str, Any, Any]] = []
        self._optimizer: Any = None
        self._loss: Any = None

    @property
    def _num_parts(self) -> int:
        """Micro-batches of its pipeline: at least two, where there are as many sequences."""
        return min(self.spec.shape.batch_size, max(2, self.spec.shape.num_micro_batches))

    def plan(self) -> Plan:
        """Closed-form bytes. A stage has as many layers as take the time of the head, and two of
        them are on the device, with their gradients."""
        spec, count = self.spec, count_params(self.spec.model)
        total, itemsize = count.total, spec.dtype.itemsize
        shape = dataclasses.replace(spec.shape, num_micro_batches=self._num_parts)
        stage = min(count.num_layers, max(1, round(1.1 * count.largest / count.largest_layer)))
        kept = dataclasses.replace(self.options, keep_activations=stage)
        held = max(count.largest, stage * count.largest_layer)
        config = config_of(spec.model)
        hidden = itemsize * spec.shape.num_tokens * config.hidden_size
        device = {
            "weights": 2 * itemsize * held,
            # The head's: of the micro-batch before, the sum over chunks and a chunk's; or those of
            # a stage and of the one before it, which are on their way.
            "gradients": itemsize * max(3 * count.largest, 2 * stage * count.largest_layer),
            **footprint.activation_bytes(dataclasses.replace(spec, shape=shape), kept),
            "checkpoints": 6 * hidden // self._num_parts,  # on their way; they wait on the host
        }
        pinned = [itemsize * size for size in count.sizes]
        again = [itemsize * count.largest] if config.tie_word_embeddings else []
        aligned = sum(map(pinned_rounding, pinned)) if self.options.pinned == "alloc" else 0
        host = {
            "weights": itemsize * total,
            "master": 4 * total,
            "moments": 8 * total,
            # As they come, pinned, of a tied weight twice; in fp32; and of a tied one added there.
            "gradients": (itemsize + 4) * total + (itemsize + 4) * count.largest * len(again),
            "checkpoints": hidden * (2 + count.num_layers // stage),
            "staging": aligned + sum(map(pinned_rounding, [*pinned, *again])),
            "other": footprint.process_bytes(spec.device),
        }
        return footprint.plan_on(spec.device, device, host)

    def dtypes(self) -> dict[str, str]:
        """Gradients are accumulated in the compute dtype."""
        return super().dtypes() | {"gradients": dtype_name(self.spec.dtype)}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Build the sequence, pin it and make the fp32 masters and the optimizer."""
        add_ninja_to_path()
        import roundpipe
        from roundpipe.attribute import ParamAttribute
        from roundpipe.optim import Adam

        spec = self.spec
        model: Any = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
        path, layers = find_decoder(model)
        decoder = model.get_submodule(path.rpartition(".")[0])
        self._loss = _Loss(decoder.norm, model.get_output_embeddings(), self.options.loss_chunk)
        parts = nn.Sequential(_Embedding(decoder), *map(_Layer, layers), self._loss)
        config = roundpipe.RoundPipeRunConfig(
            num_microbatch=self._num_parts, preserve_rng_state=False
        )
        self._whole = roundpipe.RoundPipeRunConfig(num_microbatch=1, requires_grad=False)
        self._model = roundpipe.RoundPipe(
            parts,
            optim_dtype=torch.float32,
            name="model",
            model_run_config=config,
            pin_model=self.options.pinned,
        )
        masters = list(self._model.optim_parameters())
        self._named = [
            (name, param, ParamAttribute.get(param).optim)
            for name, param in model.named_parameters()
        ]
        settings = adamw_settings(spec.recipe) | {"decoupled_weight_decay": True}
        with sole_builder():  # the first one builds its kernel
            self._optimizer = Adam(adamw_groups(spec.recipe, masters), **settings)
        self._norm, self._refused = torch.zeros(()), False

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step; RoundPipe returns the loss before the backward has ended."""
        assert self._model is not None, "setup comes first"
        self._raise_if_refused()
        require_whole(batch, "RoundPipe")
        self._loss.num_tokens = batch.num_tokens
        given = (batch.tokens.flatten(0, 1), batch.labels.flatten(0, 1))
        loss: torch.Tensor = self._model.forward_backward(
            input_args=given, loss_fn=lambda found, _: found
        )
        try:
            raise_unless_finite(loss, "the loss", self._step)
            self._model.optim_updated.wait()  # the update before, which reads the learning rate
            self._raise_if_refused()
        except Exception:
            self._forget()
            raise
        set_lr(self._optimizer, self.spec.recipe.lr_at(self._step))
        self._updating = self._step
        self._model.step(self._update, is_async=self.options.stale)
        if not self.options.stale:
            self._optimizer_s += time.perf_counter() - self._arrived
            self.gradient_norm = self._norm
            self._raise_if_refused()
        self._step += 1
        return loss.detach()

    @torch.no_grad()
    def _update(self) -> None:
        """On RoundPipe's thread, once all gradients are beside their masters."""
        self._arrived = time.perf_counter()
        masters = [master for _, _, master in self._named]
        self._norm = nn.utils.get_total_norm([master.grad for master in masters])
        if limit := self.spec.recipe.clip_norm:
            nn.utils.clip_grads_with_norm_(masters, limit, self._norm)
        self._refused = not torch.isfinite(self._norm)
        if not self._refused:
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self.options.stale:
            self._optimizer_s += time.perf_counter() - self._arrived

    def counters(self) -> dict[str, float]:
        """optimizer_s: seconds from the last gradient's arrival beside its master to the end of the
        update and, unless it is late, of its copies; only then does the step wait for them."""
        waited = {} if self.options.stale else {"optimizer_wait_s": self._optimizer_s}
        return {"optimizer_s": self._optimizer_s, **waited}

    def _raise_if_refused(self) -> None:
        """NonFiniteLossError, once, after an update that was not made."""
        if self._refused:
            self._refused = False
            raise_unless_finite(self._norm, "the gradient norm", self._updating)

    def _forget(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self._model.synchronize()
        for _, param, _ in self._named:
            param.grad = None

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Mean loss per label token of a batch that is not trained on; changes nothing."""
        self._require_current("evaluate")
        self.drain()
        self._loss.num_tokens, total = batch.num_tokens, torch.zeros(())
        with torch.no_grad():
            for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
                total += self._model(tokens, labels, roundpipe_run_config=self._whole)
        return total

    def save(self, directory: Path) -> None:
        """As every rival's; the state knows no weights that are behind it."""
        self._require_current("save")
        super().save(directory)

    def _require_current(self, what: str) -> None:
        if self.options.stale:
            raise Unsupported(
                f"{what}: the weights are one update behind; train with system.stale=false"
            )

    def drain(self) -> None:
        """Wait for the last update."""
        if self._model is not None:
            self._model.optim_updated.wait()
            self._raise_if_refused()
        super().drain()

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, torch.Tensor]]]:
        self.drain()
        for name, _, master in self._named:
            yield name, master.detach(), self._optimizer.state[master]

    def _hold(self, held: Mapping[str, tuple[torch.Tensor, Mapping[str, torch.Tensor]]]) -> None:
        self.drain()
        for name, param, own in self._named:
            master, moments = held[name]
            own.data.copy_(master)
            self._optimizer.state[own] = {k: v.clone() for k, v in moments.items()}
            param.data.copy_(own)

    def close(self) -> None:
        """Free device and pinned memory; idempotent. RoundPipe's threads end with the process."""
        if self._model is not None:
            self._model.optim_updated.wait()
            self._model = self._optimizer = self._loss = None
            self._named = []
        super().close()
