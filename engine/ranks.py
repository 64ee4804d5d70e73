"""What one of several ranks asks of the others: the parts of a block that they have, the gradients
of its own part, their numbers.

Invariant: all ranks ask the same in the same order, on the lanes that the step names, and each gets
the same bits. Nothing is summed on the way: what comes from the others is added up by who asked, in
the order of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""As torch calls it since 2.13, or before."""
LONGEST = 4096
"""Bytes of a text; a path has no more."""


class Ranks:
    """A rank alone: nobody is asked. Also the base of others, with `count` ranks to plan for."""

    def __init__(self, *, index: int = 0, count: int = 1) -> None:
        assert 0 <= index < count
        self.index, self.count = index, count

    @property
    def joined(self) -> bool:
        """Whether the others can be asked; a plan is made without them."""
        return self.count == 1

    def part(self, numel: int) -> slice:
        """This rank's elements of a block, which is as many equal parts as there are ranks."""
        each, rest = divmod(numel, self.count)
        assert not rest, f"{numel} elements in {self.count} parts"
        return slice(self.index * each, (self.index + 1) * each)

    def gather(self, flat: torch.Tensor) -> None:
        """Fill a 1-D tensor, of which this rank has its own part, with those of the others."""
        assert self.count == 1, "no others to ask"

    def exchange(self, flat: torch.Tensor, received: torch.Tensor) -> None:
        """Into `received`, as long as `flat`: this rank's part of every rank's `flat`, in their
        order."""
        received.copy_(flat)

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        """[ranks, length]: every rank's 1-D `values`."""
        return values[None]

    def texts(self, text: str) -> list[str]:
        """What every rank says, by rank; of each the first LONGEST bytes."""
        mine = torch.zeros(LONGEST, dtype=torch.uint8)
        written = text.encode()[:LONGEST]
        mine[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)
        rows = self.stacked(mine).tolist()
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


class Group(Ranks):
    """The ranks of torch's process group; one rank where there is none."""

    def __init__(self, count: int) -> None:
        """count: of the group, which may be joined later."""
        super().__init__(index=dist.get_rank() if dist.is_initialized() else 0, count=count)

    @property
    def joined(self) -> bool:
        """Whether the group is there."""
        return dist.is_initialized()

    def gather(self, flat: torch.Tensor) -> None:
        """In place."""
        _all_gather(flat, flat[self.part(flat.numel())])

    def exchange(self, flat: torch.Tensor, received: torch.Tensor) -> None:
        """As many bytes as a reduce-scatter moves."""
        dist.all_to_all_single(received, flat)

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        """A few numbers, from where they are."""
        found = values.new_empty(self.count * values.numel())
        _all_gather(found, values)
        return found.view(self.count, -1)
