"""Where each parameter of a block lies: name -> element offset and shape. The only owner of
offsets.

A block is what one DMA moves: a decoder layer's parameters, or those before (embed) or after (head)
the layers. Invariant: the same element offsets index every array that mirrors the block (weights,
remainder, moments, gradients), parameters never overlap, and a block's length is a multiple of 4
KiB in the narrowest dtype, so that blocks laid end to end stay page-aligned.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

PARAMETER_ALIGNMENT = 64
"""Elements; 128 bytes of bfloat16, one cache line pair, what matrix kernels want of a weight's
address."""
BLOCK_ALIGNMENT = 2048
"""Elements; one 4 KiB page of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One parameter inside a block."""

    name: str
    """Local name: unique in the block."""
    offset: int
    """First element, counted in elements from the block's start."""
    shape: torch.Size
    frozen: bool = False
    """Whether it is not trained: `requires_grad` was false."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    @property
    def stretch(self) -> slice:
        """Its elements in the block."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The fields of one block, in order, and its padded length."""

    fields: tuple[Field, ...]
    numel: int
    """Elements including padding, a multiple of BLOCK_ALIGNMENT."""

    def in_parts(self, count: int) -> Layout:
        """The same, padded to that many equal parts, each of which is whole pages."""
        last = self.fields[-1].stretch.stop if self.fields else 1
        return replace(self, numel=round_up(last, BLOCK_ALIGNMENT * count))

    @property
    def num_params(self) -> int:
        """Elements without padding."""
        return sum(field.numel for field in self.fields)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(first, end) of the padding between parameters and after the last."""
        starts = [f.offset + f.numel for f in self.fields]
        ends = [f.offset for f in self.fields[1:]] + [self.numel]
        return (
            [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
            if starts
            else [(0, self.numel)]
        )

    def stretches(self, chosen: Sequence[bool]) -> list[slice]:
        """The elements of the `chosen` fields and of the gaps behind them, in as few slices as
        there can be."""
        found: list[slice] = []
        ends = [*(f.offset for f in self.fields), self.numel][1:]
        for f, end, wanted in zip(self.fields, ends, chosen, strict=True):
            if wanted and found and found[-1].stop == f.offset:
                found[-1] = slice(found[-1].start, end)
            elif wanted:
                found.append(slice(f.offset, end))
        return found

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter as a view of `flat`, a 1-D tensor of at least `numel` elements of any
        dtype."""
        return {f.name: flat[f.offset : f.offset + f.numel].view(f.shape) for f in self.fields}

    def items(self, flat: torch.Tensor) -> Iterator[tuple[Field, torch.Tensor]]:
        """(field, view) pairs in order."""
        return zip(self.fields, self.views(flat).values(), strict=True)


def pack(shapes: Iterable[tuple[str, torch.Size]], frozen: Container[str] = ()) -> Layout:
    """Lay parameters out one after another in the order given. frozen: names of those that are not
    trained."""
    fields, end = [], 0
    for name, shape in shapes:
        fields.append(Field(name=name, offset=end, shape=shape, frozen=name in frozen))
        end += round_up(shape.numel(), PARAMETER_ALIGNMENT)
    return Layout(fields=tuple(fields), numel=round_up(max(end, 1), BLOCK_ALIGNMENT))


def within(stretch: slice, part: slice) -> slice:
    """What of a stretch of a block lies in a part of it, counted from the start of the part; empty
    where nothing does."""
    start = min(max(stretch.start, part.start), part.stop)
    return slice(start - part.start, max(start, min(stretch.stop, part.stop)) - part.start)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
