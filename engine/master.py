"""How a block's optimizer state is held, and the fp32 master in its three forms.

The master is the weight itself, an fp32 array beside it, or split: the bf16 weight is the master
rounded, and an int16 remainder has what rounding took away, 12 bytes a parameter with the moments.
Invariant: reading a split master gives the very bits that were written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class BlockState:
    """One block's arrays, 1-D and equally long; `extra` is the int16 remainder, the fp32 master, or
    None: no other master."""

    weight: torch.Tensor
    """bfloat16 or float32; without `extra` it is the master itself."""
    extra: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def part(self, stretch: slice) -> BlockState:
        """Some of its elements, as views."""
        return BlockState(
            weight=self.weight[stretch],
            extra=None if self.extra is None else self.extra[stretch],
            exp_avg=self.exp_avg[stretch],
            exp_avg_sq=self.exp_avg_sq[stretch],
        )


def read_master(weight: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    """The master in fp32: itself where it is held so, otherwise a new tensor."""
    if extra is None:
        return weight.float()
    if extra.dtype == torch.float32:
        return extra
    return ((weight.view(torch.int16).int() << 16) + extra.int()).view(torch.float32)


def write_master(master: torch.Tensor, weight: torch.Tensor, extra: torch.Tensor | None) -> None:
    """Store an fp32 master; the bf16 weight is it rounded to nearest (ties away from zero, or to
    even without `extra`), as in csrc/adamw.cpp."""
    if extra is None:
        weight.copy_(master)
        return
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(high)
    extra.copy_(master if extra.dtype == torch.float32 else bits - (high << 16))
