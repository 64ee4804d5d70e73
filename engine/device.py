"""All device memory that outlives one operation: homes of blocks, slots, gradient slabs.

Invariant: allocated once, before the first step. What a plan counts as weights and gradients is this.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.layers.head import num_chunks
from engine.store import HostStore
from engine.layout import Layout
from engine.pipeline import Pipeline
from engine.step import Op
from engine.slots import Gradients, Slots, leaves


class DeviceMemory:
    """Where each operation of a schedule finds its tensors."""

    def __init__(
        self, pipeline: Pipeline, store: HostStore, *, device: torch.device, loss_chunk: int, micro_batch: tuple[int, int, int]
    ) -> None:
        """micro_batch: (number of them, rows, seq_len)."""
        num_micro_batches, rows, seq_len = micro_batch
        p, layouts, dtype, states = pipeline, store.spec.layouts, store.spec.dtype, store.states
        self._layouts, self._device, self._dtype = layouts, device, dtype
        owners = [block for block in range(p.num_blocks) if p.owns_weights(block)]
        self._homes = {b: states[b].weight if p.on_device(b) else self._zeros(layouts[b].numel) for b in owners}
        self._own_weights = {b: leaves(layouts[b], home) for b, home in self._homes.items()}
        self.slots = Slots(p.depth, [layouts[b] for b in range(p.num_blocks) if b not in owners], dtype, device)
        self.outer_weights = {name: view for b in (0, p.head) for name, view in self._own_weights[b].items()}
        """Views of embed's and head's parameters, by name."""

        layers = range(1, p.head)
        ring_numel = max((layouts[b].numel for b in layers if not p.owns_gradients(b)), default=0)
        self._slabs = [self._zeros(ring_numel) for _ in range(p.depth)]
        self._own_slabs = {b: self._zeros(layouts[b].numel) for b in range(p.num_blocks) if p.owns_gradients(b)}
        self._layer_wide = self._wide(max(layouts[b].numel for b in layers), num_micro_batches)
        contributions = num_chunks(rows, seq_len, loss_chunk) * num_micro_batches
        self.outer_gradients = {
            b: Gradients(layouts[b], self._own_slabs[b], self._wide(layouts[b].numel, contributions)) for b in (0, p.head)
        }
        self.norms = torch.zeros(p.num_blocks, device=device)
        """Of each block's gradients."""
        self.scale = torch.ones((), device=device)
        """Of the gradients, for updates on the device; NaN forbids them."""
        self.verdict = torch.zeros(3, pin_memory=device.type == "cuda")
        """Loss, gradient norm and scale, on the host, for the CPU lane."""

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=self._dtype, device=self._device)

    def _wide(self, numel: int, contributions: int) -> torch.Tensor | None:
        """fp32 scratch where several bf16 contributions are summed."""
        needed = contributions > 1 and self._dtype != torch.float32
        return torch.zeros(numel, dtype=torch.float32, device=self._device) if needed else None

    def layout(self, op: Op) -> Layout:
        """Of the operation's block."""
        return self._layouts[op.block]

    def home(self, op: Op) -> torch.Tensor:
        """The flat device memory of the block's weights: its own or a slot."""
        return self._homes[op.block] if op.slot < 0 else self.slots.buffers[op.slot]

    def weights(self, op: Op) -> Mapping[str, torch.Tensor]:
        """The block's parameters, differentiable views of `home`."""
        return self._own_weights[op.block] if op.slot < 0 else self.slots.weights(op.slot, self.layout(op))

    def slab(self, op: Op) -> torch.Tensor:
        """The flat gradient slab of the block."""
        flat = self._own_slabs[op.block] if op.slab < 0 else self._slabs[op.slab]
        return flat[: self.layout(op).numel]

    def gradients(self, op: Op) -> Gradients:
        """A layer's sums, into its slab."""
        return Gradients(self.layout(op), self.slab(op), self._layer_wide)
