"""TrainingSystem: the one interface that the engine and every baseline satisfy, and what a system
is built from.

Invariant: the optimizer step is the only boundary all systems share, so one fused `train_step` is
all that is ever timed. This module imports no other of its room (`baselines.registry` knows the
systems).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from engine import Batch, Plan, Recipe


class Unsupported(RuntimeError):  # noqa: N818 - a row status, not a programming error
    """This system cannot run here; the message is one line that says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only `transformers` model by its configuration, with the weights of a checkpoint or
    with random ones; no download."""

    name: str
    """Label in rows and figures, for example qwen2.5-3b."""
    model_type: str
    """transformers model type, for example qwen2, llama, gemma2."""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of the transformers config class; compared, but a dict has no hash."""
    attn_implementation: str = "sdpa"
    checkpoint: str | None = None
    """Folder of the weights that training starts from; None is random ones."""
    checkpoint_digest: str | None = None
    """Digest of those weights (`baselines.checkpoint_folder.digest_of`), by which cells know
    them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A step's sequences: batch_size, in num_micro_batches equal parts, of seq_len tokens."""

    batch_size: int
    seq_len: int
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"shape.{name}: got {getattr(self, name)}, allowed >= 1; give a positive "
                    "integer"
                )
        if self.batch_size % self.num_micro_batches:
            raise ValueError(
                f"shape.num_micro_batches: got {self.num_micro_batches}, allowed a divisor of "
                f"shape.batch_size ({self.batch_size}); change one of the two"
            )

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one micro-batch."""
        return self.batch_size // self.num_micro_batches

    @property
    def num_tokens(self) -> int:
        """Tokens in one optimizer step."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True)
class SystemSpec:
    """All that a system is built from."""

    model: ModelSpec
    shape: Shape
    recipe: Recipe
    dtype: torch.dtype = torch.bfloat16
    """Compute dtype: torch.bfloat16 (fp32 master beside it) or torch.float32."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host_memory: int | None = None
    """Bytes of host memory, for a system that chooses what to put there; None where unknown."""
    device_memory: int | None = None
    """Bytes of device memory to choose for; None is what the device has."""
    num_ranks: int = 1
    """Processes that train together, each on a device of its own and on its rows of every
    micro-batch (`baselines.distributed`)."""
    packed: bool = False
    """Whether batches pack several documents into a sequence, whose masks a plan counts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The system's own knobs, the rest of the `system` config group."""
    implementation: str | None = None
    """MODULE:CLASS of a system that `baselines.registry` does not have."""

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch that each rank has."""
        return self.shape.micro_batch_size // self.num_ranks

    def part(self, num: int) -> int:
        """What of `num` elements or bytes lies on each rank where all are spread over them."""
        return -(-num // self.num_ranks)


class TrainingSystem(Protocol):
    """One way to train the model. Constructing one allocates nothing that grows with the model.

    One that does not do all that the recipe asks says so in an attribute `caveat`, one line that
    its row and tables show. One that chose numbers for its options has them in an attribute
    `placement`, by name, which its row has beside the plan.
    """

    def plan(self) -> Plan:
        """Closed-form bytes of one rank on device and host, by kind; allocates nothing."""

    def dtypes(self) -> dict[str, str]:
        """Dtypes of weights, master, moments and gradients, by these four names."""

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Allocate, and load the initial weights, each named parameter once."""

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Global 2-norm of the last enqueued step's gradients, before clipping, 0-dim fp32,
        unsynchronised; None where the system does not look at it."""

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Enqueue one whole optimizer step; return the mean loss per label token, 0-dim fp32,
        unsynchronised.

        Every rank is given the same batch, trains on its own rows of it and returns the loss of
        all.

        Raises NonFiniteLossError, here or in the next call or in drain, when the loss is not
        finite; that step changes no parameter.
        """

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Mean loss per label token of a batch that is not trained on, 0-dim fp32; changes nothing:
        no parameter, no moment, no step number, no random state.

        Between steps, after setup. The batch has one micro-batch or more, each of the shape's
        micro_batch_size rows of seq_len tokens. Raises Unsupported where a system cannot.
        """

    def drain(self) -> None:
        """Return when every stream, worker and pending update is finished; raise their errors."""

    def counters(self) -> dict[str, float]:
        """Totals since setup: h2d_bytes, d2h_bytes, recompute_flops, optimizer_s,
        optimizer_wait_s, device_idle_s (those known)."""

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor on the host) for every parameter, from the master copy."""

    def save(self, directory: Path) -> None:
        """Write everything `resume` needs; the directory appears whole or not at all."""

    def resume(self, directory: Path) -> None:
        """Continue, after setup, exactly where `save` was called."""

    def close(self) -> None:
        """Release devices, pinned memory, threads and process groups; idempotent."""
