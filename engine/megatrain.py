"""MegaTrain: the engine put together, behind the interface that every training system shares.

Method: MegaTrain, arXiv 2604.05091, with an exact fp32 master, one recomputation and exact clipping.
Invariant: constructing one allocates nothing that grows with the model; setup allocates once; a step allocates
no pinned memory and waits for nothing that the schedule does not name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from engine import saving
from engine.config import EngineConfig
from engine.planner.cost import Rates
from engine.layers.decoder import Decoder
from engine.executor import Executor
from engine.store import HostStore
from engine.adamw import AdamW
from engine.pipeline import LANES, Pipeline
from engine.sizes import Plan
from engine.planner.planner import Machine, Planner
from engine.recipe import Batch, Recipe
from engine.layers.rehearsal import rehearse
from engine.lanes import CudaLanes, Lanes, TwinLanes
from engine.timeline import Timeline, last_step


class MegaTrain:
    """Trains a decoder-only transformers model whose parameters and optimizer state stay in host memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        recipe: Recipe,
        micro_batch_size: int,
        seq_len: int,
        num_micro_batches: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        config: EngineConfig | None = None,
        lanes: Lanes | None = None,
        machine: Machine | None = None,
    ) -> None:
        """model: a skeleton, parameters on the meta device or to be overwritten; it becomes the engine's own.

        machine: what to place and predict for; None is the machine at hand, without a limit on host memory.
        Raises ValueError where the model, the dtype or an option is not supported.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"system.dtype: got {dtype}, allowed bfloat16, float32; bfloat16 keeps an fp32 master beside it")
        shape = {"num_micro_batches": num_micro_batches, "micro_batch_size": micro_batch_size, "seq_len": seq_len}
        for name, value in shape.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"shape.{name}: got {value!r}, allowed an integer >= 1; give at least one")
        config, tokens = config or EngineConfig(), micro_batch_size * seq_len
        self.config = replace(config, mlp_chunk=config.mlp_chunk if config.mlp_chunk < tokens else 0)
        self.recipe, self.dtype = recipe, dtype
        self.device = _with_index(torch.device(device))
        self.shape = (num_micro_batches, micro_batch_size, seq_len)
        self._lanes = lanes
        self._decoder = Decoder(model, mlp_chunk=self.config.mlp_chunk)
        rehearse(self._decoder, dtype=dtype, device=self.device, micro_batch=self.shape[1:])
        asked = Pipeline(
            num_layers=self._decoder.num_layers,
            depth=self.config.depth,
            streams=self.config.streams,
            checkpoint_interval=self.config.checkpoint_interval,
            gradient_slabs=self.config.gradient_slabs,
            device_blocks=self.config.device_optimizer,
            kept_layers=self.config.keep_activations,
            offloaded_layers=self.config.offload_activations,
            clip=recipe.clip_norm > 0,
            overlap=self.config.optimizer_overlap,
            late_moments=self.config.late_moments,
            poison=self.config.poison,
        )
        self._check_placement(asked)
        self._planner = Planner(
            config=self.config,
            layouts=self._decoder.layouts(),
            model_config=model.config,
            dtype=dtype,
            shape=self.shape,
            device=self.device,
            num_threads=self.config.num_threads or max(1, len(os.sched_getaffinity(0)) - (2 if self.device.type == "cuda" else 0)),
            machine=machine or Machine(),
        )
        self.pipeline = self._planner.placed(asked)
        self._store: HostStore | None = None
        self._executor: Executor | None = None
        self._next_step = 0

    def _check_placement(self, p: Pipeline) -> None:
        limits = {"device_optimizer": p.num_blocks, "keep_activations": p.num_layers, "offload_activations": p.num_layers}
        for name, most in limits.items():
            if getattr(self.config, name) > most:
                raise ValueError(
                    f"system.{name}: got {getattr(self.config, name)}, allowed 0 to {most} with {p.num_layers} layers; lower it"
                )

        if p.kept_layers + p.offloaded_layers > p.num_layers:
            raise ValueError(
                f"system.offload_activations: got {p.offloaded_layers}, allowed 0 to {p.num_layers - p.kept_layers} where "
                f"system.keep_activations is {p.kept_layers} of {p.num_layers} layers; lower one of the two"
            )

    def record(self, batches: Sequence[Batch]) -> Timeline:
        """Train on `batches`, two or more, and return the last whole step as it ran. Timing marks slow it a little."""
        _, _, lanes = self._ready()
        lanes.drain()
        lanes.start_recording()
        for batch in batches:
            self.train_step(batch)
        lanes.drain()
        return last_step(lanes.recorded())

    def predict(self) -> Timeline:
        """One steady step as the schedule and the machine's rates (`rates`) have it; allocates nothing that stays."""
        return self._planner.predict(self.pipeline)

    def predict_window(self, num_steps: int) -> float:
        """Seconds that `num_steps` steps take from one `drain` to the next, by the same means."""
        return self._planner.predict_window(self.pipeline, num_steps)

    @property
    def rates(self) -> Rates:
        """What the machine does in a second, as given or probed."""
        return self._planner.rates

    @property
    def placement(self) -> dict[str, int]:
        """As asked for or chosen: numbers of blocks on the device, of layers kept and offloaded, of layers between kept inputs."""
        names = ("device_blocks", "kept_layers", "offloaded_layers", "checkpoint_interval")
        return {name: getattr(self.pipeline, name) for name in names}

    def plan(self) -> Plan:
        """Closed-form bytes by kind; allocates nothing."""
        return self._planner.plan(self.pipeline)

    @property
    def caveat(self) -> str | None:
        """What must be said beside a number of this configuration."""
        told = []
        if self.dtype == torch.bfloat16 and self.config.master == "bf16":
            told.append("bfloat16 weights are the master, as published: small updates are lost")
        if self.config.torch_adamw:
            told.append("AdamW through torch, several times slower than its own: not the engine's speed, not ranked")
        return "; ".join(told) or None

    def dtypes(self) -> dict[str, str]:
        """Dtypes of what is kept."""
        name = str(self.dtype).removeprefix("torch.")
        masters = {"split": "float32 (bfloat16 + int16 remainder)", "fp32": "float32", "bf16": "bfloat16"}
        master = name if name == "float32" else masters[self.config.master]
        return {"weights": name, "master": master, "moments": "float32", "gradients": name}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Allocate host and device memory and load `weights`: (name, tensor) pairs, every parameter once.

        Raises ValueError where a name or a shape is not the model's, or a parameter is missing; KernelError, before it allocates,
        where AdamW's kernel can be neither found nor built and `torch_adamw` does not ask for torch's.
        """
        optimizer = AdamW(self.recipe, num_threads=self._planner.num_threads, use_native=not self.config.torch_adamw)
        self._store = HostStore(self._planner.host_spec(self.pipeline), device=self.device)
        places = {self._decoder.full_name(b, n): (b, n) for b, block in enumerate(self._decoder.blocks) for n in block}
        missing = set(places)
        for name, value in weights:
            if name not in places:
                raise ValueError(
                    f"weights: got {name!r}, allowed the model's {len(places)} parameters, {min(places)} among them; leave it out"
                )
            block, local = places[name]
            if value.shape != self._decoder.blocks[block][local]:
                allowed = tuple(self._decoder.blocks[block][local])
                raise ValueError(
                    f"weights: got {name!r} of shape {tuple(value.shape)}, allowed {allowed}; load weights of this very model"
                )
            self._store.set_parameter(block, local, value)
            missing.discard(name)
        if missing:
            raise ValueError(
                f"weights: {len(missing)} parameters were not given, {sorted(missing)[0]} among them; allowed is a full set"
            )
        if self._lanes is None:
            names = list(dict.fromkeys(LANES[self.config.streams].values()))
            self._lanes = CudaLanes(self.device, names) if self.device.type == "cuda" else TwinLanes()
        self._executor = Executor(
            self.pipeline,
            self._decoder,
            self._store,
            optimizer,
            self._lanes,
            device=self.device,
            loss_chunk=self.config.loss_chunk,
            micro_batch=self.shape,
            compiled=self.config.compile,
        )

    def _ready(self) -> tuple[HostStore, Executor, Lanes]:
        assert self._store is not None, "call setup first"
        assert self._executor is not None
        assert self._lanes is not None
        return self._store, self._executor, self._lanes

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Enqueue one optimizer step over all micro-batches; the mean loss, fp32, 0-dim, unsynchronised.

        Raises ValueError where the batch is not of the shape that the engine was made for.

        Raises NonFiniteLossError, once, here, in a later call or in drain, where a loss or a gradient norm was not finite:
        that step changed no parameter and no moment, and training can go on. Where a later call raises it, as on CUDA, that
        call's batch is not trained on either, and the bad step keeps its place in the learning-rate schedule; `resume` takes
        it back. With `clip_norm=0` there is no norm: a gradient that is not finite is applied, and the next loss tells.

        After any other error updates may be half done: `resume` a checkpoint, in a new engine where the CPU lane's error is
        raised again.
        """
        _, executor, _ = self._ready()
        self._check_batch(batch)
        with torch.autograd.set_multithreading_enabled(False):  # autograd's own thread keeps gradients longer
            loss = executor.run(batch, self._next_step)
        self._next_step += 1
        return loss

    def _check_batch(self, batch: Batch) -> None:
        for name in ("tokens", "labels", "attention_mask"):
            tensor: torch.Tensor | None = getattr(batch, name)
            if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (torch.int64, self.shape):
                raise ValueError(
                    f"batch.{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}, allowed torch.int64 of shape {self.shape}, "
                    "which are micro-batches, rows and tokens; cut the step as the engine was told"
                )

    def drain(self) -> None:
        """Return when every lane is idle and every update applied; raise what went wrong on the CPU lane, as `train_step` does."""
        self._ready()[2].drain()

    def counters(self) -> dict[str, float]:
        """Totals since setup: bytes moved each way, recomputed FLOPs, seconds the optimizer ran and was waited for."""
        _, executor, lanes = self._ready()
        return executor.counters | {"optimizer_wait_s": lanes.waited_s}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 copy on the host) of every parameter."""
        store, _, lanes = self._ready()
        lanes.drain()
        for block in range(self.pipeline.num_blocks):
            for name, value in store.parameters(block):
                yield self._decoder.full_name(block, name), value

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 copy on the host) of every parameter's first moment.

        After one step it is 1 - beta1 times the gradient, as clipped.
        """
        store, executor, lanes = self._ready()
        lanes.drain()
        executor.finish_moments()
        for block in range(self.pipeline.num_blocks):
            for name, value in store.moments(block):
                yield self._decoder.full_name(block, name), value

    def save(self, directory: Path) -> None:
        """Write a checkpoint directory; it appears whole or not at all."""
        store, executor, lanes = self._ready()
        lanes.drain()
        executor.finish_moments()
        saving.save(store, directory, self._next_step, self.recipe)

    def resume(self, directory: Path) -> None:
        """Continue, after setup, from a checkpoint that `save` wrote; one whose files were changed changes nothing here.

        Raises ValueError where it does not fit. Warns where its recipe is another: this engine's own is what goes on.
        """
        store, executor, lanes = self._ready()
        lanes.drain()
        executor.finish_moments()
        self._next_step = saving.resume(store, directory, self.recipe)

    def close(self) -> None:
        """Stop the worker and unpin the host arena; idempotent."""
        if self._lanes is not None:
            self._lanes.close()
        if self._store is not None:
            self._store.close()
        self._store = self._executor = None


def _with_index(device: torch.device) -> torch.device:
    """`cuda` as the current `cuda:N`, which a worker thread must be given by number."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
