"""What is decided: where each block lives, and what a step makes of that.

Invariant: these are decided numbers, under the names that EngineConfig asks for them by; every rule
about where a block's weights, gradients, activations and optimizer state are is here. Blocks are
counted from 0: embed, the decoder layers, head.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

STAGES = 3
"""Buffers of host memory for state on disk: one is read, one updated and one written."""


class Fate(Enum):
    """What becomes of a layer's activations between its forward and its backward."""

    RECOMPUTED = ""
    KEPT = "_kept"
    OFFLOADED = "_offloaded"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Decided: where each block lives, and what a step makes of that. Names are EngineConfig's."""

    num_layers: int
    depth: int = 2
    streams: int = 3
    checkpoint_interval: int = 1
    gradient_slabs: int = 0
    """0, or as many as layers, gives every layer its own."""
    device_optimizer: int = 0
    keep_activations: int = 0
    offload_activations: int = 0
    keep_attention: int = 0
    """Last ones of the recomputed layers whose attention's results stay on the device."""
    offload_attention: int = 0
    """Ones of the recomputed layers before those, whose attention's results wait on the host."""
    reload_weights: int = 0
    """1: layers whose activations are kept pass through the slots too, and are loaded again for the
    backward."""
    evict_visits: int = 3
    """Forwards of layers that the eviction of one layer's activations takes; their device memory is
    given up that much later."""
    clip: bool = True
    """Exact global-norm clipping: no update before the whole backward is done."""
    optimizer_overlap: bool = True
    late_moments: bool = False
    disk_blocks: int = 0
    """Blocks whose optimizer state, all of it beside the weights, lies on disk: the last layers;
    the head after all others, for the longest says how long the buffers are."""
    num_ranks: int = 1
    """Processes that train together; each has one of as many equal parts of every block."""

    @property
    def num_blocks(self) -> int:
        """Embed, the layers, head."""
        return self.num_layers + 2

    @property
    def head(self) -> int:
        """Block index of the head."""
        return self.num_layers + 1

    @property
    def num_streamed(self) -> int:
        """Layers whose activations are not kept: the first ones."""
        return self.num_layers - self.keep_activations

    @property
    def layers(self) -> range:
        """Block indices of the decoder layers."""
        return range(1, self.head)

    @property
    def pooled(self) -> bool:
        """Whether layers share host gradient slabs; embed and head always own theirs."""
        return 0 < self.gradient_slabs < self.num_layers

    @property
    def deferred(self) -> bool:
        """Whether no update starts before the whole backward is done."""
        return self.clip or not self.optimizer_overlap

    @property
    def two_passes(self) -> bool:
        """Whether moments are updated later: where updates wait for clipping and gradients can stay
        in their slabs."""
        return self.late_moments and self.clip and self.optimizer_overlap and not self.pooled

    def late(self, block: int) -> bool:
        """Whether the block's moments are updated later: what comes from disk is updated while it
        is here."""
        return self.two_passes and not self.on_device(block) and not self.on_disk(block)

    @property
    def hosted(self) -> range:
        """Blocks whose weights live on the host, and their optimizer state there or on disk."""
        return range(self.device_optimizer, self.num_blocks)

    @property
    def on_disks(self) -> range:
        """Blocks whose optimizer state lies on disk."""
        if self.disk_blocks > self.head - self.device_optimizer:
            return self.hosted
        return range(self.head - self.disk_blocks, self.head)

    def on_disk(self, block: int) -> bool:
        """Whether the block's optimizer state lies on disk."""
        return block in self.on_disks

    def stage(self, block: int) -> int:
        """The buffer through which the block's state comes from disk and goes back."""
        return (block - self.on_disks.start) % STAGES

    def on_device(self, block: int) -> bool:
        """Whether the block's weights and optimizer state live on the device."""
        return block < self.device_optimizer

    def fate(self, layer: int) -> Fate:
        """What becomes of the layer's activations. Those offloaded are the first of each of
        `offload_activations` equal stretches of the layers that are not kept."""
        if layer > self.num_streamed:
            return Fate.KEPT
        moved = (layer - 1) * self.offload_activations % self.num_streamed
        return Fate.OFFLOADED if moved < self.offload_activations else Fate.RECOMPUTED

    @property
    def offloaded(self) -> list[int]:
        """Layers whose activations wait on the host."""
        return [layer for layer in self.layers if self.fate(layer) is Fate.OFFLOADED]

    @cached_property
    def attention_kept(self) -> list[int]:
        """Layers that are recomputed with their attention's results at hand."""
        recomputed = [layer for layer in self.layers if self.fate(layer) is Fate.RECOMPUTED]
        number = self.keep_attention + self.offload_attention
        return recomputed[max(0, len(recomputed) - number) :]

    @cached_property
    def attention_moved(self) -> list[int]:
        """Those of them whose results wait on the host."""
        return self.attention_kept[: max(0, len(self.attention_kept) - self.keep_attention)]

    def shares_slab(self, block: int) -> bool:
        """Whether the block's gradients reach the host through a slab that others use too."""
        return self.pooled and block in self.layers

    def owns_weights(self, block: int) -> bool:
        """Whether the block has device memory of its own for weights, or passes through the
        slots."""
        if self.owns_gradients(block):
            return True
        return self.fate(block) is Fate.KEPT and not self.reload_weights

    def owns_gradients(self, block: int) -> bool:
        """Whether the block has device memory of its own for gradients, or passes through the
        slabs."""
        return block not in self.layers or self.on_device(block)

    def attention_drops(self) -> dict[int, int]:
        """Layer whose attention's results wait on the host -> as `drops`."""
        return {layer: min(layer + 2, self.head) for layer in self.attention_moved}

    def drops(self) -> dict[int, int]:
        """Offloaded layer -> the block before whose forward its activations must have left the
        device."""
        due, found = 0, {}
        for layer in self.offloaded:
            due = max(layer + 1 + self.evict_visits, due + self.evict_visits)
            found[layer] = min(due, self.head)
        return found
