"""Seconds of each operation of a step, from the machine's rates: what placement and predictions
use.

A roofline: matrix products at a share of the rate of one large product, everything else at memory
or link bandwidth. Invariant: nothing here knows an order; `timeline` puts the seconds on the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.activations import Widths
from engine.blocks import Blocks, Fate
from engine.planner.rates import Rates
from engine.sizes import Work
from engine.step import Kind, Op

LAYER_EFFICIENCY = 0.88
"""Rate of a decoder layer's products over that of one large matrix product: fitted, as
LAYER_BANDWIDTH, to 65 rows of 0.5B to 7B, H200."""
ATTENTION_EFFICIENCY = 0.68
"""The same of causal attention in a fused kernel, 7B: 0.68 at 128K tokens, 0.67 at 256K and 512K,
0.74 at 64K."""
LAYER_BANDWIDTH = 0.75
"""Bandwidth that the layer's other kernels reach, over that of one large copy on the device."""
HEAD_EFFICIENCY = 0.9
"""Rate of the output head's products over the same."""
LOGIT_BYTES = {True: 4, False: 44}
"""Compiled or not -> bytes of device memory that a token's loss, forward and backward, moves for
each entry of the vocabulary."""
FINISH_BYTES = 6
"""Bytes a parameter to leave a gradient in its slab and take its norm: bf16 read and write,
read."""
UPDATE_BYTES = 26
"""Bytes a parameter of AdamW with the split master: 12 of weight, remainder and moments, read and
written, and the gradient's 2."""
WEIGHTS_BYTES = 18
"""The same of its first pass alone, which writes no moments."""
BESIDE_LOADS = 0.94
"""Rate of evictions beside loads and the CPU's AdamW, over that beside AdamW alone: recorded at 14B
beside 64 cores, 38.6 and 41 GB/s."""
EVICT_SHARE = 0.92
"""The same over that of a copy alone, for rates without one beside AdamW: recorded on an H100 at 3B
beside 16 cores. Beside 64 it was 0.7: so many threads leave copies less of the host's memory."""
PARK_SPEED = 3
"""Copying a gradient out of a shared slab on the CPU, in parameters a second over AdamW's: 26 bytes
against 4, at torch's speed."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step's operations for one model, shape and machine."""

    blocks: Blocks
    work: Work
    rates: Rates
    rest_itemsize: int = 10
    """Bytes a parameter of the optimizer state beside the weight."""

    def seconds(self, op: Op) -> float:
        """How long the operation keeps its lane busy."""
        layout, rates, num_ranks = self.work.layouts[op.block], self.rates, self.blocks.num_ranks
        match op.kind:
            case Kind.LOAD:
                return layout.numel * self.work.itemsize / num_ranks / rates.h2d_bytes
            case Kind.GATHER:
                return self._from_peers(layout.numel)
            case Kind.SCATTER:
                summed = 2 * self.work.itemsize * layout.numel
                return self._from_peers(layout.numel) + self._moved(summed)
            case Kind.STORE:
                return layout.numel * self.work.itemsize / num_ranks / rates.d2h_bytes
            case Kind.EVICT:
                return self._evict(self._waiting_bytes(op.block))
            case Kind.FETCH:
                return self._waiting_bytes(op.block) / op.part[1] / rates.h2d_bytes
            case Kind.FORWARD:
                return self._forward(layout.num_params)
            case Kind.RECOMPUTE:
                return self._forward(layout.num_params) - self._at_hand(op.block)
            case Kind.BACKWARD:
                return self._backward(op.fate, layout.num_params) - self._at_hand(op.block)
            case Kind.TAIL:
                return self._tail
            case Kind.EMBED:
                return self._embed
            case Kind.EMBED_BACKWARD:
                finish = self._moved(FINISH_BYTES * layout.num_params)
                return self._embed + finish + self._summed(layout.num_params)
            case Kind.PARK:
                return layout.numel / (PARK_SPEED * rates.adamw_params)
            case Kind.UPDATE:
                return self._update_s(op.block) * self._contention
            case Kind.UPDATE_HERE:
                return self._moved(UPDATE_BYTES * layout.numel / num_ranks)
            case Kind.MOMENTS:
                return self._moments_s(op.block)
            case Kind.READ_STATE:
                return layout.numel * self.rest_itemsize / rates.disk_read_bytes
            case Kind.WRITE_STATE:
                return layout.numel * self.rest_itemsize / rates.disk_write_bytes
        return 0.0

    def _waiting_bytes(self, layer: int) -> int:
        """Of the layer on the host: its activations, or its attention's results alone."""
        alone = layer in self.blocks.attention_moved
        return self.work.attention_bytes if alone else self.work.moved_bytes

    @property
    def evict_s(self) -> float:
        """Seconds that one layer's activations take to the host."""
        return self._evict(self.work.moved_bytes)

    def _evict(self, num_bytes: int) -> float:
        alone, beside = self.rates.d2h_bytes, self.rates.evict_bytes
        if not beside:
            return num_bytes / (alone * EVICT_SHARE)
        share = self._updating_share
        return num_bytes * (share / beside + (1 - share) / alone) / BESIDE_LOADS

    @cached_property
    def _updating_share(self) -> float:
        """Share of the forward in which the CPU's AdamW runs."""
        if not (self.blocks.deferred and self._updates_beside):  # without clipping: the backward
            return 0.0
        updates = sum(map(self._update_s, self.blocks.hosted)) * self._contention
        forward = sum(self._forward(layout.num_params) for layout in self.work.layouts[1:-1])
        return min(1.0, updates / forward)

    @property
    def forward_s(self) -> float:
        """Seconds of the first layer's forward."""
        return self._forward(self.work.layouts[1].num_params)

    def _from_peers(self, numel: int) -> float:
        """Seconds that a rank takes to get the others' parts of a block, or of its gradients."""
        others = (self.blocks.num_ranks - 1) / self.blocks.num_ranks
        return numel * self.work.itemsize * others / self.rates.peer_bytes

    # The CPU, of which each rank has a part, for its part of every block.

    def _update_s(self, block: int) -> float:
        """Seconds of a block's update, or of its first pass, before contention."""
        late = self.blocks.late(block)
        rate = self.rates.weights_params if late else self.rates.adamw_params
        return self.work.layouts[block].numel / rate

    def _moments_s(self, block: int) -> float:
        """Seconds of its second pass."""
        return self.work.layouts[block].numel / self.rates.moments_params

    @property
    def _updates_beside(self) -> bool:
        """Whether the CPU's AdamW runs beside the forward."""
        return self.blocks.optimizer_overlap and len(self.blocks.hosted) > 0

    @cached_property
    def _contention(self) -> float:
        """How much longer the CPU's AdamW takes beside the forward's loads, which share the host's
        memory: by bytes.

        Evictions are left out: predicted so, the updates of 40 runs of 7B and 14B take 2% too long
        in the mean, of the 17 that offload six layers or more 1% (docs/log.md, 217).
        """
        if not self._updates_beside:
            return 1.0
        update_bytes = WEIGHTS_BYTES if self.blocks.two_passes else UPDATE_BYTES
        return 1 + self.work.itemsize / update_bytes

    # The device.

    @property
    def _tokens(self) -> int:
        """Tokens of one step."""
        return self.work.num_micro_batches * self.work.tokens

    @property
    def _widths(self) -> Widths:
        return self.work.widths

    def _forward(self, num_params: int) -> float:
        return self._products(2 * num_params) + self._attention_s + self._rest

    def _backward(self, fate: Fate, num_params: int) -> float:
        """The backward of a layer; a recomputed one with its recomputation, which computes a
        chunked MLP's products no second time (pre-norm), but its norms."""
        finish = self._moved(FINISH_BYTES * num_params) + self._summed(num_params)
        seconds = self._products(4 * num_params) + 2.5 * self._attention_s + 2 * self._rest + finish
        seconds += self._rebuilt_norms
        if fate is not Fate.RECOMPUTED:
            return seconds + self._rebuilt_mlp
        return seconds + self._forward(num_params) - self._products(self._dead) + self._summed_mlp

    def _summed(self, num_params: int) -> float:
        """Seconds that summing a block's gradients over micro-batches in fp32 adds: each but the
        first is read and added, and where the slab is not the sum, this is written and read once, 8
        bytes a parameter. The sum over pieces of the loss is `_tail`'s, of a shared embedding too.
        """
        again, itemsize = self.work.num_micro_batches - 1, self.work.itemsize
        apart = 8 if itemsize < 4 else 0
        return self._moved(num_params * (apart + again * (itemsize + 8))) if again else 0.0

    @property
    def _rest(self) -> float:
        """Seconds of a layer's forward outside of its products and attention."""
        return self._moved(self._layer_bytes * self._tokens) / LAYER_BANDWIDTH

    @property
    def _dead(self) -> int:
        """Forward operations a token that a recomputation leaves out."""
        return 2 * self._widths.inner * self._widths.hidden if self.work.compiled else 0

    @property
    def _rebuilt_mlp(self) -> float:
        """Seconds that the backward of a kept graph computes a chunked gated MLP again."""
        if not self.work.mlp_chunk:
            return 0.0
        products = self._products(6 * self._widths.inner * self._widths.hidden - self._dead)
        gated = self._moved(self._gated * self._widths.inner * self._tokens) / LAYER_BANDWIDTH
        return products + gated + self._summed_mlp

    @property
    def _rebuilt_norms(self) -> float:
        """Seconds that the backward of chunked norms computes them again."""
        if not self.work.mlp_chunk:
            return 0.0
        norms = (8 if self.work.compiled else 72) * self._widths.hidden
        return self._moved(norms * self._tokens) / LAYER_BANDWIDTH

    @property
    def _summed_mlp(self) -> float:
        """Seconds to add the gradients of each chunk's weights to their fp32 sums."""
        if not self.work.mlp_chunk:
            return 0.0
        chunks = self.work.num_micro_batches * -(-self.work.tokens // self.work.mlp_chunk)
        numel = 3 * self._widths.inner * self._widths.hidden
        return self._moved(chunks * (self.work.itemsize + 8) * numel)

    @property
    def _gated(self) -> int:
        """Bytes that a gated MLP's activation and product read and write, a value of its inner
        width."""
        return 6 if self.work.compiled else 10

    @cached_property
    def _layer_bytes(self) -> int:
        """Device memory a token that a layer's forward reads and writes outside of its products and
        attention.

        Eager: each norm goes through fp32 (36 bytes a value of the hidden state), each sum with the
        residual takes 6; the rotation of a query or key value 20; the gated MLP's activation and
        product 10. Compiled: 10 for a norm and its sum, 4 and 6, each read and written once; where
        the MLP is chunked, it and the norms alone are. A backward moves twice as much.
        """
        w = self._widths
        hidden = 20 if self.work.compiled else 84
        rotated = 4 if self.work.compiled and not self.work.mlp_chunk else 20
        return hidden * w.hidden + rotated * (w.queries + w.keys) + self._gated * w.inner

    @property
    def _attention_s(self) -> float:
        """Seconds of a forward's causal attention: both products, 2 x width x length operations a
        token; a window has fewer."""
        flops = 2 * self._widths.queries * self.work.seq_len * self._tokens
        return flops / (self.rates.matmul_flops * ATTENTION_EFFICIENCY)

    def _at_hand(self, layer: int) -> float:
        """Seconds of attention that a recomputation of the layer need not compute."""
        return self._attention_s if layer in self.blocks.attention_kept else 0.0

    @property
    def _embed(self) -> float:
        return self._moved(2 * self.work.itemsize * self._widths.hidden * self._tokens)

    @property
    def _tail(self) -> float:
        head = self._widths.vocab * self._widths.hidden
        sums = self.work.num_loss_chunks * 10 * head  # a bf16 contribution into an fp32 sum
        products = 6 * head * self._tokens / (self.rates.matmul_flops * HEAD_EFFICIENCY)
        logits = LOGIT_BYTES[self.work.compiled] * self._widths.vocab * self._tokens
        return products + self._moved(logits + sums)

    def _products(self, flops_per_token: float) -> float:
        return flops_per_token * self._tokens / (self.rates.matmul_flops * LAYER_EFFICIENCY)

    def _moved(self, num_bytes: float) -> float:
        return num_bytes / self.rates.device_bytes
