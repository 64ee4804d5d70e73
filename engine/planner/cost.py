"""Seconds of each operation of a schedule, from the machine's rates: what placement and predictions are made of.

A roofline: matrix products at a share of the rate of one large product, everything else at memory or link bandwidth.
Invariant: nothing here knows an order; `timeline` puts the seconds on the lanes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from engine.layers.head import num_chunks
from engine.layout import Layout
from engine.adamw import AdamW, BlockState
from engine.pipeline import Pipeline
from engine.sizes import Widths
from engine.recipe import Recipe
from engine.step import Op

LAYER_EFFICIENCY = 0.88
"""Rate of a decoder layer's products over that of one large matrix product: fitted, as LAYER_BANDWIDTH, to 65 rows of 0.5B to
7B, H200."""
ATTENTION_EFFICIENCY = 0.68
"""The same of causal attention in a fused kernel, 7B: 0.68 at 128K tokens, 0.67 at 256K and 512K, 0.74 at 64K (log.md, 47, 68)."""
LAYER_BANDWIDTH = 0.75
"""Bandwidth that the layer's other kernels reach, over that of one large copy on the device."""
HEAD_EFFICIENCY = 0.9
"""Rate of the output head's products over the same."""
LOGIT_BYTES = {True: 4, False: 44}
"""Compiled or not -> bytes of device memory that a token's loss, forward and backward, moves for each entry of the vocabulary."""
FINISH_BYTES = 6
"""Bytes a parameter to leave a gradient in its slab and take its norm: bf16 read and write, read."""
UPDATE_BYTES = 26
"""Bytes a parameter of AdamW with the split master: 12 of weight, remainder and moments, read and written, and the gradient's 2."""
WEIGHTS_BYTES = 18
"""The same of its first pass alone, which writes no moments."""
ADAMW_SHARE = 0.85
"""Rate of the CPU's AdamW in a run over that of the probe, which has the machine to itself: the same rows."""
KEEP_SPEED = 3
"""Copying a gradient out of a shared slab on the CPU, in parameters a second over AdamW's: 26 bytes against 4, at torch's speed."""
UPDATE_ROUNDS = 24
"""Of the three kinds of update, about half a second: the mean of 9 varied by 30% from one process to the next on one machine."""
COPY_ROUNDS = 8
"""Of a product or a copy; the best of 3 was once in twenty times 40% too slow."""
PROBE_NUMEL = 1 << 26
PROBE_SIZE = 8192
PROBE_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does in a second."""

    matmul_flops: float
    """Floating-point operations of a large bf16 matrix product on the device."""
    adamw_params: float
    """Parameters that the CPU's AdamW updates, in one pass."""
    weights_params: float
    """Parameters of the first of two passes: master and weight."""
    moments_params: float
    """Parameters of the second: the moments."""
    h2d_bytes: float
    """Bytes from pinned host memory to the device."""
    d2h_bytes: float
    """Bytes from the device to pinned host memory."""
    device_bytes: float
    """Bytes of device memory read and written."""


def measure(device: torch.device, num_threads: int, *, pinned: bool = True, use_native: bool = True) -> Rates:
    """Probe the rates of this machine; a second or two, 0.8 GiB of device and 1.1 GiB of host memory for that time.

    pinned: whether the link is probed from pinned memory. use_native: as AdamW's.
    """
    try:
        return _probe(device, num_threads, pinned, use_native)
    finally:
        torch.cuda.empty_cache()


def _probe(device: torch.device, num_threads: int, pinned: bool, use_native: bool) -> Rates:
    a = torch.randn(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=device)
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=pinned)
    here, there = (torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def synchronized(work: Callable[[], object]) -> float:
        def all_of_it() -> None:
            work()
            torch.cuda.synchronize(device)

        return _fastest(all_of_it)

    weight, gradient = (torch.zeros(PROBE_NUMEL, dtype=torch.bfloat16) for _ in range(2))
    extra, moments = torch.zeros(PROBE_NUMEL, dtype=torch.int16), [torch.zeros(PROBE_NUMEL) for _ in range(2)]
    state = BlockState(weight=weight, extra=extra, exp_avg=moments[0], exp_avg_sq=moments[1])
    optimizer = AdamW(Recipe(), num_threads=num_threads, use_native=use_native)

    updates = [optimizer.step, optimizer.step_weights, optimizer.step_moments]
    taken = _in_turns([partial(update, state, gradient, step=0, scale=1.0) for update in updates], UPDATE_ROUNDS)
    # Not the fastest, nor the median: a run meets whatever else the machine does, and its step takes what updates take in the mean.
    adamw, first, second = (PROBE_NUMEL / statistics.mean(times) for times in taken)
    return Rates(
        matmul_flops=2 * PROBE_SIZE**3 / synchronized(lambda: torch.matmul(a, a)),
        adamw_params=adamw,
        weights_params=first,
        moments_params=second,
        h2d_bytes=PROBE_BYTES / synchronized(lambda: here.copy_(host, non_blocking=True)),
        d2h_bytes=PROBE_BYTES / synchronized(lambda: host.copy_(here, non_blocking=True)),
        device_bytes=2 * PROBE_BYTES / synchronized(lambda: there.copy_(here)),
    )


def _fastest(work: Callable[[], object]) -> float:
    return min(_in_turns([work], COPY_ROUNDS)[0])


def _in_turns(works: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each run of each, one after the other, round after round; a first round does not count."""
    times: list[list[float]] = [[] for _ in works]
    for counts in (False, *[True] * rounds):
        for work, samples in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            if counts:
                samples.append(time.perf_counter() - started)
    return times


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a pipeline's operations for one model, shape and machine."""

    pipeline: Pipeline
    layouts: Sequence[Layout]
    widths: Widths
    shape: tuple[int, int, int]
    """(number of micro-batches, rows, seq_len)."""
    itemsize: int
    """Bytes of a weight and of a gradient."""
    activation_bytes: int
    """Of an offloaded layer, all micro-batches."""
    loss_chunk: int
    compiled: bool
    rates: Rates
    mlp_chunk: int = 0
    """Tokens that the MLP takes at a time, fewer than a micro-batch's, or 0 for all of these."""

    @property
    def tokens(self) -> int:
        """Of one step."""
        micro_batches, rows, seq_len = self.shape
        return micro_batches * rows * seq_len

    def seconds(self, op: Op) -> float:
        """How long the operation keeps its lane busy."""
        numel = self.layouts[op.block].numel
        if op.kind == "load":
            return numel * self.itemsize / self.rates.h2d_bytes
        if op.kind == "store":
            return numel * self.itemsize / self.rates.d2h_bytes
        if op.kind in ("evict", "fetch"):
            return self.activation_bytes / (self.rates.d2h_bytes if op.kind == "evict" else self.rates.h2d_bytes)
        if op.kind == "compute":
            return self._compute(op.phase, self.layouts[op.block].num_params)
        if op.kind == "keep":
            return numel / (KEEP_SPEED * self.rates.adamw_params)
        if op.kind == "step":
            if op.phase == "device_step":
                return self._moved(UPDATE_BYTES * numel)
            rate = self.rates.weights_params if self.pipeline.two_passes else self.rates.adamw_params
            return numel / (rate * ADAMW_SHARE) * self._contention
        if op.kind == "moments":
            return numel / (self.rates.moments_params * ADAMW_SHARE)
        return 0.0

    @cached_property
    def _contention(self) -> float:
        """How much longer the CPU's AdamW takes beside the forward's copies, which share the host's memory: by bytes.

        Recorded with 7 of 28 layers offloaded at 7B: 1.27 times as long, by this formula 1.27.
        """
        p = self.pipeline
        hosted = sum(self.layouts[block].numel for block in range(p.num_blocks) if not p.on_device(block))
        if not p.overlap or not hosted:
            return 1.0
        evicted = sum(map(p.is_offloaded, range(p.num_blocks))) * self.activation_bytes
        update_bytes = WEIGHTS_BYTES if p.two_passes else UPDATE_BYTES
        return 1 + (hosted * self.itemsize + evicted) / (hosted * update_bytes)

    def _compute(self, phase: str, num_params: int) -> float:
        rest = self._moved(self._layer_bytes * self.tokens) / LAYER_BANDWIDTH
        forward = self._products(2 * num_params) + self._attention_s + rest
        backward = self._products(4 * num_params) + 2.5 * self._attention_s + 2 * rest + self._moved(FINISH_BYTES * num_params)
        if phase in ("forward", "forward_kept", "forward_offloaded", "recompute"):
            return forward
        if phase in ("backward_kept", "backward_offloaded"):
            return backward + self._rebuilt_mlp
        if phase == "backward":  # a chunked MLP's products are left to the backward (pre-norm): once in either case
            return backward + forward - self._products(self._dead) + self._summed_mlp
        if phase == "tail":
            return self._tail()
        embedding = 2 * self.itemsize * self.widths.hidden * self.tokens
        return self._moved(embedding + (phase == "embed_backward") * FINISH_BYTES * num_params)

    @property
    def _dead(self) -> int:
        """Forward operations a token that a recomputation leaves out."""
        return 2 * self.widths.inner * self.widths.hidden if self.compiled else 0

    @property
    def _rebuilt_mlp(self) -> float:
        """Seconds that the backward of a kept graph computes a chunked gated MLP again."""
        if not self.mlp_chunk:
            return 0.0
        products = self._products(6 * self.widths.inner * self.widths.hidden - self._dead)
        return products + self._moved(self._gated * self.widths.inner * self.tokens) / LAYER_BANDWIDTH + self._summed_mlp

    @property
    def _summed_mlp(self) -> float:
        """Seconds to add the gradients of each chunk's weights to their fp32 sums."""
        micro_batches, rows, seq_len = self.shape
        num_chunks = micro_batches * -(-rows * seq_len // self.mlp_chunk) if self.mlp_chunk else 0
        return self._moved(num_chunks * (self.itemsize + 8) * 3 * self.widths.inner * self.widths.hidden)

    @property
    def _gated(self) -> int:
        """Bytes that a gated MLP's activation and product read and write, a value of its inner width."""
        return 6 if self.compiled else 10

    @cached_property
    def _layer_bytes(self) -> int:
        """Device memory a token that a layer's forward reads and writes outside of its products and attention.

        Eager: each norm goes through fp32 (36 bytes a value of the hidden state), each sum with the residual takes 6; the
        rotation of a query or key value 20; the gated MLP's activation and product 10. Compiled: 10, 4 and 6, each read and
        written once; beside a chunked MLP it alone is. A backward moves twice as much.
        """
        w = self.widths
        hidden, rotated = (20, 4) if self.compiled and not self.mlp_chunk else (84, 20)
        return hidden * w.hidden + rotated * (w.queries + w.keys) + self._gated * w.inner

    @property
    def _attention_s(self) -> float:
        """Seconds of a forward's causal attention: both products, 2 x width x length operations a token; a window has fewer."""
        flops = 2 * self.widths.queries * self.shape[2] * self.tokens
        return flops / (self.rates.matmul_flops * ATTENTION_EFFICIENCY)

    def _tail(self) -> float:
        micro_batches, rows, seq_len = self.shape
        head = self.widths.vocab * self.widths.hidden
        sums = num_chunks(rows, seq_len, self.loss_chunk) * micro_batches * 10 * head  # bf16 contribution into an fp32 sum
        products = 6 * head * self.tokens / (self.rates.matmul_flops * HEAD_EFFICIENCY)
        return products + self._moved(LOGIT_BYTES[self.compiled] * self.widths.vocab * self.tokens + sums)

    def _products(self, flops_per_token: float) -> float:
        return flops_per_token * self.tokens / (self.rates.matmul_flops * LAYER_EFFICIENCY)

    def _moved(self, num_bytes: float) -> float:
        return num_bytes / self.rates.device_bytes
