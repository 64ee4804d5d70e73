"""What is asked of the engine. Invariant: a wrong value is one line that names its config path.

What is decided, under the same names, is `engine.blocks.Blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = -1
"""Option value that leaves the choice to the planner."""
ALL = -2
"""Of `disk_blocks`: every block that is not on the device."""
MASTERS = ("split", "fp32", "bf16")
"""What a bf16 system updates: an fp32 master, held as bf16 weight + int16 remainder (12 bytes a
parameter with the moments) or apart (14), or the bf16 weight itself (10), as the published code
does, which loses small updates."""
PINNED = ("exact", "torch", "none")
"""How memory that a DMA touches is held: one registered arena of exact size; one buffer a block
from torch's pinned allocator, which rounds each up to a power of two; or pageable, which the driver
copies through a staging buffer while the caller waits."""
PLAIN, FLOAT8 = "plain", "float8"
PRODUCTS = (PLAIN, FLOAT8)
"""What layers multiply in: the dtype of the weights, or float8."""
STREAMS = (1, 2, 3)
MAX_THREADS = 4096
"""More than a host has cores. OpenMP sets up a team on the caller's stack: it stood 20,000 threads,
100,000 overran the stack."""


class RefusedError(ValueError):
    """A model or a setting that the engine does not train with; one line: got, allowed, remedy."""


PLACED = ("device_optimizer", "keep_activations", "offload_activations", "reload_weights")
"""Options that say what is placed where."""
ATTENTION = ("keep_attention", "offload_attention")
"""Options that say what a recomputed layer's attention is given."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's own knobs, the `system` config group."""

    depth: int = 2
    """Device slots for layer weights and slabs for layer gradients: 1 serial, 2 double-buffered,
    more to ride out jitter."""
    streams: int = 3
    """CUDA streams: 1 all work in order, 2 compute and copies, 3 compute, loads (and fetched
    activations) and stores."""
    checkpoint_interval: int = 1
    """Keep every K-th layer's input; 1 recomputes each layer once, more saves memory for one extra
    forward; -1: the smallest that there is room for."""
    gradient_slabs: int = 0
    """Pinned host gradient slabs that the layers share; 0 gives every layer its own."""
    device_optimizer: int = 0
    """First blocks (embedding, then layers) whose weights and optimizer state stay on the device;
    -1: the planner chooses."""
    keep_activations: int = 0
    """Last layers whose activations stay on the device instead of being recomputed; -1: the planner
    chooses."""
    offload_activations: int = 0
    """Layers, spread over those not kept, whose activations wait in pinned host memory; -1: the
    planner chooses."""
    keep_attention: int = 0
    """Last ones of the layers that are recomputed whose attention's own results (its output and
    log-sum-exp) stay on the device, so that it is computed once; -1: as many as there is room for.
    Only where attention is not compiled: without `compile`, or with an `mlp_chunk`."""
    offload_attention: int = 0
    """Ones before those, whose attention's results wait in pinned host memory; -1: as many as there
    is room for. Only where attention is not compiled."""
    reload_weights: int = AUTO
    """1 loads the weights of layers whose activations are kept a second time, for their backward,
    so that they need no device memory of their own; 0 keeps them there; -1: the planner chooses."""
    disk_blocks: int = 0
    """Last layers (after them the embedding, then the head) whose optimizer state beside the
    weights lies on disk; -1: as few as there must be, -2: all that is not on the device."""
    optimizer_overlap: bool = True
    """Update layers beside the next forward (without clipping, beside the backward too); false:
    between steps, serially."""
    late_moments: bool = True
    """Update the weights alone before the next forward and the moments beside it and its backward:
    the same bits. Only where updates overlap, gradients are clipped and every layer has its own
    slab, and on a GPU where that is predicted to be faster; elsewhere one pass does both."""
    compile: bool = False
    """Compile each layer configuration, and the loss, once with torch.compile."""
    loss_chunk: int = 4096
    """Tokens whose logits are alive at a time."""
    mlp_chunk: int = 0
    """Tokens that a layer's MLP and its norms take at a time, for long contexts: MLP-wide values,
    and a norm's fp32 ones, exist for these alone. 0, and a micro-batch of no more tokens, takes all
    at once."""
    products: str = PLAIN
    """What the layers' linear products are computed in: plain (the dtype of the weights) or float8
    (each operand scaled to its range), which trains another function and needs bfloat16."""
    master: str = "split"
    """Master of a bfloat16 run: split (fp32, as bf16 weight + int16 remainder), fp32 (apart), bf16
    (the weight, as published)."""
    pinned: str = "exact"
    """Host memory that copies touch: exact (one pinned arena), torch (pinned by torch, rounded up),
    none (pageable). CUDA only."""
    num_threads: int = 0
    """CPU threads of the optimizer, at most 4096. 0: as many as there are cores; beside a GPU two
    fewer, or half of those where they are more than 32 and half is probed to be faster."""
    torch_adamw: bool = False
    """Run AdamW through torch, for a machine without a C++ compiler: the same bits, several times
    slower."""

    def __post_init__(self) -> None:
        for name in ("depth", "loss_chunk"):
            self._check_least(name, 1)
        for name in ("gradient_slabs", "mlp_chunk", "num_threads"):
            self._check_least(name, 0)
        for name in ("checkpoint_interval", *ATTENTION, *PLACED):
            self._check_least(name, AUTO)
        self._check_least("disk_blocks", ALL)
        if self.checkpoint_interval == 0:
            raise self._refusal("checkpoint_interval", "-1 or an integer >= 1", 1)
        if self.num_threads > MAX_THREADS:
            raise self._refusal("num_threads", f"an integer 0 to {MAX_THREADS}", 0)
        for name in ("optimizer_overlap", "late_moments", "compile", "torch_adamw"):
            self._check_one_of(name, (True, False), "true or false", "choose one of these")
        for name in ATTENTION:
            if getattr(self, name) > 0 and self.compile and not self.mlp_chunk:
                raise self._refusal(name, "0 or -1 where whole layers are compiled", 0)
        if self.offload_activations and self.checkpoint_interval != 1:
            raise ValueError(
                f"system.offload_activations: got {self.offload_activations}, allowed 0 where "
                f"system.checkpoint_interval is {self.checkpoint_interval}; "
                "set system.checkpoint_interval=1"
            )
        self._check_one_of("streams", STREAMS, "1, 2 or 3", "3 overlaps the most")
        self._check_one_of("master", MASTERS, ", ".join(MASTERS), "split is the smallest exact one")
        self._check_one_of("products", PRODUCTS, ", ".join(PRODUCTS), "plain is exact")
        self._check_one_of("pinned", PINNED, ", ".join(PINNED), "exact is the fastest and smallest")

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least:
            raise self._refusal(name, f"an integer >= {least}", max(least, 0))

    def _refusal(self, name: str, allowed: str, remedy: int) -> ValueError:
        got = getattr(self, name)
        return ValueError(
            f"system.{name}: got {got!r}, allowed {allowed}; set system.{name}={remedy}"
        )

    def _check_one_of(self, name: str, values: tuple[object, ...], allowed: str, hint: str) -> None:
        value = getattr(self, name)
        if type(value) is not type(values[0]) or value not in values:
            raise ValueError(f"system.{name}: got {value!r}, allowed {allowed}; {hint}")
