"""EngineConfig: the engine's own knobs, checked. Invariant: a wrong value is one line that names its config path."""

from __future__ import annotations

from dataclasses import dataclass

from engine.store import MASTERS, PINNED
from engine.pipeline import LANES

MAX_THREADS = 4096
"""More than a host has cores. OpenMP sets up a team on the caller's stack: it stood 20,000 threads, 100,000 overran the stack."""


class RefusedError(ValueError):
    """A model or a setting that the engine does not train with; one line: what it got, what is allowed, what to do."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's own knobs, the `system` config group."""

    depth: int = 2
    """Device slots for layer weights and slabs for layer gradients: 1 serial, 2 double-buffered, more to ride out jitter."""
    streams: int = 3
    """CUDA streams: 1 all work in order, 2 compute and copies, 3 compute, loads and stores (and fetched activations)."""
    checkpoint_interval: int = 1
    """Keep every K-th layer's input; 1 recomputes each layer once, more saves memory for one extra forward; -1: the smallest that
    `placement` finds room for."""
    gradient_slabs: int = 0
    """Pinned host gradient slabs that the layers share; 0 gives every layer its own."""
    device_optimizer: int = 0
    """First blocks (embedding, then layers) whose weights and optimizer state stay on the device; -1: `placement` chooses."""
    keep_activations: int = 0
    """Last layers whose activations stay on the device instead of being recomputed; -1: `placement` chooses."""
    offload_activations: int = 0
    """Layers, spread over those not kept, whose activations wait in pinned host memory; -1: `placement` chooses."""
    optimizer_overlap: bool = True
    """Update layers beside the next forward (without clipping, beside the backward too); false: between steps, serially."""
    late_moments: bool = True
    """Update the weights alone before the next forward and the moments beside it and its backward: the same bits. Only where
    updates overlap, gradients are clipped and every layer has its own slab; elsewhere one pass does both."""
    compile: bool = False
    """Compile each layer configuration, and the loss, once with torch.compile."""
    loss_chunk: int = 4096
    """Tokens whose logits are alive at a time."""
    mlp_chunk: int = 0
    """Tokens that a layer's MLP takes at a time, for long contexts: MLP-wide values exist for these alone. 0, and a micro-batch
    of no more tokens, takes all at once."""
    master: str = "split"
    """Master of a bfloat16 run: split (fp32, as bf16 weight + int16 remainder), fp32 (apart), bf16 (the weight, as published)."""
    pinned: str = "exact"
    """Host memory that copies touch: exact (one pinned arena), torch (pinned by torch, rounded up), none (pageable). CUDA only."""
    num_threads: int = 0
    """CPU threads of the optimizer, at most 4096; 0 takes all cores but two beside a GPU, all of them on the CPU."""
    torch_adamw: bool = False
    """Run AdamW through torch, for a machine without a C++ compiler: the same bits, several times slower."""
    poison: bool = False
    """Fill freed slots with NaN, to find reads after a slot was given up."""

    def __post_init__(self) -> None:
        at_least_one, or_auto = (
            ("depth", "loss_chunk"),
            ("checkpoint_interval", "device_optimizer", "keep_activations", "offload_activations"),
        )
        for name in (*at_least_one, *or_auto, "gradient_slabs", "mlp_chunk", "num_threads"):
            value, least = getattr(self, name), int(name in at_least_one) - int(name in or_auto)
            if type(value) is not int or value < least:
                raise ValueError(f"system.{name}: got {value!r}, allowed an integer >= {least}; set system.{name}={max(least, 0)}")
        if self.checkpoint_interval == 0:
            raise ValueError("system.checkpoint_interval: got 0, allowed -1 or an integer >= 1; set system.checkpoint_interval=1")
        if self.num_threads > MAX_THREADS:
            raise ValueError(
                f"system.num_threads: got {self.num_threads}, allowed an integer 0 to {MAX_THREADS}; set system.num_threads=0"
            )
        for name in ("optimizer_overlap", "late_moments", "compile", "torch_adamw", "poison"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"system.{name}: got {getattr(self, name)!r}, allowed true or false; choose one of these")
        if self.offload_activations and self.checkpoint_interval != 1:
            raise ValueError(
                f"system.offload_activations: got {self.offload_activations}, allowed 0 where system.checkpoint_interval is "
                f"{self.checkpoint_interval}; set system.checkpoint_interval=1"
            )
        if type(self.streams) is not int or self.streams not in LANES:
            raise ValueError(f"system.streams: got {self.streams!r}, allowed 1, 2 or 3; 3 overlaps the most")
        if self.master not in MASTERS:
            raise ValueError(f"system.master: got {self.master!r}, allowed {', '.join(MASTERS)}; split is the smallest exact one")
        if self.pinned not in PINNED:
            raise ValueError(f"system.pinned: got {self.pinned!r}, allowed {', '.join(PINNED)}; exact is the fastest and smallest")
