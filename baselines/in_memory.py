"""InMemory: weights, master, moments and gradients on one device. The numerics reference, and the rival that no link slows down.

Invariant: the step is AdamW on an fp32 master with gradients accumulated and clipped in fp32, written in the
fewest lines; a step whose loss or gradient norm is not finite leaves every parameter as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from baselines import footprint
from baselines.common import (
    CommonOptions,
    FiniteFlag,
    adamw_settings,
    check_dtype,
    dtype_name,
    load_state,
    micro_batches,
    parse_options,
    whole_directory,
)
from baselines.loss import CausalLMLoss, loss_of
from baselines.model import config_of, count_params, materialise
from baselines.system import SystemSpec
from engine import Batch, Plan, norm_of


class InMemory:
    """Plain training on one device, as a `TrainingSystem`."""

    options_class = CommonOptions

    def __init__(self, spec: SystemSpec) -> None:
        check_dtype(spec.dtype)
        self.options = parse_options(self.options_class, spec.options)
        config_of(spec.model)
        self.spec = spec
        self.loss: CausalLMLoss | None = None

    def plan(self) -> Plan:
        """Closed-form bytes: 18 per parameter with a bf16 module, 16 in fp32, and the activations."""
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

    def dtypes(self) -> dict[str, str]:
        """Dtypes of weights, master, moments and (accumulated) gradients."""
        return {"weights": dtype_name(self.spec.dtype), "master": "float32", "moments": "float32", "gradients": "float32"}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights and make the master, the gradients and the optimizer."""
        spec = self.spec
        model = materialise(spec.model, spec.dtype, spec.device, weights)
        self.loss = loss_of(model, self.options)
        named = list(model.named_parameters())
        self._names, self._params = [name for name, _ in named], [param for _, param in named]
        self._masters = self._params
        if spec.dtype != torch.float32:
            self._masters = [p.detach().float().requires_grad_(p.requires_grad) for p in self._params]
            for param, master in zip(self._params, self._masters, strict=True):
                if param.requires_grad:
                    hook = self._accumulate_into(master, torch.zeros_like(master))
                    param.register_post_accumulate_grad_hook(hook)
        recipe = spec.recipe
        self._optimizer = torch.optim.AdamW(
            [master for master in self._masters if master.requires_grad],
            **adamw_settings(recipe),
            fused=True,
        )
        self._flag = FiniteFlag(spec.device)
        self._step = 0

    def _accumulate_into(self, master: torch.Tensor, total: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A hook that adds a bf16 gradient to its fp32 total and frees it at once, so they are never all alive.

        The total is the master's gradient in the steps in which one comes: AdamW skips a parameter without.
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
        for tokens, labels, mask in micro_batches(batch, self.spec.device):
            loss = self.loss(tokens, labels, mask, num_tokens)
            loss.backward()
            total += loss.detach()
        # The verdict on the step before: it is long finished, so the device has work while the host looks.
        self._raise_if_bad()
        self._update(total)
        return total

    @torch.no_grad()
    def _update(self, loss: torch.Tensor) -> None:
        """Clip (scale = min(1, clip_norm / (norm + 1e-6)), as torch does), AdamW on the master, bf16 weights from it."""
        recipe, grads = self.spec.recipe, [master.grad for master in self._masters if master.grad is not None]
        # One kernel for all parameters; on the CPU it would sum a large one in a few fp32 lanes.
        on_cpu = self.spec.device.type == "cpu"
        norm = norm_of(grads) if on_cpu else torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if recipe.clip_norm > 0:
            torch._foreach_mul_(grads, torch.clamp(recipe.clip_norm / (norm + 1e-6), max=1.0))
        not_finite = 1.0 - torch.isfinite(norm + loss).float()
        # The fused kernel skips the update by itself where found_inf is 1: no look from the host.
        self._optimizer.found_inf = not_finite  # type: ignore[attr-defined]
        self._optimizer.param_groups[0]["lr"] = recipe.lr_at(self._step)
        self._optimizer.step()
        if self._masters is not self._params:
            torch._foreach_copy_(self._params, self._masters)
        self._flag.record(not_finite, self._step)
        self._step += 1

    def _raise_if_bad(self) -> None:
        try:
            self._flag.raise_if_bad()
        except RuntimeError:
            self._step -= 1
            raise

    def drain(self) -> None:
        """Wait for the device; raise for a step that was not finite."""
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)
        if self.loss is not None:
            self._raise_if_bad()

    def counters(self) -> dict[str, float]:
        """Nothing crosses the link here, and the optimizer has no clock of its own."""
        return {}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the host), one at a time."""
        for name, master in zip(self._names, self._masters, strict=True):
            yield name, master.detach().to("cpu", copy=True)

    def save(self, directory: Path) -> None:
        """Write master, moments and the step number to `directory`/state.pt."""
        self.drain()
        master = {name: tensor.detach() for name, tensor in zip(self._names, self._masters, strict=True)}
        with whole_directory(directory) as partial:
            torch.save({"master": master, "optimizer": self._optimizer.state_dict(), "step": self._step}, partial / "state.pt")

    @torch.no_grad()
    def resume(self, directory: Path) -> None:
        """Continue bit for bit where `save` was called."""
        state = load_state(directory, len(self._names))
        for name, master, param in zip(self._names, self._masters, self._params, strict=True):
            master.copy_(state["master"][name])
            param.copy_(master)
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]

    def close(self) -> None:
        """Free the device memory; idempotent."""
        if self.loss is None:
            return
        self.loss = None
        del self._params, self._masters, self._optimizer, self._flag
        if self.spec.device.type == "cuda":
            torch.cuda.empty_cache()
