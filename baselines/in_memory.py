"""InMemory: weights, master, moments and gradients on one device, or spread over those of ranks.

It is the reference for numerics, and the rival that no link slows down. On several ranks it is
FSDP2 without offload and not DDP: gradients are reduced in fp32, as they are summed here, and a
model that one device has no room for can be trained.

Invariant: the step is AdamW on an fp32 master with gradients accumulated and clipped in fp32,
written in the fewest lines; a step whose loss or gradient norm is not finite leaves every parameter
as it was.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from baselines import footprint
from baselines.fsdp2 import Fsdp2, Fsdp2Options
from baselines.loss import CausalLMLoss, loss_of
from baselines.model import count_params, decoder_layers, materialise
from baselines.options import CommonOptions, one_of
from baselines.rival import (
    FiniteFlag,
    TorchRival,
    adamw_groups,
    adamw_settings,
    micro_batches,
    set_lr,
)
from baselines.system import SystemSpec, TrainingSystem, Unsupported
from engine import (
    FLOAT8,
    PLAIN,
    PRODUCTS,
    Batch,
    NonFiniteLossError,
    Plan,
    multiplies_in_float8,
    norm_of,
    require_float8,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InMemoryOptions(CommonOptions):
    """Options of `InMemory`."""

    products: str = one_of(*PRODUCTS)
    """What the layers' linear products are computed in: plain (the dtype of the weights) or float8,
    by torchao's recipe `tensorwise`: the reference of the engine's."""


def build(spec: SystemSpec) -> TrainingSystem:
    """The system on one device, or on those of the ranks."""
    return InMemory(spec) if spec.num_ranks == 1 else ShardedInMemory(spec)


class ShardedInMemory(Fsdp2):
    """FSDP2 that offloads nothing, with the options of `InMemory`."""

    options_class: ClassVar[type[CommonOptions]] = InMemoryOptions
    offloads: ClassVar[bool] = False

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        given = dataclasses.asdict(self.options)
        if (products := given.pop("products")) != PLAIN:
            raise ValueError(
                f"system.products: got {products!r} on {spec.num_ranks} ranks, allowed {PLAIN} "
                "there with system in_memory; take one rank"
            )
        self.options = Fsdp2Options(**given)


class InMemory(TorchRival):
    """Plain training on one device, as a `TrainingSystem`."""

    options_class: ClassVar[type[CommonOptions]] = InMemoryOptions
    options: CommonOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        self.loss: CausalLMLoss | None = None
        options = self.options
        self._float8 = isinstance(options, InMemoryOptions) and options.products == FLOAT8
        if self._float8:
            num_tokens = spec.shape.micro_batch_size * spec.shape.seq_len
            require_float8(spec.dtype, spec.device, num_tokens)
            if importlib.util.find_spec("torchao") is None:
                raise Unsupported(
                    "torchao, which multiplies in float8 here, is not installed; pip install "
                    "'megatrain-bench[torchao]'"
                )
            self.caveat = "the layers multiply in float8: another function than bf16's"

    def plan(self) -> Plan:
        """Closed-form bytes: 18 per parameter with a bf16 module, 16 in fp32; activations."""
        count = count_params(self.spec.model)
        mixed = self.spec.dtype != torch.float32
        device = {
            "weights": count.total * self.spec.dtype.itemsize,
            "master": 4 * count.total if mixed else 0,
            "moments": 8 * count.total,
            "gradients": 4 * count.total + (2 * count.largest if mixed else 0),
            **footprint.activation_bytes(self.spec, self.options),
        }
        return footprint.plan_on(self.spec.device, device, {})

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights and make the master, the gradients and the optimizer."""
        spec = self.spec
        model = materialise(spec.model, spec.dtype, spec.device, weights)
        if self._float8:
            _use_float8(decoder_layers(model), spec.device)
        self.loss = loss_of(model, self.options)
        self._params: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._masters = self._params
        if spec.dtype != torch.float32:
            self._masters = {
                name: param.detach().float().requires_grad_(param.requires_grad)
                for name, param in self._params.items()
            }
            for name, param in model.named_parameters():
                if param.requires_grad:
                    master = self._masters[name]
                    hook = self._accumulate_into(master, torch.zeros_like(master))
                    param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._optimizer = torch.optim.AdamW(
            adamw_groups(spec.recipe, [m for m in self._masters.values() if m.requires_grad]),
            **adamw_settings(spec.recipe),
            fused=True,
        )
        self._flag = FiniteFlag(spec.device)

    def _accumulate_into(
        self, master: torch.Tensor, total: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        """A hook that adds a bf16 gradient to its fp32 total and frees it at once, so they are
        never all alive.

        The total is the master's gradient in the steps in which one comes: AdamW skips a parameter
        without.
        """

        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            if master.grad is None:
                master.grad = total.copy_(param.grad)
            else:
                total.add_(param.grad)
            param.grad = None

        return hook

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step over all micro-batches; the mean loss, unsynchronised."""
        assert self.loss is not None, "setup comes first"
        total = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        num_tokens = batch.num_tokens
        self._optimizer.zero_grad()
        for tokens, labels, mask, places in micro_batches(batch, self.spec.device):
            loss = self.loss(tokens, labels, mask, num_tokens, places)
            loss.backward()
            total += loss.detach()
        # The verdict on the step before: it is long finished, so the device has work while the host
        # looks.
        self._raise_if_bad()
        self._update(total)
        return total

    @torch.no_grad()
    def _update(self, loss: torch.Tensor) -> None:
        """Clip as torch does, update the master by AdamW, round the weights from it.

        Clipping scales by min(1, clip_norm / (norm + 1e-6)).
        """
        recipe, masters = self.spec.recipe, list(self._masters.values())
        grads = [master.grad for master in masters if master.grad is not None]
        # One kernel for all parameters; on the CPU it would sum a large one in a few fp32 lanes.
        if self.spec.device.type == "cpu":
            norm = norm_of(grads)
        else:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        self.gradient_norm = norm
        if recipe.clip_norm > 0:
            torch._foreach_mul_(grads, torch.clamp(recipe.clip_norm / (norm + 1e-6), max=1.0))
        not_finite = 1.0 - torch.isfinite(norm + loss).float()
        # The fused kernel skips the update by itself where found_inf is 1: no look from the host.
        self._optimizer.found_inf = not_finite  # type: ignore[attr-defined]
        set_lr(self._optimizer, recipe.lr_at(self._step))
        self._optimizer.step()
        if self._masters is not self._params:
            torch._foreach_copy_(list(self._params.values()), masters)
        self._flag.record(not_finite, self._step)
        self._step += 1

    def _raise_if_bad(self) -> None:
        try:
            self._flag.raise_if_bad()
        except NonFiniteLossError:
            self._step -= 1
            raise

    def drain(self) -> None:
        """Wait for the device; raise for a step that was not finite."""
        super().drain()
        if self.loss is not None:
            self._raise_if_bad()

    def counters(self) -> dict[str, float]:
        """Nothing crosses the link here, and the optimizer has no clock of its own."""
        return {}

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, torch.Tensor]]]:
        for name, master in self._masters.items():
            yield name, master.detach(), self._optimizer.state.get(master, {})

    def _hold(self, held: Mapping[str, tuple[torch.Tensor, Mapping[str, torch.Tensor]]]) -> None:
        for name, own in self._masters.items():
            master, moments = held[name]
            own.copy_(master)
            self._params[name].copy_(master)
            if moments:  # none before the first step, nor of a frozen parameter
                self._optimizer.state[own] = {
                    key: value.to(own.device, copy=True) for key, value in moments.items()
                }

    def close(self) -> None:
        """Free the device's memory; idempotent."""
        if self.loss is not None:
            self.loss = None
            del self._params, self._masters, self._optimizer, self._flag
        super().close()


def _use_float8(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Have torchao multiply in float8 where the engine does; on a CPU, which has no such kernels of
    its, with operands that are rounded to float8 and back."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device.type == "cpu")
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=multiplies_in_float8, config=config)
