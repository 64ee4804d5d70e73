"""Pipeline: the numbers that a schedule is made from, and where each block lives under them.

Blocks are counted from 0: embed, the decoder layers, head.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, H2D, D2H, FETCH, CPU = "compute", "h2d", "d2h", "fetch", "cpu"
LANES = {
    1: {COMPUTE: COMPUTE, H2D: COMPUTE, D2H: COMPUTE, FETCH: COMPUTE, CPU: CPU},
    2: {COMPUTE: COMPUTE, H2D: "copy", D2H: "copy", FETCH: "copy", CPU: CPU},
    3: {COMPUTE: COMPUTE, H2D: H2D, D2H: D2H, FETCH: FETCH, CPU: CPU},
}
"""Number of CUDA streams -> the lane that each kind of work runs on; the CPU worker is always its own lane."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a schedule is made from."""

    num_layers: int
    depth: int = 2
    """Device weight slots, and device gradient slabs, for decoder layers."""
    streams: int = 3
    """CUDA streams: 1 serial, 2 compute and copy, 3 compute, H2D and D2H, and a fourth for fetched activations."""
    checkpoint_interval: int = 1
    """K: every K-th layer's input is kept; the others are recomputed from it in the backward."""
    gradient_slabs: int = 0
    """Pinned host gradient slabs that the layers share; 0, or as many as layers, gives every layer its own."""
    device_blocks: int = 0
    """First blocks (embed is the first) whose weights and optimizer state live on the device: neither loaded nor stored."""
    kept_layers: int = 0
    """Last layers whose activations stay on the device: loaded once, differentiated without recomputation."""
    offloaded_layers: int = 0
    """Layers, spread evenly over those not kept, whose activations wait in pinned host memory instead of being recomputed."""
    evict_visits: int = 3
    """Forwards of layers that the eviction of one layer's activations takes; their device memory is given up that much later."""
    clip: bool = True
    """Exact global-norm clipping: no update before the whole backward is done."""
    overlap: bool = True
    """Updates run beside the next forward and, without clipping, the backward; false: between one step and the next."""
    late_moments: bool = False
    """Ask for AdamW in two passes: weights before the next forward, moments before the slab takes its next gradient."""
    poison: bool = False
    """Fill freed slots with NaN (debugging)."""

    @property
    def num_blocks(self) -> int:
        """Embed, the layers, head."""
        return self.num_layers + 2

    @property
    def head(self) -> int:
        """Block index of the head; 0 is embed, 1..num_layers the layers."""
        return self.num_layers + 1

    @property
    def pooled(self) -> bool:
        """True where layers share host gradient slabs; embed and head always own theirs."""
        return 0 < self.gradient_slabs < self.num_layers

    @property
    def deferred(self) -> bool:
        """True where no update starts before the whole backward is done."""
        return self.clip or not self.overlap

    @property
    def two_passes(self) -> bool:
        """True where the moments are updated later: where updates wait for clipping and gradients can stay in their slabs."""
        return self.late_moments and self.clip and self.overlap and not self.pooled

    def on_device(self, block: int) -> bool:
        """True where the block's weights and optimizer state live on the device."""
        return block < self.device_blocks

    def is_layer(self, block: int) -> bool:
        """True for decoder layers, false for embed and head."""
        return 1 <= block <= self.num_layers

    def is_kept(self, block: int) -> bool:
        """True for a layer whose activations are kept."""
        return self.num_layers - self.kept_layers < block <= self.num_layers

    def is_offloaded(self, block: int) -> bool:
        """True for a layer whose activations wait on the host: the first of each of `offloaded_layers` equal stretches."""
        rest = self.num_layers - self.kept_layers
        return 1 <= block <= rest and (block - 1) * self.offloaded_layers % rest < self.offloaded_layers

    def owns_weights(self, block: int) -> bool:
        """True where the block has device memory of its own for weights, false where it passes through the slots."""
        return not self.is_layer(block) or self.on_device(block) or self.is_kept(block)

    def owns_gradients(self, block: int) -> bool:
        """True where the block has device memory of its own for gradients."""
        return not self.is_layer(block) or self.on_device(block)

    def drops(self) -> dict[int, int]:
        """Offloaded layer -> the layer before whose forward (head: loss) its activations must have left the device."""
        due, found = 0, {}
        for layer in filter(self.is_offloaded, range(1, self.head)):
            due = max(layer + 1 + self.evict_visits, due + self.evict_visits)
            found[layer] = min(due, self.head)
        return found
