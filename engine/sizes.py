"""What a step works on, and the bytes it takes, in closed form. Nothing here allocates.

Invariant: every byte that the engine allocates at setup appears here under its own kind, so that a
plan beside an observation is a comparison and not a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.activations import Widths, layer_activation_bytes, logits_bytes
from engine.blocks import STAGES, Blocks
from engine.config import EngineConfig
from engine.layout import Layout, round_up

PAGE = 4096
ACTIVATION_MARGIN = 1.05
"""Pinned activation slabs are this much larger than their closed form."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def pinned_rounding(num_bytes: int) -> int:
    """Bytes that torch adds to a pinned block: up to the next power of two."""
    return (1 << (num_bytes - 1).bit_length()) - num_bytes if num_bytes else 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted peak bytes: `device` and `host` map a kind (weights, master, moments, ...) to
    bytes."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Predicted device peak, bytes."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Predicted host peak, bytes."""
        return sum(self.host.values())


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Bytes of a micro-batch's attention masks where documents are packed; there are none else."""

    given: int = 0
    """Of those that the model makes, once for all of its layers."""
    saved: int = 0
    """Of what one layer's graph holds of them."""

    @classmethod
    def of(cls, config: Any, rows: int, seq_len: int, itemsize: int) -> Masks:
        """From a transformers config. Fused attention is given true and false, and each layer's
        graph saves its own copy in the compute dtype; eager attention is given what it adds, and
        saves none. One mask a kind of layer: full, with a window."""
        pairs, text = rows * seq_len**2, config.get_text_config(decoder=True)
        kinds = len(set(getattr(text, "layer_types", None) or [None]))
        if getattr(config, "_attn_implementation", None) == "eager":
            return cls(given=kinds * pairs * itemsize)
        return cls(given=kinds * pairs, saved=pairs * itemsize)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every step works on: a model's blocks and the shape of a batch."""

    layouts: Sequence[Layout]
    """One a block."""
    widths: Widths
    dtype: torch.dtype
    """Weights and gradients have it: bfloat16 or float32."""
    num_micro_batches: int
    rows: int
    """Rows of one micro-batch."""
    seq_len: int
    loss_chunk: int
    """Tokens whose logits are alive at a time."""
    mlp_chunk: int = 0
    """Tokens that an MLP and a norm take at a time, fewer than a micro-batch's, or 0 for all of
    these."""
    compiled: bool = False
    tied: bool = True
    """Whether parameters of embed are used behind the layers too."""
    counted: tuple[int, int] = (0, 0)
    """Least bytes of a layer's graph for one micro-batch, and with its backward, as
    layers/rehearsal.py counted them; 0 says nothing."""
    float8: int = 0
    """Parameters of a layer, in the mean, that multiply in float8."""
    masks: Masks = field(default_factory=Masks)

    @property
    def shape(self) -> tuple[int, int, int]:
        """A batch's tokens are (number of micro-batches, rows, seq_len)."""
        return self.num_micro_batches, self.rows, self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.rows * self.seq_len

    @property
    def itemsize(self) -> int:
        """Bytes of a weight and of a gradient."""
        return self.dtype.itemsize

    @property
    def num_loss_chunks(self) -> int:
        """Pieces of a step in which logits are computed; each gives the head one gradient."""
        pieces = sum(1 for _ in chunks(self.rows, self.seq_len, self.loss_chunk))
        return pieces * self.num_micro_batches

    def contributions(self, block: int) -> int:
        """Gradients that a parameter of the block gets in a step, to be summed."""
        if block == 0:
            return self.num_micro_batches + (self.num_loss_chunks if self.tied else 0)
        return self.num_loss_chunks if block == len(self.layouts) - 1 else self.num_micro_batches

    def summed_bytes(self, block: int) -> int:
        """Bytes of the fp32 sum of a block's gradients: where it gets several in bfloat16."""
        several = self.dtype != torch.float32 and self.contributions(block) > 1
        return 4 * self.layouts[block].numel if several else 0

    @property
    def largest_layer(self) -> int:
        """Elements of the largest decoder layer."""
        return max(layout.numel for layout in self.layouts[1:-1])

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch's hidden states."""
        return self.tokens * self.widths.hidden * self.itemsize

    def layer_bytes(self, *, backward: bool) -> int:
        """Bytes of one layer's graph for one micro-batch, as `layer_activation_bytes` counts them
        but no fewer than `counted`, and what it saves of a mask and of products in float8."""
        layer = self._layer_bytes(backward=backward)
        if backward and not self.counted[True]:
            layer += max(0, self.counted[False] - self._layer_bytes(backward=False))
        found = self.masks.saved + max(layer, self.counted[backward])
        return found + (self._float8_bytes(backward=backward) if self.float8 else 0)

    def _layer_bytes(self, *, backward: bool) -> int:
        return layer_activation_bytes(
            self.widths,
            self.tokens,
            self.itemsize,
            backward=backward,
            compiled=self.compiled,
            mlp_chunk=self.mlp_chunk,
        )

    def _float8_bytes(self, *, backward: bool) -> int:
        """Compiled, a graph saves the weights that it has made float8, for that is smaller than
        what it is given. Eager, an operand is there twice in fp32 while it is made float8."""
        if self.compiled and not self.mlp_chunk:
            return self.float8
        return 8 * self.widths.inner * (self.mlp_chunk or self.tokens) if backward else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of one layer's activations, all micro-batches, that its backward needs."""
        return self.num_micro_batches * self.layer_bytes(backward=False)

    @property
    def attention_bytes(self) -> int:
        """Bytes of what one layer's attention gives, all micro-batches: its output and, in fp32,
        its log-sum-exp."""
        token = self.widths.queries * self.itemsize + 4 * self.widths.heads
        return self.num_micro_batches * self.tokens * token

    @property
    def moved_bytes(self) -> int:
        """Bytes of these that can wait on the host: all but the layer's output, which is the next
        one's input."""
        return self.kept_bytes - self.num_micro_batches * self.hidden_bytes


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """Sizes of the store."""

    layouts: Sequence[Layout]
    """One a block."""
    dtype: torch.dtype
    """Weights and gradients have it: bfloat16 or float32."""
    master: str
    """One of config.MASTERS; a float32 weight is always the master itself."""
    slabs: Mapping[int, int]
    """Host gradient slab -> elements."""
    activations: Mapping[int, int] = field(default_factory=dict)
    """Layer of which something waits on the host -> bytes of its pinned slab."""
    parked: Sequence[int] = ()
    """Blocks whose gradients move out of a shared slab and wait in memory of their own."""
    on_device: int = 0
    """First blocks whose weights and optimizer state live on the device instead."""
    num_ranks: int = 1
    """Of which each has an equal part of every block."""
    on_disks: range = range(0)
    """Blocks of whose optimizer state the weights alone are in memory."""
    pinned: str = "none"
    """One of config.PINNED; none where there is no device to copy to."""

    @classmethod
    def of(
        cls, blocks: Blocks, work: Work, config: EngineConfig, device: torch.device
    ) -> StoreSpec:
        """What a step of `blocks` needs of one rank."""
        num_ranks = blocks.num_ranks
        shared = [block for block in blocks.hosted if blocks.shares_slab(block)]
        first = blocks.gradient_slabs if blocks.pooled else 0
        pool = range(blocks.gradient_slabs)
        slabs = dict.fromkeys(pool, work.largest_layer // num_ranks) if shared else {}
        for block in blocks.hosted:
            if block not in shared:
                slabs[first + block] = work.layouts[block].numel // num_ranks
        slab = round_up(math.ceil(work.moved_bytes * ACTIVATION_MARGIN), PAGE)
        attention = round_up(math.ceil(work.attention_bytes * ACTIVATION_MARGIN), PAGE)
        activations = dict.fromkeys(blocks.offloaded, slab)
        activations |= dict.fromkeys(blocks.attention_moved, attention)
        return cls(
            layouts=work.layouts,
            dtype=work.dtype,
            master=config.master,
            slabs=slabs,
            activations=activations,
            parked=shared if blocks.deferred else (),
            on_device=blocks.device_optimizer,
            num_ranks=num_ranks,
            on_disks=blocks.on_disks,
            pinned=config.pinned if device.type == "cuda" else "none",
        )

    def buffers(self) -> list[int]:
        """Bytes of each piece that a DMA touches: weights by block, gradient and activation
        slabs."""
        numels = (*self.hosted_numels, *self.slabs.values())
        return [numel * self.dtype.itemsize for numel in numels] + list(self.activations.values())

    def part(self, block: int) -> int:
        """Elements of a rank's part of a block."""
        return self.layouts[block].numel // self.num_ranks

    @property
    def hosted_numels(self) -> list[int]:
        """Elements of each block's part on the host, 0 where the block is on the device."""
        hosted = range(self.on_device, len(self.layouts))
        return [0] * self.on_device + [self.part(block) for block in hosted]

    @property
    def extra_dtype(self) -> torch.dtype | None:
        """Dtype of what completes the weight to the fp32 master; None where the weight is it."""
        if self.dtype == torch.float32 or self.master == "bf16":
            return None
        return torch.int16 if self.master == "split" else torch.float32

    def host_bytes(self) -> dict[str, int]:
        """Host bytes by kind, as they will be allocated."""
        parked = sum(map(self.part, self.parked))
        away = sum(map(self.part, self.on_disks))
        kinds = {
            "gradients": (sum(self.slabs.values()) + parked) * self.dtype.itemsize,
            "activations": sum(self.activations.values()),
        }
        if self.pinned == "torch":
            kinds["rounding"] = sum(map(pinned_rounding, self.buffers()))
        state = self._state_bytes(sum(self.hosted_numels))
        if away:
            kinds["staging"] = STAGES * self.stage_bytes
            away_bytes = self._state_bytes(away) | {"weights": 0}
            state = {kind: size - away_bytes[kind] for kind, size in state.items()}
        return state | kinds

    @property
    def rest_itemsize(self) -> int:
        """Bytes an element of the optimizer state beside the weight: master or remainder, and
        moments."""
        return 8 + (self.extra_dtype.itemsize if self.extra_dtype else 0)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a buffer that state on disk passes through."""
        return self.rest_itemsize * max(map(self.part, self.on_disks), default=0)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the state on disk, of which every step reads and writes all."""
        return self.rest_itemsize * sum(map(self.part, self.on_disks))

    def device_state_bytes(self) -> dict[str, int]:
        """Device bytes, by kind, of the blocks that live there, beside their weights, which are
        whole on each rank."""
        kinds = self._state_bytes(sum(map(self.part, range(self.on_device))))
        return {kind: size for kind, size in kinds.items() if kind != "weights"}

    def _state_bytes(self, numel: int) -> dict[str, int]:
        return {
            "weights": numel * self.dtype.itemsize,
            "master": numel * self.extra_dtype.itemsize if self.extra_dtype else 0,
            "moments": numel * 8,
        }


def chunks(rows: int, seq_len: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of [rows, seq_len] in pieces of at most `chunk` tokens: whole sequences where
    they fit."""
    num_rows, num_columns = max(1, chunk // seq_len), min(seq_len, chunk)
    for row in range(0, rows, num_rows):
        for column in range(0, seq_len, num_columns):
            yield slice(row, row + num_rows), slice(column, column + num_columns)


def device_bytes(blocks: Blocks, work: Work) -> dict[str, int]:
    """Peak device bytes by kind, without optimizer state."""
    weights = _own_and_ring(blocks, work, [b for b in _all(blocks) if blocks.owns_weights(b)])
    slabs = _own_and_ring(blocks, work, [b for b in _all(blocks) if blocks.owns_gradients(b)])
    interval, layers = blocks.checkpoint_interval, blocks.num_streamed
    saved = -(-layers // interval) + interval - 1
    kept = blocks.keep_activations * work.kept_bytes
    attention = _attention_at_once(blocks) * work.attention_bytes
    return {
        "weights": weights * work.itemsize,
        "gradients": slabs * work.itemsize + _summed_bytes(work) + _exchanged(blocks, work),
        "checkpoints": (saved + 2) * work.num_micro_batches * work.hidden_bytes,
        "kept": kept,
        "activations": max(_peaks(blocks, work)) - kept,
        **({"attention": attention} if attention else {}),
        **({"masks": work.num_micro_batches * work.masks.given} if work.masks.given else {}),
    }


def _attention_at_once(blocks: Blocks) -> int:
    """Most layers whose attention's results are here. Those that wait on the host are of the first
    layers, so these come when the others have gone, but for what is left of their group: one, and
    the next on its way."""
    moved = blocks.attention_moved
    here = len(blocks.attention_kept) - len(moved)
    beside = min(here, -moved[-1] % blocks.checkpoint_interval) if moved else 0
    return max(here, beside + min(2, len(moved) + here))


def _exchanged(blocks: Blocks, work: Work) -> int:
    """Bytes of the parts that come from other ranks, of the largest block, and their fp32 sum."""
    if blocks.num_ranks == 1:
        return 0
    numel = max(layout.numel for layout in work.layouts)
    return numel * work.itemsize + 4 * numel // blocks.num_ranks


def _all(blocks: Blocks) -> range:
    return range(blocks.num_blocks)


def _own_and_ring(blocks: Blocks, work: Work, owners: Sequence[int]) -> int:
    """Elements of blocks with device memory of their own, and of the ring that the others share."""
    ring = blocks.depth * work.largest_layer if len(owners) < blocks.num_blocks else 0
    return sum(work.layouts[block].numel for block in owners) + ring


def _summed_bytes(work: Work) -> int:
    """Bytes of fp32 sums that outlive an operation: that of the largest layer, for all, and embed's
    where it is tied. Otherwise it is there in its backward alone, as the head's in the tail."""
    layer = max(map(work.summed_bytes, range(1, len(work.layouts) - 1)))
    return layer + (work.summed_bytes(0) if work.tied else 0)


def _peaks(blocks: Blocks, work: Work) -> list[int]:
    """Bytes of activations at the five moments that can be the peak: when the forward ends, in the
    tail, in the backward of a kept layer, in that of another and in embed's."""
    kept = blocks.keep_activations * work.kept_bytes
    any_stay = blocks.keep_activations + blocks.offload_activations > 0
    whole = work.layer_bytes(backward=True)
    graph = whole + work.largest_layer * work.itemsize  # and a layer's gradients
    # Of a layer that is not recomputed the output is there, which the next one was given.
    outlives = work.hidden_bytes if work.mlp_chunk and any_stay else 0
    graph += outlives
    temporary = graph - work.layer_bytes(backward=False)
    # What attention is given back is what the plan has of it already.
    given = work.attention_bytes // work.num_micro_batches if blocks.attention_kept else 0
    fetched = min(blocks.offload_activations, max(1, blocks.keep_activations)) * work.moved_bytes
    all_stay = blocks.keep_activations + blocks.offload_activations >= blocks.num_layers
    embed = work.layouts[0].numel * work.itemsize + (0 if work.tied else work.summed_bytes(0))
    first = fetched if not blocks.keep_activations else 0  # it comes back beside the tail
    return [
        _forward_peak(blocks, work),
        kept + first + _tail_bytes(work),
        kept + (temporary if blocks.keep_activations else 0),
        fetched + (temporary if all_stay else graph - given),
        embed,
    ]


def _tail_bytes(work: Work) -> int:
    """Bytes of a chunk's logits, or of one gradient of the logits and the head's own; and of the
    head's fp32 sum."""
    chunk, vocab = min(work.tokens, work.loss_chunk), work.widths.vocab
    matrix = max(work.layouts[0].numel, work.layouts[-1].numel)
    logits = logits_bytes(vocab, chunk, work.itemsize, compiled=work.compiled)
    summed = work.summed_bytes(len(work.layouts) - 1)
    return summed + max(logits, (chunk * vocab + matrix) * work.itemsize)


def _forward_peak(blocks: Blocks, work: Work) -> int:
    """Most bytes at once of kept activations and of those that have not left yet."""
    drops, held, most = blocks.drops(), 0, 0
    for layer in blocks.layers:
        held -= work.moved_bytes * sum(due == layer for due in drops.values())
        if layer > blocks.num_streamed:
            held += work.kept_bytes
        elif layer in drops:
            held += work.moved_bytes
        most = max(most, held)
    return most
