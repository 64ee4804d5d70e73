"""All device memory that outlives one operation: homes of blocks, weight slots, gradient slabs,
sums.

Invariant: all of it is allocated once, before the first step; what a plan counts as weights and
gradients is this. A block's parameters and gradients are views of it, so that one DMA moves them
and no copy binds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.blocks import Blocks
from engine.layout import Layout
from engine.sizes import Work
from engine.step import Op
from engine.store import Store


class DeviceMemory:
    """Where each operation of a step finds its tensors."""

    def __init__(self, blocks: Blocks, work: Work, store: Store, device: torch.device) -> None:
        layouts = work.layouts
        self._work, self._device, self._ranks = work, device, store.ranks
        numbers = range(blocks.num_blocks)
        owners = [block for block in numbers if blocks.owns_weights(block)]
        self._homes = {
            b: store.homes[b] if blocks.on_device(b) else self._zeros(layouts[b].numel)
            for b in owners
        }
        self._own_weights = {b: leaves(layouts[b], home) for b, home in self._homes.items()}
        self.outer_weights = self._own_weights[0] | self._own_weights[blocks.head]
        """Views of embed's and head's parameters, by name."""
        streamed = [layouts[b].numel for b in numbers if b not in owners]
        self.slots = [self._zeros(max(streamed, default=0)) for _ in range(blocks.depth)]
        """The ring of weight slots, for layers without a home."""
        self._slot_weights: dict[tuple[int, Layout], dict[str, torch.Tensor]] = {}

        passing = [layouts[b].numel for b in numbers if not blocks.owns_gradients(b)]
        self._slabs = [self._zeros(max(passing, default=0)) for _ in range(blocks.depth)]
        self._own_slabs = {
            b: self._zeros(layouts[b].numel) for b in numbers if blocks.owns_gradients(b)
        }
        self._head = blocks.head
        widest = max(blocks.layers, key=work.summed_bytes)
        self._layer_wide = self._wide(widest)
        tied = Gradients(layouts[0], self._own_slabs[0], self._wide(0)) if work.tied else None
        self.tied_gradients = tied
        """Of embed, where it gets some on both sides of the layers."""
        longest = max(layout.numel for layout in layouts)
        self._received = self._zeros(longest if blocks.num_ranks > 1 else 0)
        """What other ranks have of this one's part of a block's gradients."""
        self.norms = torch.zeros(blocks.num_blocks, device=device)
        """Norm of each block's gradients; of several ranks, of this one's part of their sum."""
        self.scale = torch.ones((), device=device)
        """What updates on the device multiply gradients by; NaN forbids them."""
        self.verdict = torch.zeros(3, pin_memory=device.type == "cuda")
        """Loss, gradient norm and scale, on the host, for the CPU lane."""

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=self._work.dtype, device=self._device)

    def _wide(self, block: int) -> torch.Tensor | None:
        """fp32 scratch where several bf16 contributions are summed."""
        numel = self._work.summed_bytes(block) // 4
        return torch.zeros(numel, dtype=torch.float32, device=self._device) if numel else None

    def layout(self, op: Op) -> Layout:
        """Layout of the operation's block."""
        return self._work.layouts[op.block]

    def home(self, op: Op) -> torch.Tensor:
        """The flat device memory of the block's weights: its own or a slot."""
        return self._homes[op.block] if op.slot < 0 else self.slots[op.slot]

    def weights(self, op: Op) -> Mapping[str, torch.Tensor]:
        """The block's parameters, differentiable views of `home`, made once per place and
        layout."""
        if op.slot < 0:
            return self._own_weights[op.block]
        key = (op.slot, self.layout(op))
        if key not in self._slot_weights:
            self._slot_weights[key] = leaves(self.layout(op), self.slots[op.slot])
        return self._slot_weights[key]

    def slab(self, op: Op) -> torch.Tensor:
        """The flat gradient slab of the block."""
        flat = self._own_slabs[op.block] if op.slab < 0 else self._slabs[op.slab]
        return flat[: self.layout(op).numel]

    def mine(self, op: Op, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the operation's block, of its weights' home or its slab."""
        return flat[self._ranks.part(self.layout(op).numel)]

    def gather(self, op: Op) -> None:
        """Whole weights, of which this rank's part has come."""
        self._ranks.gather(self.home(op)[: self.layout(op).numel])

    def scatter(self, op: Op) -> torch.Tensor:
        """This rank's part of the slab, with the sum of all ranks': in fp32, rounded once."""
        slab = self.slab(op)
        received = self._received[: slab.numel()]
        self._ranks.exchange(slab, received)
        parts = received.view(self._ranks.count, -1)
        return self.mine(op, slab).copy_(parts.sum(0, dtype=torch.float32))

    def gradients(self, op: Op) -> Gradients:
        """A block's sums, into its slab. The scratch of embed and head is there as long as these
        are, but for tied ones."""
        if op.block == 0 and self.tied_gradients is not None:
            return self.tied_gradients
        wide = self._wide(op.block) if op.block in (0, self._head) else self._layer_wide
        return Gradients(self.layout(op), self.slab(op), wide)


def leaves(layout: Layout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """A block's parameters as views of `flat`: leaves, differentiable unless frozen."""
    views = layout.items(flat)
    return {f.name: view.detach().requires_grad_(not f.frozen) for f, view in views}


class Gradients:
    """Sums a block's gradients over micro-batches and chunks, then leaves them in one flat slab.

    One contribution goes straight into the slab. Several are summed in fp32 and rounded once.
    """

    def __init__(self, layout: Layout, slab: torch.Tensor, wide: torch.Tensor | None) -> None:
        """slab: 1-D, at least layout.numel elements. wide: fp32 scratch of that length, where
        several contributions come."""
        self._layout = layout
        self._slab = slab[: layout.numel]
        self._slabs = list(layout.views(slab).values())
        self._sums = self._slabs if wide is None else list(layout.views(wide).values())
        self._wide = wide is not None
        self.clear()

    def clear(self) -> None:
        """Forget what was added: the next contribution of each parameter is its first."""
        self._seen = [False] * len(self._layout.fields)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution, in the layout's order; None is zero."""
        come = [i for i, grad in enumerate(grads) if grad is not None]
        self._each(torch._foreach_copy_, grads, [i for i in come if not self._seen[i]])
        again = [i for i in come if self._seen[i]]
        assert not again or self._sums[0].dtype == torch.float32, "sums of several are fp32"
        self._each(torch._foreach_add_, grads, again)
        for i in come:
            self._seen[i] = True

    def _each(self, do: Callable[..., object], grads: Sequence[Any], chosen: list[int]) -> None:
        if chosen:
            do([self._sums[i] for i in chosen], [grads[i] for i in chosen])

    @property
    def reached(self) -> tuple[bool, ...]:
        """Which parameters a contribution came for, in the layout's order."""
        return tuple(self._seen)

    def finish(self) -> torch.Tensor:
        """The flat slab: every parameter's sum, zero where none came and between parameters."""
        for index, seen in enumerate(self._seen):
            if not seen:
                self._sums[index].zero_()
        if self._wide and self._slabs:  # a block may have no parameters of its own
            torch._foreach_copy_(self._slabs, self._sums)
        for start, end in self._layout.gaps:
            self._slab[start:end].zero_()
        self.clear()
        return self._slab
