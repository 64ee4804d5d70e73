"""What every system must train alike: the batch of one optimizer step and the AdamW recipe.

Invariant: nothing here knows which system trains, so two systems given the same
`Recipe` and `Batch` are asked for the same mathematics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

IGNORE_INDEX = -100
SCHEDULES = ("constant", "linear", "cosine")
DECAYED = ("all", "matrices")


class NonFiniteLossError(RuntimeError):
    """The loss, or the global gradient norm where a system looks at it, was NaN or infinite; the
    message says what the step did."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101); parameters differ
    in whether they decay alone."""

    lr: float = 1e-5
    """Peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decayed: str = "all"
    """all parameters, or matrices: those of two or more dimensions, so that norms and biases do not
    decay."""
    clip_norm: float = 1.0
    """Global L2 norm the gradients are clipped to; 0 turns clipping off."""
    schedule: str = "constant"
    """constant, linear or cosine decay to zero over `total_steps`, after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from lr / warmup_steps."""
    total_steps: int = 0
    """Optimizer steps of the whole run; needed by linear and cosine."""

    def __post_init__(self) -> None:
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"recipe.{name}: got {value!r}, allowed a finite number; give one")
        for name in ("warmup_steps", "total_steps"):
            if type(getattr(self, name)) is not int:
                raise ValueError(
                    f"recipe.{name}: got {getattr(self, name)!r}, allowed an integer >= 0; give a "
                    "number of steps"
                )
        for name in ("lr", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"recipe.{name}: got {getattr(self, name)}, allowed > 0; give a positive number"
                )
        for name in ("weight_decay", "clip_norm", "warmup_steps", "total_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"recipe.{name}: got {getattr(self, name)}, allowed >= 0; 0 turns it off"
                )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"recipe.{name}: got {getattr(self, name)}, allowed 0 <= beta < 1; 0.9 and "
                    "0.999 are usual"
                )
        for name, allowed in (("schedule", SCHEDULES), ("decayed", DECAYED)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"recipe.{name}: got {getattr(self, name)!r}, allowed {', '.join(allowed)}; "
                    "choose one of these"
                )
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"recipe.total_steps: got {self.total_steps}, allowed > recipe.warmup_steps "
                f"({self.warmup_steps}) "
                f"with schedule {self.schedule}; set it to the number of steps of the run"
            )

    def decays(self, num_dims: int) -> bool:
        """Whether a parameter of so many dimensions decays."""
        return self.decayed == "all" or num_dims >= 2

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        if self.schedule == "linear":
            return self.lr * (1.0 - progress)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The token batch of one optimizer step, on the host.

    tokens and labels are int64 of shape [num_micro_batches, micro_batch_size, seq_len]. Labels are
    already shifted: labels[m, b, t] is the token that follows tokens[m, b, t], or -100 where no
    loss is taken. attention_mask is None, or int64 of the same shape with 1 on real tokens and 0 on
    padding. position_ids is None, or int64 of the same shape where several documents are packed
    into a sequence: positions begin at 0 in each document, no document sees another, and the label
    of a document's last token is -100. A batch is padded or packed, never both: what fills up a
    packed sequence is a document without labels. The loss of a step is the sum of all label tokens'
    losses over `num_tokens`, whatever the number of micro-batches, so accumulation does not change
    the maths.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in this step."""
        return int(self.tokens.shape[0])

    @property
    def num_tokens(self) -> int:
        """Label tokens in the step: padding and ignored positions are not counted."""
        return int((self.labels != IGNORE_INDEX).sum())

    def rows(self, chosen: slice) -> Batch:
        """These rows of every micro-batch."""
        return replace(
            self,
            tokens=self.tokens[:, chosen],
            labels=self.labels[:, chosen],
            attention_mask=None if self.attention_mask is None else self.attention_mask[:, chosen],
            position_ids=None if self.position_ids is None else self.position_ids[:, chosen],
        )

    def require(self, shape: tuple[int, ...]) -> None:
        """ValueError, one line, where a tensor is not int64 of that shape, or where the batch is
        both padded and packed."""
        if self.attention_mask is not None and self.position_ids is not None:
            raise ValueError(
                "batch.position_ids: got them beside an attention_mask, allowed one of the two; "
                "fill packed sequences up with a document without labels"
            )
        for name in ("tokens", "labels", "attention_mask", "position_ids"):
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if (tensor.dtype, tuple(tensor.shape)) != (torch.int64, shape):
                raise ValueError(
                    f"batch.{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}, allowed "
                    f"torch.int64 of shape {shape}, which are micro-batches, rows and "
                    "tokens; cut the step as the engine was told"
                )
