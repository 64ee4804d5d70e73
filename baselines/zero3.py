"""Zero3: DeepSpeed ZeRO-3 in one process, parameters and optimizer state in pinned host memory.

Invariant: the mathematics is the recipe's (fp32 master, AdamW on the CPU, fp32 accumulation, clipping set and not left
to DeepSpeed's default), and every knob that costs speed is set as an expert would set it, so losing is not our doing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from baselines import distributed, footprint
from baselines.common import (
    CommonOptions,
    check_dtype,
    dtype_name,
    micro_batches,
    parse_options,
    raise_unless_finite,
    whole_directory,
)
from baselines.deepspeed_setup import import_deepspeed, require_deepspeed
from baselines.loss import CausalLMLoss
from baselines.model import config_of, count_params, materialise
from baselines.system import SystemSpec
from engine import Batch, NonFiniteLossError, Plan

STAGING_BYTES_PER_PARAM = 6
"""Pinned staging and power-of-two pinning: 26 measured bytes of host memory per parameter less the 20 accounted for."""
TAG = "step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero3Options(CommonOptions):
    """Options of `Zero3`; sizes are in parameters, as in DeepSpeed's own configuration."""

    offload_param: bool = True
    """Weights in host memory; false keeps the bf16 weights on the device."""
    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 0x7FFF_FFFF
    """Parameters fetched ahead of use; the default is cut to one decoder layer."""
    param_persistence_threshold: int = 100_000
    """Parameters smaller than this stay on the device: the norms and biases."""
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    """Parameters that the CPU optimizer takes at a time."""


class Zero3:
    """DeepSpeed ZeRO-3 with CPU offload, as a `TrainingSystem`. Raises Unsupported where DeepSpeed cannot run."""

    def __init__(self, spec: SystemSpec) -> None:
        check_dtype(spec.dtype)
        self.options = parse_options(Zero3Options, spec.options)
        config_of(spec.model)
        require_deepspeed()
        self.spec = spec
        self._engine: Any = None
        self._joined = False
        self._optimizer_s = 0.0

    def plan(self) -> Plan:
        """Closed-form bytes; 26 per parameter on the host in bf16, as measured."""
        count, options = count_params(self.spec.model), self.options
        total, itemsize = count.total, self.spec.dtype.itemsize
        # Live weights: what is in use, what is kept for reuse, what is fetched ahead.
        fetched = min(total, max(options.max_live_parameters, count.largest) + count.largest_layer)
        device = {
            "weights": itemsize * (fetched if options.offload_param else total),
            # The bucket, the outer gradients beside it, and the second bucket that overlap_comm asks for.
            "gradients": itemsize * min(total, 2 * options.reduce_bucket_size + count.largest),
            **footprint.activation_bytes(self.spec, options),
        }
        # deepspeed.initialize moves the whole module to the device before it takes it apart: the peak of a large model.
        device["setup"] = max(0, itemsize * total - sum(device.values()))
        host = {
            "weights": itemsize * total if options.offload_param else 0,
            "master": 4 * total,
            "moments": 8 * total,
            "gradients": (4 + self._accumulation_dtype().itemsize) * total,
            "staging": STAGING_BYTES_PER_PARAM * total,
        }
        return footprint.plan_on(self.spec.device, device, host)

    def dtypes(self) -> dict[str, str]:
        """Dtypes of weights, master, moments and gradients (accumulated over micro-batches, if there are several)."""
        gradients = dtype_name(self._accumulation_dtype())
        return {"weights": dtype_name(self.spec.dtype), "master": "float32", "moments": "float32", "gradients": gradients}

    def _accumulation_dtype(self) -> torch.dtype:
        """One micro-batch has nothing to accumulate: its gradients stay in the compute dtype and save host memory."""
        return self.spec.dtype if self.spec.shape.num_micro_batches == 1 else torch.float32

    def _config(self) -> dict[str, Any]:
        """DeepSpeed's configuration. `largest_layer` parameters are fetched ahead: one layer while one computes."""
        spec, options, shape = self.spec, self.options, self.spec.shape
        offload = {"device": "cpu", "pin_memory": spec.device.type == "cuda"}
        zero: dict[str, Any] = {
            "stage": 3,
            "offload_optimizer": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": options.reduce_bucket_size,
            "stage3_prefetch_bucket_size": min(options.prefetch_bucket_size, count_params(spec.model).largest_layer),
            "stage3_param_persistence_threshold": options.param_persistence_threshold,
            "stage3_max_live_parameters": options.max_live_parameters,
            "stage3_max_reuse_distance": options.max_reuse_distance,
            "sub_group_size": options.sub_group_size,
        }
        if options.offload_param:
            zero["offload_param"] = offload
        return {
            "train_micro_batch_size_per_gpu": shape.micro_batch_size,
            "gradient_accumulation_steps": shape.num_micro_batches,
            "gradient_clipping": spec.recipe.clip_norm,
            "bf16": {"enabled": spec.dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "bf16" if self._accumulation_dtype() == torch.bfloat16 else "fp32"},
            "zero_optimization": zero,
            "steps_per_print": None,
            "wall_clock_breakdown": False,
        }

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Build the module on the host as it is, then let DeepSpeed take it apart (a bare zero.Init changes the weights)."""
        spec, recipe = self.spec, self.spec.recipe
        deepspeed = import_deepspeed(spec.device)
        distributed.acquire("nccl" if spec.device.type == "cuda" else "gloo")
        self._joined = True
        model = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
        self._named = list(model.named_parameters())
        loss = CausalLMLoss(
            model, loss_chunk=self.options.loss_chunk, activation_checkpointing=self.options.activation_checkpointing
        )
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
            [param for _, param in self._named],
            lr=recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            adamw_mode=True,
        )
        self._engine, *_ = deepspeed.initialize(model=loss, optimizer=optimizer, config=self._config(), dist_init_required=False)
        self._engine.train()
        self._step = 0
        self._optimizer_s = 0.0

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step; the loss is looked at before DeepSpeed's step, which waits for the device in any case."""
        engine = self._engine
        assert engine is not None, "setup comes first"
        total = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        num_tokens = batch.num_tokens
        for index, (tokens, labels, mask) in enumerate(micro_batches(batch, self.spec.device)):
            engine.set_gradient_accumulation_boundary(index == batch.num_micro_batches - 1)
            loss = engine(tokens, labels, mask, num_tokens)
            # Our losses are already shares of the whole step: DeepSpeed must not divide them again.
            engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
        try:
            raise_unless_finite(total, "the loss", self._step)
        except NonFiniteLossError:
            engine.optimizer.zero_grad()
            raise
        self._update()
        return total

    def _update(self) -> None:
        started = time.perf_counter()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.spec.recipe.lr_at(self._step)
        self._engine.step()
        self._optimizer_s += time.perf_counter() - started
        if self._engine.optimizer.overflow:
            raise NonFiniteLossError(
                f"step {self._step}: the gradient norm is not finite; no optimizer step was taken, "
                "lower recipe.lr or check the data"
            )
        self._step += 1

    def drain(self) -> None:
        """Wait for the device."""
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)

    def counters(self) -> dict[str, float]:
        """optimizer_s: seconds in DeepSpeed's step (norm, clipping, CPU AdamW, weights back); nothing overlaps it."""
        return {"optimizer_s": self._optimizer_s, "optimizer_wait_s": self._optimizer_s}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the host), one at a time."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, param in self._named:
            yield name, safe_get_full_fp32_param(param).detach().to("cpu", copy=True).view(param.ds_shape)

    def save(self, directory: Path) -> None:
        """DeepSpeed's own checkpoint, in `directory`."""
        self.drain()
        with whole_directory(directory) as partial:
            self._engine.save_checkpoint(str(partial), tag=TAG, client_state={"step": self._step})

    def resume(self, directory: Path) -> None:
        """Continue where `save` was called; DeepSpeed wants a system that was just set up."""
        if not (Path(directory) / TAG).is_dir():
            raise ValueError(f"resume: got {directory}, allowed a directory that save() wrote; give that of the same system")
        _, state = self._engine.load_checkpoint(str(directory), tag=TAG, load_lr_scheduler_states=False)
        self._step = state["step"]

    def close(self) -> None:
        """Release pinned memory and the process group; idempotent."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            del self._named
        if self._joined:
            self._joined = False
            distributed.release()
        if self.spec.device.type == "cuda":
            torch.cuda.empty_cache()
