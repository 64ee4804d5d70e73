"""The values of one step that live on the compute lane, from one computation to the next.

Invariant: what a computation leaves here no other lane touches, but for activations that the step
itself evicts and fetches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.layers.attention import Results
from engine.layers.decoder import Recording
from engine.layers.offload import Offloaded
from engine.recipe import Batch


@dataclass(kw_only=True)
class StepState:
    """The values of one step that pass between computations on the compute lane."""

    index: int
    batch: Batch
    num_tokens: int
    loss: torch.Tensor
    norm: torch.Tensor
    recordings: list[Recording] = field(default_factory=list)
    """The way into the layers, one a micro-batch."""
    hidden: list[torch.Tensor] = field(default_factory=list)
    saved: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Layer -> its input, one a micro-batch, to recompute it from."""
    graphs: dict[int, list[Any]] = field(default_factory=dict)
    """Layer that is not recomputed -> (input, output) with the graph between, one a micro-batch."""
    offloaded: dict[int, Offloaded] = field(default_factory=dict)
    """Layer whose activations, or its attention's results, wait on the host -> where they are."""
    rebound: dict[int, Offloaded] = field(default_factory=dict)
    """Layer whose kept activations wait for its weights -> the same, all on the device."""
    attention: dict[int, Results] = field(default_factory=dict)
    """Layer that is recomputed -> what its attention gave."""
    grads: list[torch.Tensor] = field(default_factory=list)
    """Gradient of what the last backward took as input, one a micro-batch."""
