"""Runs a schedule: hands the work of each operation to its lane. The schedule alone says what waits for what.

Invariant: an operation's work reads and writes only what the schedule declares for it, plus values that live on
the compute lane from one computation to the next (hidden states, checkpoints, sums of gradients).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine.layers.decoder import Decoder, Recording, tensors
from engine.layers.head import loss_and_gradients, summed_cross_entropy
from engine.store import HostStore
from engine.layout import BLOCK_ALIGNMENT
from engine.device import DeviceMemory
from engine.layers.offload import Offloaded, copy_in_pieces, storages
from engine.adamw import AdamW, BlockState, clip_scale, norm_of
from engine.pipeline import Pipeline
from engine.recipe import Batch, NonFiniteLossError
from engine.step import Op, build
from engine.slots import Gradients, gradients
from engine.lanes import Lanes, Ticket
from engine.timeline import label_of

PIECE = 1 << 26
"""Bytes of one copy of activations: small beside a layer's load, which must find its turn between two of them."""


@dataclass(kw_only=True)
class _Step:
    """The values of one step that pass between computations on the compute lane."""

    index: int
    batch: Batch
    num_tokens: int
    loss: torch.Tensor
    recordings: list[Recording] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    saved: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Layer (counted from 1) -> its input, one a micro-batch."""
    graphs: dict[int, list[Any]] = field(default_factory=dict)
    """Layer whose activations are kept -> (input, output) with the graph between them, one a micro-batch."""
    offloaded: dict[int, Offloaded] = field(default_factory=dict)
    """Layer whose activations wait on the host -> what tells them apart."""
    grads: list[torch.Tensor] = field(default_factory=list)


class Executor:
    """Handlers for each kind of operation, and the tickets that connect one step to the next."""

    def __init__(
        self,
        pipeline: Pipeline,
        decoder: Decoder,
        store: HostStore,
        optimizer: AdamW,
        lanes: Lanes,
        *,
        device: torch.device,
        loss_chunk: int,
        micro_batch: tuple[int, int, int],
        compiled: bool = False,
    ) -> None:
        """micro_batch: (number of them, rows, seq_len). compiled: run layers and loss through torch.compile."""
        self.pipeline, self.decoder, self.store, self.optimizer, self.lanes = pipeline, decoder, store, optimizer, lanes
        self.device, self.loss_chunk = device, loss_chunk
        self._summed = torch.compile(summed_cross_entropy, dynamic=False) if compiled else summed_cross_entropy
        for template in set(decoder.templates) if compiled else ():
            template.compile()
        self.ops = build(pipeline)
        self.counters = dict.fromkeys(("h2d_bytes", "d2h_bytes", "recompute_flops", "optimizer_s"), 0.0)
        self._labels = [label_of(op) for op in self.ops]
        self._tickets: tuple[list[Ticket], list[Ticket]] = ([], [])
        self.memory = DeviceMemory(pipeline, store, device=device, loss_chunk=loss_chunk, micro_batch=micro_batch)
        self.decoder.bind(device, self.memory.outer_weights)
        self._outer_parameters = decoder.outer_parameters()
        self._num_embed = len(store.spec.layouts[0].fields)
        self._late: dict[int, tuple[int, float]] = {}
        self._trained: dict[int, tuple[bool, ...]] = {}
        """Block -> which of its parameters get a gradient; torch's optimizers leave the others alone."""
        self._parts: dict[int, list[tuple[BlockState, slice]]] = {}
        """Block -> what an update takes: its state in stretches, one where all is trained, and where each lies."""
        self._hyper = torch.empty(0)  # of the step, for updates on the device; _decide makes it

    def run(self, batch: Batch, step: int) -> torch.Tensor:
        """Enqueue one step; the loss, fp32, 0-dim, on the device's current stream."""
        if len(self._tickets[1]) < len(self.ops):  # the first step, or after one that raised: tickets are missing
            self.lanes.drain()
            self._tickets = ([], [])
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        state = _Step(index=step, batch=batch, num_tokens=batch.num_tokens, loss=loss)
        current: list[Ticket] = []
        self._tickets = (self._tickets[1], current)
        for op, label in zip(self.ops, self._labels, strict=True):
            waits = [self._tickets[offset + 1][index] for offset, index in op.waits if offset == 0 or self._tickets[0]]
            handler = getattr(self, f"_{op.phase or op.kind}")
            current.append(self.lanes.submit(op.lane, partial(handler, op, state), waits, signals=op.signals, label=label))
        return loss

    # Device lanes: transfers.

    def _load(self, op: Op, _: _Step) -> None:
        source = self.store.states[op.block].weight
        self.memory.home(op)[: source.numel()].copy_(source, non_blocking=True)
        self.counters["h2d_bytes"] += source.nbytes

    def _store(self, op: Op, _: _Step) -> None:
        source = self.memory.slab(op)
        self.store.slabs[op.host_slab][: source.numel()].copy_(source, non_blocking=True)
        self.counters["d2h_bytes"] += source.nbytes

    def _evict(self, op: Op, s: _Step) -> None:
        for source, target in s.offloaded[op.block].copies(self.store.activations[op.block]):
            target.copy_(source, non_blocking=True)
        self.counters["d2h_bytes"] += s.offloaded[op.block].num_bytes

    def _drop(self, op: Op, s: _Step) -> None:
        s.offloaded[op.block].drop()

    def _stage(self, op: Op, s: _Step) -> None:
        s.offloaded[op.block].stage()

    def _fetch(self, op: Op, s: _Step) -> None:
        for target, source in s.offloaded[op.block].copies(self.store.activations[op.block]):
            copy_in_pieces(target, source, PIECE)
        self.counters["h2d_bytes"] += s.offloaded[op.block].num_bytes

    def _free(self, op: Op, _: _Step) -> None:
        if self.pipeline.poison:
            self.memory.slots.poison(op.slot)

    # Compute lane.

    @torch.no_grad()
    def _embed(self, _: Op, s: _Step) -> None:
        for sums in self.memory.outer_gradients.values():  # a step that raised leaves its part of the sums
            sums.clear()
        masks = s.batch.attention_mask
        for m in range(s.batch.num_micro_batches):
            mask = None if masks is None else self._to_device(masks[m])
            with torch.enable_grad():
                recording = self.decoder.record(self._to_device(s.batch.tokens[m]), mask)
            s.recordings.append(recording)
            s.hidden.append(recording.hidden.detach())

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # from torch's cache of pinned blocks, which are reused only after their copies
        return tensor.to(self.device, non_blocking=True)

    @torch.no_grad()
    def _forward(self, op: Op, s: _Step) -> None:
        if (op.block - 1) % self.pipeline.checkpoint_interval == 0:
            s.saved[op.block] = list(s.hidden)
        s.hidden = self._layer(op, s, s.hidden)

    @torch.no_grad()
    def _forward_kept(self, op: Op, s: _Step) -> None:
        weights, layer = self.memory.weights(op), op.block - 1
        template = self.decoder.templates[layer]
        graphs = [template.forward_kept(weights, x, r.calls[layer], layer) for x, r in zip(s.hidden, s.recordings, strict=True)]
        s.graphs[op.block] = graphs
        s.hidden = [output.detach() for _, output in graphs]

    @torch.no_grad()
    def _forward_offloaded(self, op: Op, s: _Step) -> None:
        weights, layer = self.memory.weights(op), op.block - 1
        template, calls = self.decoder.templates[layer], [r.calls[layer] for r in s.recordings]
        given = (value for call in calls for value in tensors((call.args, call.kwargs)))
        shared = storages([*s.hidden, *given, *template.module.buffers()])
        s.offloaded[op.block] = kept = Offloaded(
            weights=weights, home=self.memory.home(op), shared=shared, capacity=self.store.activations[op.block].numel()
        )
        with kept.hooks():
            kept.graphs = [template.forward_kept(weights, x, call, layer) for x, call in zip(s.hidden, calls, strict=True)]
        s.hidden = [output.detach() for _, output in kept.graphs]

    @torch.no_grad()
    def _recompute(self, op: Op, s: _Step) -> None:
        s.saved[op.block + 1] = self._layer(op, s, s.saved[op.block])
        self.counters["recompute_flops"] += 2 * self.memory.layout(op).num_params * s.batch.tokens.numel()

    def _layer(self, op: Op, s: _Step, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        weights, layer = self.memory.weights(op), op.block - 1
        template = self.decoder.templates[layer]
        return [template.forward(weights, x, r.calls[layer], layer) for x, r in zip(inputs, s.recordings, strict=True)]

    @torch.no_grad()
    def _tail(self, op: Op, s: _Step) -> None:
        parameters = list(self._outer_parameters.values())
        for m, hidden in enumerate(s.hidden):
            loss, grad = loss_and_gradients(
                self.decoder,
                hidden,
                self._to_device(s.batch.labels[m]),
                num_tokens=s.num_tokens,
                chunk=self.loss_chunk,
                parameters=parameters,
                add=self._add_outer,
                summed=self._summed,
            )
            s.loss.add_(loss)
            s.grads.append(grad)
        s.hidden.clear()
        self._finish(op, self.memory.outer_gradients[op.block])
        if not self.pipeline.clip:
            self._decide(s, norm=torch.zeros_like(s.loss), scale=torch.ones_like(s.loss))

    def _add_outer(self, grads: Sequence[torch.Tensor | None]) -> None:
        self.memory.outer_gradients[0].add(grads[: self._num_embed])
        self.memory.outer_gradients[self.pipeline.head].add(grads[self._num_embed :])

    def _backward_kept(self, op: Op, s: _Step) -> None:
        self._differentiate(op, s, self.memory.weights(op), s.graphs.pop(op.block))

    def _backward_offloaded(self, op: Op, s: _Step) -> None:
        kept = s.offloaded.pop(op.block)
        kept.home = self.memory.home(op)
        self._differentiate(op, s, kept.weights, kept.graphs)

    @torch.no_grad()
    def _differentiate(self, op: Op, s: _Step, weights: Mapping[str, torch.Tensor], graphs: list[Any]) -> None:
        """Backward of a layer whose graphs are there; each goes as soon as it was used."""
        template, sums = self.decoder.templates[op.block - 1], self.memory.gradients(op)
        for m in range(len(s.recordings)):
            hidden, output = graphs[m]
            s.grads[m], grads = template.differentiate(weights, hidden, output, s.grads[m])
            sums.add(grads)
            del hidden, output
            graphs[m] = ()
        self._finish(op, sums)
        self.counters["recompute_flops"] += 2 * template.num_rebuilt(kept=True) * s.batch.tokens.numel()

    @torch.no_grad()
    def _backward(self, op: Op, s: _Step) -> None:
        layout, layer = self.memory.layout(op), op.block - 1
        weights, template = self.memory.weights(op), self.decoder.templates[layer]
        sums = self.memory.gradients(op)
        inputs = s.saved.pop(op.block)
        for m, recording in enumerate(s.recordings):
            s.grads[m], grads = template.backward(weights, inputs[m], recording.calls[layer], layer, s.grads[m])
            sums.add(grads)
        self._finish(op, sums)
        self.counters["recompute_flops"] += 2 * (layout.num_params + template.num_rebuilt(kept=False)) * s.batch.tokens.numel()

    @torch.no_grad()
    def _embed_backward(self, op: Op, s: _Step) -> None:
        parameters = list(self._outer_parameters.values())
        for recording, grad in zip(s.recordings, s.grads, strict=True):
            if not recording.hidden.requires_grad:  # all that comes before the layers is frozen
                break
            grads = gradients(recording.hidden, parameters, grad)
            late = [
                n
                for n, g in zip(list(self._outer_parameters)[self._num_embed :], grads[self._num_embed :], strict=True)
                if g is not None
            ]
            assert not late, f"{late} are used before the layers but registered after them"
            self.memory.outer_gradients[0].add(grads[: self._num_embed])
        self._finish(op, self.memory.outer_gradients[0])
        s.recordings.clear()
        s.grads.clear()

    def _finish(self, op: Op, sums: Gradients) -> None:
        self._note(op, sums.reached)
        flat = sums.finish()
        if self.pipeline.clip:
            self.memory.norms[op.block] = norm_of([flat.view(-1, BLOCK_ALIGNMENT)])

    def _note(self, op: Op, reached: tuple[bool, ...]) -> None:
        """Remember, at a block's first backward, what of it is to be updated."""
        if op.block not in self._trained:
            stretches, state = self.memory.layout(op).stretches(reached), self.store.states[op.block]
            self._parts[op.block] = [(state.part(stretch), stretch) for stretch in stretches]
            self._trained[op.block] = reached
        if self._trained[op.block] != reached:
            pairs = zip(self.memory.layout(op).fields, reached, self._trained[op.block], strict=True)
            name = next(f.name for f, now, first in pairs if now != first)
            raise ValueError(
                f"model: {self.decoder.full_name(op.block, name)} gets a gradient in some steps only, allowed are "
                "parameters that get one in all or in none; choose another model"
            )

    @torch.no_grad()
    def _clip(self, _: Op, s: _Step) -> None:
        norm = norm_of([self.memory.norms])
        self._decide(s, norm=norm, scale=clip_scale(norm, self.optimizer.recipe.clip_norm))

    def _decide(self, s: _Step, *, norm: torch.Tensor, scale: torch.Tensor) -> None:
        """One verdict for updates on both sides: the gradients' scale, not finite where the loss or the norm is not."""
        scale = scale + 0.0 * s.loss
        self.memory.verdict.copy_(torch.stack((s.loss, norm, scale)), non_blocking=True)
        if self.pipeline.device_blocks:
            self.memory.scale.copy_(scale)
            self._hyper = self._to_device(self.optimizer.hyper_tensor(s.index))

    @torch.no_grad()
    def _device_step(self, op: Op, _: _Step) -> None:
        slab = self.memory.slab(op)
        for state, part in self._parts[op.block]:
            self.optimizer.device_step(state, slab[part], hyper=self._hyper, scale=self.memory.scale)

    # CPU lane.

    def _keep(self, op: Op, _: _Step) -> None:
        home = self.store.kept[op.block]
        home.copy_(self.store.slabs[op.host_slab][: home.numel()])

    def _check(self, _: Op, s: _Step) -> None:
        loss, norm, scale = self.memory.verdict.tolist()
        if not math.isfinite(scale):
            if self.pipeline.clip:
                raise NonFiniteLossError(f"step {s.index}: loss {loss}, gradient norm {norm}; no optimizer step was taken")
            raise NonFiniteLossError(
                f"step {s.index}: loss {loss}; no optimizer step was taken this time, but recipe.clip_norm=0 looks at no gradient: "
                "an earlier step may have applied one that was not finite; resume a checkpoint, or set recipe.clip_norm"
            )

    def _step(self, op: Op, s: _Step) -> None:
        gradient = self.store.kept[op.block] if op.host_slab < 0 else self.store.slabs[op.host_slab]
        started, scale = time.perf_counter(), float(self.memory.verdict[2])
        update = self.optimizer.step_weights if self.pipeline.two_passes else self.optimizer.step
        for state, part in self._parts[op.block]:
            update(state, gradient[part], step=s.index, scale=scale)
        if self.pipeline.two_passes:
            self._late[op.block] = (s.index, scale)
        self.counters["optimizer_s"] += time.perf_counter() - started

    def _moments(self, op: Op, _: _Step) -> None:
        self._update_moments(op.block)

    def _update_moments(self, block: int) -> None:
        if block not in self._late:  # the first step, or one after a checkpoint
            return
        started, (step, scale) = time.perf_counter(), self._late.pop(block)
        for state, part in self._parts[block]:
            self.optimizer.step_moments(state, self.store.slabs[block][part], step=step, scale=scale)
        self.counters["optimizer_s"] += time.perf_counter() - started

    def finish_moments(self) -> None:
        """Update the moments that wait for the next step; every lane must be idle."""
        for block in list(self._late):
            self._update_moments(block)
