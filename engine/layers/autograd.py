"""Gradients of one output, a `None` in the place of each that there is not."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gradients(
    output: torch.Tensor, of: Sequence[torch.Tensor], grad_output: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """The gradient of `output` in each of `of`: None where it is frozen or the output does not
    depend on it."""
    wanted = [tensor for tensor in of if tensor.requires_grad]
    found = iter(
        torch.autograd.grad(output, wanted, grad_output, allow_unused=True) if wanted else ()
    )
    return [next(found) if tensor.requires_grad else None for tensor in of]
