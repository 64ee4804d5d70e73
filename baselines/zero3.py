"""Zero3 and Zero2: DeepSpeed in one process, optimizer state in pinned host memory (all of it, or Twin-Flow's share), ZeRO-3's
parameters too unless told otherwise.

Invariant: the mathematics is the recipe's (fp32 master, AdamW on the CPU, fp32 accumulation, clipping set and not left
to DeepSpeed's default), and every knob that costs speed is set as an expert would set it, so losing is not our doing.

Compiled under ZeRO-3, the decoder layers are DeepSpeed's leaf modules: hooks hang on the layer and on none of its submodules, where
they would break the graph (`torch.compiler.disable`), so a layer is fetched and released whole around one compiled call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from baselines import distributed, footprint
from baselines.common import (
    NOT_TAKEN,
    adamw_settings,
    check_dtype,
    dtype_name,
    micro_batches,
    parse_options,
    raise_unless_finite,
    whole_directory,
)
from baselines.deepspeed_options import (
    SMALLEST,
    DeepSpeedOptions,
    Zero2Options,
    Zero3Options,
    accumulation_dtype,
    deepspeed_config,
    on_device,
    smallest_ratio,
    state_on_device,
    sub_groups,
)
from baselines.deepspeed_setup import import_deepspeed, require_deepspeed, setup_phase, sole_builder
from baselines.loss import loss_of
from baselines.model import config_of, count_params, decoder_layers, materialise
from baselines.system import SystemSpec, Unsupported
from engine import Batch, NonFiniteLossError, Plan

TAG = "step"


class Zero3:
    """DeepSpeed ZeRO-3 with CPU offload, as a `TrainingSystem`. Raises Unsupported where DeepSpeed cannot run."""

    options_class: type[DeepSpeedOptions] = Zero3Options
    caveat: str | None = None

    def __init__(self, spec: SystemSpec) -> None:
        check_dtype(spec.dtype)
        self.options = parse_options(self.options_class, spec.options)
        config_of(spec.model)
        require_deepspeed()
        self.spec = spec
        if isinstance(self.options, Zero3Options) and self.options.offload_ratio == SMALLEST:
            self.options = self._with_smallest_ratio(self.options)
        self._engine: Any = None
        self._joined = False
        self._optimizer_s = 0.0
        self._outcome = NOT_TAKEN

    @property
    def setup_phase(self) -> str:
        """What the bench is to call its setup, which may take minutes once."""
        return setup_phase()

    def plan(self) -> Plan:
        """Closed-form bytes; on the host within 5% of what was measured from 0.5B to 14B, where it is 24 to 29 a parameter.

        Master and moments are pageable; weights, fp32 gradients and accumulated ones are pinned, see `_pinned_bytes`.
        """
        count, options = count_params(self.spec.model), self.options
        assert isinstance(options, Zero3Options)
        total, itemsize = count.total, self.spec.dtype.itemsize
        # Live weights: what stays, what is in use, what is kept for reuse, what is fetched ahead.
        persistent = sum(size for size in footprint.parameter_sizes(self.spec.model) if size <= options.param_persistence_threshold)
        fetched = min(total, persistent + max(options.max_live_parameters, count.largest) + count.largest_layer)
        # The bucket, the second that overlap_comm asks for, the outer gradients beside them; leaf modules hand over whole layers.
        gradients = (1 + options.overlap_comm) * options.reduce_bucket_size + count.largest
        gradients += count.largest_layer if options.compile else 0
        device = {
            "weights": itemsize * (fetched if options.offload_param else total),
            "gradients": itemsize * min(total, gradients),
            **footprint.activation_bytes(self.spec, options),
        }
        groups = self._on_device()
        kept = sum(groups)
        if kept:
            device["optimizer"] = state_on_device(groups)
        # deepspeed.initialize moves the whole module to the device before it takes it apart: the peak of a large model.
        device["setup"] = max(0, itemsize * total - sum(device.values()))
        host = {
            "weights": itemsize * total if options.offload_param else 0,
            "master": 4 * (total - kept),
            "moments": 8 * (total - kept),
            "gradients": 4 * (total - kept) + accumulation_dtype(self.spec).itemsize * total,
        }
        host["staging"] = max(0, self._pinned_bytes() - host["weights"] - host["gradients"])
        host["other"] = footprint.process_bytes(self.spec.device)
        return footprint.plan_on(self.spec.device, device, host)

    def _pinned_bytes(self) -> int:
        """Bytes of torch's pinned blocks when setup is over, freed ones too; 0 where nothing is pinned.

        As partition_parameters.py and stage3.py of DeepSpeed 0.19.8 ask for them: each weight by itself, one flat block that they
        move to, the fp32 gradients of each sub-group, the gradients that are accumulated. The weights' first blocks stay cached.
        """
        options, spec = self.options, self.spec
        assert isinstance(options, Zero3Options)
        if not options.pin_memory or spec.device.type != "cuda":
            return 0
        blocks = self._weight_blocks()
        groups, num_kept = sub_groups(spec.model, options.sub_group_size), len(self._on_device())
        for index, group in enumerate(groups):
            blocks.take(4 * group)
            if index < num_kept:  # pinned all the same, and then copied to the device
                blocks.free(4 * group)
        blocks.take(accumulation_dtype(spec).itemsize * sum(groups))
        return blocks.num_bytes

    def _weight_blocks(self) -> footprint.PinnedBlocks:
        """What is pinned when the offloaded weights are in their flat block: those that held them one by one, too."""
        blocks, spec, options = footprint.PinnedBlocks(), self.spec, self.options
        assert isinstance(options, Zero3Options)
        sizes = footprint.parameter_sizes(spec.model) if options.offload_param else []
        weights = [spec.dtype.itemsize * size for size in sizes]
        for size in (*weights, sum(weights)) if weights else ():
            blocks.take(size)
        for size in weights:
            blocks.free(size)
        return blocks

    def _on_device(self) -> list[int]:
        """Sizes of the sub-groups whose master, moments and fp32 gradients stay on the device."""
        options = self.options
        if self.spec.device.type == "cpu" or not isinstance(options, Zero3Options):
            return []  # without a device DeepSpeed keeps all of it on the host, whatever the ratio
        return on_device(sub_groups(self.spec.model, options.sub_group_size), options.offload_ratio)

    def _with_smallest_ratio(self, options: Zero3Options) -> Zero3Options:
        """`options` with the smallest offload_ratio whose plan has room on the device; all on the host where there is none.

        Where keep_activations is to be chosen too, activations get what the optimizer's state leaves.
        """
        self.options = dataclasses.replace(options, offload_ratio=1.0)
        room = footprint.usable_bytes(self.spec) - self.plan().device_bytes
        return dataclasses.replace(options, offload_ratio=smallest_ratio(sub_groups(self.spec.model, options.sub_group_size), room))

    def dtypes(self) -> dict[str, str]:
        """Dtypes of weights, master, moments and gradients (accumulated over micro-batches, if there are several)."""
        gradients = dtype_name(accumulation_dtype(self.spec))
        return {"weights": dtype_name(self.spec.dtype), "master": "float32", "moments": "float32", "gradients": gradients}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Build the module on the host as it is, then let DeepSpeed take it apart (a bare zero.Init changes the weights)."""
        spec = self.spec
        deepspeed = import_deepspeed(spec.device)
        distributed.acquire("nccl" if spec.device.type == "cuda" else "gloo")
        self._joined = True
        model = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
        self._named = list(model.named_parameters())
        loss = loss_of(model, self.options)
        if self.options.compile and isinstance(self.options, Zero3Options):
            deepspeed.utils.set_z3_leaf_modules(loss, list({type(layer) for layer in decoder_layers(model)}))
        self._linear = F.linear
        config = deepspeed_config(spec, self.options)
        with sole_builder():
            optimizer = self._optimizer(deepspeed)
        self._engine, *_ = deepspeed.initialize(model=loss, config=config, dist_init_required=False, **optimizer)
        self._engine.train()
        self._step = 0
        self._optimizer_s = 0.0

    def _optimizer(self, deepspeed: Any) -> dict[str, Any]:
        """What `deepspeed.initialize` gets to optimize with; builds the CPU operator."""
        recipe = self.spec.recipe
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
            [param for _, param in self._named if param.requires_grad],
            **adamw_settings(recipe),
            adamw_mode=True,
        )
        return {"optimizer": optimizer}

    def _set_lr(self) -> None:
        """Before the backward, where SuperOffload and ZenFlow already update; Twin-Flow and ZenFlow have a second optimizer."""
        optimizer, lr = self._engine.optimizer, self.spec.recipe.lr_at(self._step)
        for each in (optimizer, getattr(optimizer, "backup_optimizer", None), getattr(optimizer, "selective_optimizer", None)):
            for group in each.param_groups if each is not None else ():
                group["lr"] = lr

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step; the loss is looked at before DeepSpeed's step, which waits for the device in any case."""
        engine = self._engine
        assert engine is not None, "setup comes first"
        total = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        num_tokens = batch.num_tokens
        self._set_lr()
        for index, (tokens, labels, mask) in enumerate(micro_batches(batch, self.spec.device)):
            engine.set_gradient_accumulation_boundary(index == batch.num_micro_batches - 1)
            loss = engine(tokens, labels, mask, num_tokens)
            # Our losses are already shares of the whole step: DeepSpeed must not divide them again.
            engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
        try:
            raise_unless_finite(total, "the loss", self._step, self._outcome)
        except NonFiniteLossError:
            engine.optimizer.zero_grad()
            raise
        self._update()
        return total

    def _update(self) -> None:
        started = time.perf_counter()
        self._engine.step()
        self._optimizer_s += time.perf_counter() - started
        if self._engine.optimizer.overflow:
            raise NonFiniteLossError(
                f"step {self._step}: the gradient norm is not finite; {self._outcome}, lower recipe.lr or check the data"
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
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        for name, param in self._named:
            master = safe_get_full_fp32_param(param)
            if master is None:  # frozen: it has none
                with GatheredParameters(param):
                    master = param.detach().float().clone()
            yield name, master.detach().to("cpu", copy=True).view(getattr(param, "ds_shape", param.shape))

    def _unsaved(self) -> str | None:
        """What DeepSpeed's checkpoint would lack."""
        return "the moments that offload_ratio keeps on the device" if self._on_device() else None

    def save(self, directory: Path) -> None:
        """DeepSpeed's own checkpoint, in `directory`; Unsupported where it would lack something."""
        if unsaved := self._unsaved():
            raise Unsupported(f"save: DeepSpeed's checkpoint lacks {unsaved}, so nothing was written; train with system=zero3")
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
            F.linear = self._linear  # DeepSpeed replaced it, for whatever else this process may train
        if self._joined:
            self._joined = False
            distributed.release()
        if self.spec.device.type == "cuda":
            torch.cuda.empty_cache()


class Zero2(Zero3):
    """DeepSpeed ZeRO-2 with the optimizer offloaded: weights on the device, gradients to the host in buckets as they appear."""

    options_class = Zero2Options

    def plan(self) -> Plan:
        """Closed-form bytes, from the buffers that DeepSpeed 0.19.8 allocates (deepspeed/runtime/zero/stage_1_and_2.py)."""
        spec, options, count = self.spec, self.options, count_params(self.spec.model)
        total, itemsize = count.total, spec.dtype.itemsize
        several = spec.shape.num_micro_batches > 1
        # Several micro-batches accumulate in fp32 on the device, or, where that is the compute dtype, on the host.
        on_device = 4 * total if several and itemsize < 4 else 0
        on_host = itemsize * total if several and not on_device else 0
        # Buckets are whole whatever the model; the largest gradient has a buffer of its own and may stand beside it.
        buckets = (1 + options.overlap_comm) * options.reduce_bucket_size + 2 * count.largest
        device = {
            "weights": itemsize * total,
            "gradients": itemsize * buckets + on_device,
            **footprint.activation_bytes(spec, options),
        }
        # The weights stand twice while they are made one flat tensor, and again while the master is made of it.
        device["setup"] = max(0, 2 * itemsize * total - sum(device.values()))
        host = {
            "weights": itemsize * total,  # updated weights on their way to the device
            "master": 4 * total,
            "moments": 8 * total,
            "gradients": 4 * total + on_host,
            "other": footprint.process_bytes(spec.device),
        }
        pinned = (host["weights"], host["master"], 4 * total, itemsize * count.largest)
        rounded = options.pin_memory and spec.device.type == "cuda"
        host["staging"] = itemsize * count.largest + (sum(map(footprint.rounding, pinned)) if rounded else 0)
        return footprint.plan_on(spec.device, device, host)
