"""Bytes and seconds of one model on one machine under any pipeline, and the pipeline that suits them best.

Invariant: what is planned here is what the host store and the executor allocate and what the schedule does; nothing
here allocates, but for the probe of rates that were not given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from engine.planner import placement
from engine.config import EngineConfig
from engine.planner.cost import Cost, Rates, measure
from engine.store import PAGE, HostSpec
from engine.layout import Layout
from engine.pipeline import Pipeline
from engine.sizes import Plan, Widths, device_bytes, offloaded_bytes
from engine.step import Op, build
from engine.timeline import Timeline, simulate, window_s

HOST_OVERHEAD = 2 * 10**9
"""Bytes of host memory that a process with torch and a CUDA context holds before any model."""
ACTIVATION_MARGIN = 1.05
"""Of a pinned slab for activations over their closed form."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to plan for; None asks the machine at hand."""

    rates: Rates | None = None
    device_memory: int | None = None
    """Bytes."""
    host_memory: int | None = None
    """Bytes that a chosen placement must stay under; None sets no limit."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Everything but the pipeline."""

    config: EngineConfig
    layouts: Sequence[Layout]
    model_config: Any
    """A transformers config."""
    dtype: torch.dtype
    shape: tuple[int, int, int]
    """(number of micro-batches, rows, seq_len)."""
    device: torch.device
    num_threads: int
    machine: Machine = field(default_factory=Machine)

    @cached_property
    def rates(self) -> Rates:
        """What the machine does in a second: as given, or probed once."""
        pinned, use_native = self.config.pinned != "none", not self.config.torch_adamw
        return self.machine.rates or measure(self.device, self.num_threads, pinned=pinned, use_native=use_native)

    @cached_property
    def _device_memory(self) -> int:
        return self.machine.device_memory or int(torch.cuda.mem_get_info(self.device)[1])

    def placed(self, p: Pipeline) -> Pipeline:
        """`p` with what was left to `placement` chosen; on the CPU nothing is gained by moving things."""
        if p.checkpoint_interval == placement.AUTO:
            gpu = self.device.type == "cuda"
            interval = placement.checkpoint_interval(p, fits=self._fits, device_bytes=self._device_total) if gpu else 1
            p = replace(p, checkpoint_interval=interval)
        if p.offloaded_layers and self.device.type == "cuda":
            p = replace(p, evict_visits=self._evict_visits(p))
        asked = {name: getattr(p, name) for name in ("device_blocks", "kept_layers", "offloaded_layers")}
        if placement.AUTO not in asked.values():
            return p
        if self.device.type != "cuda":
            return replace(p, **{name: max(0, number) for name, number in asked.items()})
        return placement.choose(p, fits=self._fits, device_bytes=self._device_total, step_s=lambda q: self.predict(q).step_s)

    def _evict_visits(self, p: Pipeline) -> int:
        """Forwards of a layer that one eviction takes, rounded up."""
        evict, forward = Op(kind="evict", block=1, lane=""), Op(kind="compute", phase="forward", block=1, lane="")
        cost = self._cost(p)
        return math.ceil(cost.seconds(evict) / cost.seconds(forward))

    def _device_total(self, p: Pipeline) -> int:
        return sum(self.device_bytes(p).values())

    def _fits(self, p: Pipeline) -> bool:
        host = self.machine.host_memory
        fits_host = host is None or sum(self.host_bytes(p).values()) <= placement.USABLE_HOST * host
        return fits_host and self._device_total(p) <= placement.USABLE_DEVICE * self._device_memory

    def predict(self, p: Pipeline) -> Timeline:
        """One steady step, simulated."""
        return simulate(build(self._in_turn(p)), self._cost(p).seconds)

    def predict_window(self, p: Pipeline, num_steps: int) -> float:
        """Seconds of `num_steps` steps between two drains, simulated."""
        return window_s(build(self._in_turn(p)), self._cost(p).seconds, num_steps)

    def _in_turn(self, p: Pipeline) -> Pipeline:
        """`p` as it runs: pageable copies hold the launching thread until they are done, so all takes turns as on one stream."""
        return replace(p, streams=1) if self.config.pinned == "none" else p

    def _cost(self, p: Pipeline) -> Cost:
        return Cost(
            pipeline=p,
            layouts=self.layouts,
            widths=Widths.of(self.model_config),
            shape=self.shape,
            itemsize=self.dtype.itemsize,
            activation_bytes=self._activation_bytes,
            loss_chunk=self.config.loss_chunk,
            compiled=self.config.compile,
            mlp_chunk=self.config.mlp_chunk,
            rates=self.rates,
        )

    @cached_property
    def _activation_bytes(self) -> int:
        """Of one offloaded layer."""
        num_micro_batches, rows, seq_len = self.shape
        compiled, mlp_chunk = self.config.compile, self.config.mlp_chunk
        return num_micro_batches * offloaded_bytes(
            self.model_config, rows * seq_len, self.dtype.itemsize, compiled=compiled, mlp_chunk=mlp_chunk
        )

    def host_spec(self, p: Pipeline) -> HostSpec:
        """Sizes of the host store."""
        sizes = [layout.numel for layout in self.layouts]
        hosted = [block for block in range(p.num_blocks) if not p.on_device(block)]
        shared = [block for block in hosted if p.pooled and p.is_layer(block)]
        first = p.gradient_slabs if p.pooled else 0
        slabs = dict.fromkeys(range(p.gradient_slabs), max(sizes[1:-1])) if shared else {}
        slabs |= {first + block: sizes[block] for block in hosted if block not in shared}
        activations = math.ceil(self._activation_bytes * ACTIVATION_MARGIN / PAGE) * PAGE
        return HostSpec(
            layouts=self.layouts,
            dtype=self.dtype,
            master=self.config.master,
            slabs=slabs,
            activations={block: activations for block in range(p.num_blocks) if p.is_offloaded(block)},
            kept=shared if p.deferred else (),
            on_device=p.device_blocks,
            pinned=self.config.pinned if self.device.type == "cuda" else "none",
        )

    def host_bytes(self, p: Pipeline) -> dict[str, int]:
        """Host bytes by kind."""
        return self.host_spec(p).host_bytes() | ({"other": HOST_OVERHEAD} if self.device.type == "cuda" else {})

    def device_bytes(self, p: Pipeline) -> dict[str, int]:
        """Device bytes by kind."""
        device = device_bytes(
            p,
            self.layouts,
            self.model_config,
            self.dtype,
            self.shape,
            self.config.loss_chunk,
            compiled=self.config.compile,
            mlp_chunk=self.config.mlp_chunk,
        )
        state = self.host_spec(p).device_state_bytes()
        state.pop("weights")  # counted above
        return device | state

    def plan(self, p: Pipeline) -> Plan:
        """Closed-form bytes by kind."""
        return Plan(device=self.device_bytes(p), host=self.host_bytes(p))
