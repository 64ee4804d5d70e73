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

from engine import checkpoint, placement
from engine.config import EngineConfig
from engine.cost import Cost, Rates, measure
from engine.decoder import Decoder
from engine.executor import Executor
from engine.host import HostSpec, HostStore
from engine.layout import pack
from engine.optimizer import AdamW
from engine.pipeline import LANES, Pipeline
from engine.plan import Plan, device_bytes
from engine.recipe import Batch, Recipe
from engine.schedule import build
from engine.streams import CudaLanes, Lanes, TwinLanes
from engine.timeline import Timeline, last_step, simulate

HOST_OVERHEAD = 2 * 10**9
"""Bytes of host memory that a process with torch and a CUDA context holds before any model."""


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
        rates: Rates | None = None,
        device_memory: int | None = None,
    ) -> None:
        """model: a skeleton, parameters on the meta device or to be overwritten; it becomes the engine's own.

        rates, device_memory (bytes): of a machine that is not here, to plan and predict with; None asks this one.
        Raises ValueError where the model, the dtype or an option is not supported.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"system.dtype: got {dtype}, allowed bfloat16, float32; bfloat16 keeps an fp32 master beside it")
        self.config, self.recipe, self.dtype = config or EngineConfig(), recipe, dtype
        self.device = _with_index(torch.device(device))
        self.shape = (num_micro_batches, micro_batch_size, seq_len)
        self._lanes, self._rates, self._device_memory = lanes, rates, device_memory
        self._decoder = Decoder(model)
        self._model_config = model.config
        self.pipeline = Pipeline(
            num_layers=self._decoder.num_layers,
            depth=self.config.depth,
            streams=self.config.streams,
            checkpoint_interval=self.config.checkpoint_interval,
            gradient_slabs=self.config.gradient_slabs,
            device_blocks=self.config.device_optimizer,
            kept_layers=self.config.keep_activations,
            clip=recipe.clip_norm > 0,
            overlap=self.config.optimizer_overlap,
            poison=self.config.poison,
        )
        self._check_placement()
        self._layouts = [pack(block.items()) for block in self._decoder.blocks]
        self.pipeline = self._placed()
        self._host = self._host_spec(self.pipeline)
        self._store: HostStore | None = None
        self._executor: Executor | None = None
        self._next_step = 0

    def _check_placement(self) -> None:
        p = self.pipeline
        for name, most in (("device_optimizer", p.num_blocks), ("keep_activations", p.num_layers)):
            if getattr(self.config, name) > most:
                raise ValueError(
                    f"system.{name}: got {getattr(self.config, name)}, allowed 0 to {most} with {p.num_layers} layers; lower it"
                )

    def _placed(self) -> Pipeline:
        """The pipeline with what was left to `placement` chosen; on the CPU nothing is gained by moving things."""
        p = self.pipeline
        if placement.AUTO not in (p.device_blocks, p.kept_layers):
            return p
        if self.device.type != "cuda":
            return replace(p, device_blocks=max(0, p.device_blocks), kept_layers=max(0, p.kept_layers))
        return placement.choose(
            p,
            budget=int(self._device_total * placement.USABLE),
            device_bytes=lambda candidate: sum(self._device_plan(candidate).values()),
            step_s=lambda candidate: self._predicted(candidate).step_s,
        )

    @property
    def _device_total(self) -> int:
        return self._device_memory or int(torch.cuda.mem_get_info(self.device)[1])

    @property
    def rates(self) -> Rates:
        """What this machine does in a second, probed once, or as given."""
        if self._rates is None:
            self._rates = measure(self.device, self._num_threads)
        return self._rates

    def _predicted(self, pipeline: Pipeline) -> Timeline:
        cost = Cost.of(
            self._model_config,
            pipeline=pipeline,
            layouts=self._layouts,
            shape=self.shape,
            itemsize=self.dtype.itemsize,
            loss_chunk=self.config.loss_chunk,
            compiled=self.config.compile,
            rates=self.rates,
        )
        return simulate(build(pipeline), cost.seconds)

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
        return self._predicted(self.pipeline)

    @property
    def _num_threads(self) -> int:
        return self.config.num_threads or max(1, (os.cpu_count() or 1) - (2 if self.device.type == "cuda" else 0))

    def _host_spec(self, p: Pipeline) -> HostSpec:
        sizes = [layout.numel for layout in self._layouts]
        hosted = [block for block in range(p.num_blocks) if not p.on_device(block)]
        shared = [block for block in hosted if p.pooled and p.is_layer(block)]
        first = p.gradient_slabs if p.pooled else 0
        slabs = dict.fromkeys(range(p.gradient_slabs), max(sizes[1:-1])) if shared else {}
        slabs |= {first + block: sizes[block] for block in hosted if block not in shared}
        return HostSpec(
            layouts=self._layouts,
            dtype=self.dtype,
            master=self.config.master,
            slabs=slabs,
            kept=shared if p.deferred else (),
            on_device=p.device_blocks,
        )

    def plan(self) -> Plan:
        """Closed-form bytes by kind; allocates nothing."""
        host = self._host.host_bytes() | ({"other": HOST_OVERHEAD} if self.device.type == "cuda" else {})
        return Plan(device=self._device_plan(self.pipeline), host=host)

    def _device_plan(self, pipeline: Pipeline) -> dict[str, int]:
        device = device_bytes(
            pipeline,
            self._layouts,
            self._model_config,
            self.dtype,
            self.shape,
            self.config.loss_chunk,
            compiled=self.config.compile,
        )
        state = self._host_spec(pipeline).device_state_bytes()
        state.pop("weights")  # counted above
        return device | state

    def dtypes(self) -> dict[str, str]:
        """Dtypes of what is kept."""
        name = str(self.dtype).removeprefix("torch.")
        master = "float32" if name == "float32" or self.config.master == "fp32" else "float32 (bfloat16 + int16 remainder)"
        return {"weights": name, "master": master, "moments": "float32", "gradients": name}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Allocate host and device memory and load `weights`: (name, tensor) pairs, every parameter once."""
        self._store = HostStore(self._host, device=self.device)
        missing = {self._decoder.full_name(b, n) for b, block in enumerate(self._decoder.blocks) for n in block}
        for name, value in weights:
            self._store.set_parameter(*self._decoder.locate(name), value)
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
            AdamW(self.recipe, num_threads=self._num_threads),
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

        Raises NonFiniteLossError (here, in a later call or in drain) where a loss or a gradient norm was not finite.
        """
        _, executor, _ = self._ready()
        assert tuple(batch.tokens.shape) == self.shape, f"batch of shape {tuple(batch.tokens.shape)}, expected {self.shape}"
        loss = executor.run(batch, self._next_step)
        self._next_step += 1
        return loss

    def drain(self) -> None:
        """Return when every lane is idle and every update applied; re-raise what went wrong on the CPU lane."""
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

    def save(self, directory: Path) -> None:
        """Write a checkpoint directory; it appears whole or not at all."""
        store, _, lanes = self._ready()
        lanes.drain()
        checkpoint.save(store, directory, self._next_step)

    def resume(self, directory: Path) -> None:
        """Continue, after setup, from a checkpoint that `save` wrote."""
        store, _, lanes = self._ready()
        lanes.drain()
        self._next_step = checkpoint.resume(store, directory)

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
