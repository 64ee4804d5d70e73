"""TorchaoOffload: weights on the device, torchao's CPUOffloadOptimizer with an AdamW on the host
for each of them.

Invariant: torchao moves gradients and weights, and nothing else here does; the AdamW it is given
keeps an fp32 master, as the recipe asks. It starts on the host while the last gradients arrive, so
nothing can be clipped, and the row says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from baselines import footprint
from baselines.loss import loss_of
from baselines.model import count_params, materialise
from baselines.options import CommonOptions
from baselines.rival import (
    FiniteFlag,
    TorchRival,
    adamw_groups,
    adamw_settings,
    micro_batches,
    require_cuda,
    set_lr,
)
from baselines.system import SystemSpec, Unsupported
from engine import Batch, Plan, dtype_name, pinned_rounding


class MasterAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on fp32 copies of `params`, which are made when first needed."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.weights: list[torch.Tensor] = [
            weight for group in self.param_groups for weight in group["params"]
        ]
        self.inner: torch.optim.AdamW | None = None

    @torch.no_grad()
    def build(self) -> torch.optim.AdamW:
        """The AdamW of the masters. In the constructor torchao is still filling the weights."""
        if self.inner is None:
            self.masters = [weight.detach().float() for weight in self.weights]
            masters = iter(self.masters)
            groups = [
                {**group, "params": [next(masters) for _ in group["params"]]}
                for group in self.param_groups
            ]
            self.inner = torch.optim.AdamW(groups, fused=True, **self.defaults)
        return self.inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with each group's learning rate; the weights are the masters, rounded."""
        inner = self.build()
        for own, group in zip(inner.param_groups, self.param_groups, strict=True):
            own["lr"] = group["lr"]
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        inner.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad = None


class TorchaoOffload(TorchRival):
    """torchao's CPUOffloadOptimizer; CUDA only. Raises Unsupported where torchao is missing."""

    options: CommonOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        require_cuda(spec.device, "torchao's CPUOffloadOptimizer")
        if importlib.util.find_spec("torchao") is None:
            raise Unsupported(
                "torchao is not installed; pip install 'torchao>=0.11', or megatrain-bench[torchao]"
            )
        if spec.recipe.clip_norm > 0:
            self.caveat = f"no clipping, where the recipe clips at {spec.recipe.clip_norm:g}"
        self._optimizer: Any = None

    def plan(self) -> Plan:
        """Closed-form bytes. Pinned weights and gradients are a block for each parameter."""
        spec, count = self.spec, count_params(self.spec.model)
        total, itemsize = count.total, spec.dtype.itemsize
        mixed = itemsize < 4
        # One micro-batch: a gradient is freed when it has left, so a layer's are alive; else all of
        # them accumulate here.
        alone = spec.shape.num_micro_batches == 1
        gradients = count.largest + count.largest_layer if alone else total
        pinned = [itemsize * size for size in count.sizes]
        device = {
            "weights": itemsize * total,
            "gradients": itemsize * gradients,
            **footprint.activation_bytes(spec, self.options),
        }
        host = {
            "weights": itemsize * total,
            "master": 4 * total if mixed else 0,
            "moments": 8 * total,
            "gradients": itemsize * total + (4 * count.largest if mixed else 0),
            "staging": 2 * sum(map(pinned_rounding, pinned)),
        }
        return footprint.plan_on(spec.device, device, host)

    def dtypes(self) -> dict[str, str]:
        """Gradients are accumulated in the compute dtype."""
        return super().dtypes() | {"gradients": dtype_name(self.spec.dtype)}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights on the device and have torchao make their pinned copies."""
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            raise Unsupported(
                f"torchao has no torchao.optim ({' '.join(str(error).split())}); pip install -U "
                "torchao"
            ) from None
        spec = self.spec
        model = materialise(spec.model, spec.dtype, spec.device, weights)
        self.loss = loss_of(model, self.options)
        self._named = list(model.named_parameters())
        self._optimizer = CPUOffloadOptimizer(
            adamw_groups(spec.recipe, [param for _, param in self._named]),
            MasterAdamW,
            offload_gradients=spec.shape.num_micro_batches == 1,
            **adamw_settings(spec.recipe),
        )
        torch.cuda.synchronize(spec.device)  # the pinned copies are whole
        self._flag = FiniteFlag(spec.device)

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step. The loss is read during the backward; the norm stays unknown."""
        assert self._optimizer is not None, "setup comes first"
        total = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        for tokens, labels, mask, places in micro_batches(batch, self.spec.device):
            loss = self.loss(tokens, labels, mask, batch.num_tokens, places)
            total += loss.detach()
            self._flag.record((~torch.isfinite(total)).float(), self._step)
            loss.backward()
        try:
            self._flag.raise_if_bad()
            self._update()
        finally:
            self._optimizer.queue.clear()
            self._optimizer.zero_grad()
        return total

    def _update(self) -> None:
        """torchao's step: it waits for gradients, runs AdamW on the host and sends weights."""
        with self._optimizing():
            set_lr(self._optimizer, self.spec.recipe.lr_at(self._step))
            self._optimizer.step()

    def _owners(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor, torch.optim.AdamW]]:
        """(name, weight, fp32 master, its AdamW); torchao keeps small ones on the device."""
        small = self._optimizer.d_opt
        places = {} if small is None else {id(weight): i for i, weight in enumerate(small.weights)}
        for name, param in self._named:
            owner = small if id(param) in places else self._optimizer.optim_dict[param]
            inner = owner.build()
            yield name, param, owner.masters[places.get(id(param), 0)], inner

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, torch.Tensor]]]:
        for name, _, master, inner in self._owners():
            yield name, master, inner.state[master]

    def _hold(self, held: Mapping[str, tuple[torch.Tensor, Mapping[str, torch.Tensor]]]) -> None:
        copies = self._optimizer.param_d2h_map
        for name, param, own, inner in self._owners():
            master, moments = held[name]
            own.copy_(master)
            inner.state[own] = {
                key: value.to(own.device, copy=True) for key, value in moments.items()
            }
            param.copy_(own)
            if param in copies:
                copies[param].copy_(own)

    def close(self) -> None:
        """Free device and pinned memory; idempotent."""
        if self._optimizer is not None:
            self._optimizer = None
            del self.loss, self._named
        super().close()
