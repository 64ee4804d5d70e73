"""Device memory of the pipeline: the ring of weight slots, and gradients on their way out.

Invariant: all of it is allocated once; a block's parameters and gradients are views of it, so that one DMA moves
them and no copy binds them. A freed slot can be filled with NaN to expose a read too late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layout import Layout


def leaves(layout: Layout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """A block's parameters as views of `flat`: leaves, differentiable unless frozen."""
    return {f.name: view.detach().requires_grad_(not f.frozen) for f, view in layout.items(flat)}


def gradients(
    output: torch.Tensor, of: Sequence[torch.Tensor], grad_output: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """The gradient of `output` in each of `of`: None where it is frozen or the output does not depend on it."""
    wanted = [tensor for tensor in of if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, grad_output, allow_unused=True) if wanted else ())
    return [next(found) if tensor.requires_grad else None for tensor in of]


class Slots:
    """Weight slots for decoder layers that have no device memory of their own."""

    def __init__(self, depth: int, layouts: Sequence[Layout], dtype: torch.dtype, device: torch.device) -> None:
        numel = max((layout.numel for layout in layouts), default=0)
        self.buffers = [torch.zeros(numel, dtype=dtype, device=device) for _ in range(depth)]
        self._views: dict[tuple[int, Layout], dict[str, torch.Tensor]] = {}

    def weights(self, slot: int, layout: Layout) -> dict[str, torch.Tensor]:
        """The parameters of a layer in a slot: differentiable leaves, made once per slot and layout."""
        key = (slot, layout)
        if key not in self._views:
            self._views[key] = leaves(layout, self.buffers[slot])
        return self._views[key]

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN."""
        self.buffers[slot].fill_(torch.nan)


class Gradients:
    """Sums a block's gradients over micro-batches and chunks, then leaves them in one flat slab.

    One contribution goes straight into the slab. Several are summed in fp32 and rounded once.
    """

    def __init__(self, layout: Layout, slab: torch.Tensor, wide: torch.Tensor | None) -> None:
        """slab: 1-D, at least layout.numel elements. wide: fp32 scratch of that length, where several contributions come."""
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
        for seen in (False, True):
            pairs = [(self._sums[i], g) for i, g in enumerate(grads) if g is not None and self._seen[i] is seen]
            if pairs:
                targets, values = [target for target, _ in pairs], [value for _, value in pairs]
                if seen:
                    torch._foreach_add_(targets, values)
                else:
                    torch._foreach_copy_(targets, values)
        self._seen = [seen or grad is not None for seen, grad in zip(self._seen, grads, strict=True)]

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
