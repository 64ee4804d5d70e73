"""Runs a step: hands the work of each operation to its lane. The step alone says what waits for
what.

Invariant: an operation's work reads and writes only what the step declares for it, plus values that
live on the compute lane from one computation to the next (hidden states, checkpoints, sums of
gradients).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from engine.adamw import AdamW, Pass, clip_scale, norm_of
from engine.blocks import Blocks, Fate
from engine.device import DeviceMemory, Gradients
from engine.lanes import Lanes, Ticket
from engine.layers.attention import Results
from engine.layers.autograd import gradients
from engine.layers.decoder import Decoder, tensors
from engine.layers.head import loss_alone, loss_and_gradients, summed_cross_entropy
from engine.layers.offload import Offloaded, storages
from engine.layout import BLOCK_ALIGNMENT, Layout, within
from engine.master import BlockState
from engine.recipe import Batch, NonFiniteLossError
from engine.sizes import Work
from engine.step import Kind, Op, operations
from engine.store import Store
from engine.values import StepState

Handler = Callable[[Op, StepState], None]


class Executor:
    """One handler for each kind of operation, and the tickets that connect one step to the next."""

    def __init__(
        self,
        blocks: Blocks,
        work: Work,
        decoder: Decoder,
        store: Store,
        optimizer: AdamW,
        lanes: Lanes,
        device: torch.device,
        before: Callable[[int], None],
    ) -> None:
        """before: called with a block before its state changes, on the lane that changes it; late
        moments follow an update that was."""
        self._before, self._ranks = before, store.ranks
        self.blocks, self.work, self.decoder = blocks, work, decoder
        self.store, self.optimizer, self.lanes, self.device = store, optimizer, lanes, device
        self._summed = summed_cross_entropy
        if work.compiled:
            self._summed = torch.compile(summed_cross_entropy, dynamic=False)
            for template in set(decoder.templates):
                template.compile()
        self.ops, self.evaluation = operations(blocks), operations(blocks, trains=False)
        self.gradient_norm: torch.Tensor | None = None
        """Of the last step that was enqueued, before clipping; None where nothing is clipped."""
        names: tuple[str, ...] = ("h2d_bytes", "d2h_bytes", "recompute_flops", "optimizer_s")
        names += ("disk_read_bytes", "disk_written_bytes") if blocks.disk_blocks else ()
        self.counters = dict.fromkeys(names, 0.0)
        self._tickets: tuple[list[Ticket], list[Ticket]] = ([], [])
        self.memory = DeviceMemory(blocks, work, store, device)
        self.decoder.bind(device, self.memory.outer_weights)
        self._outer_parameters = decoder.outer_parameters()
        self._num_embed = len(work.layouts[0].fields)
        self._late: dict[int, tuple[int, float]] = {}
        """Block whose moments wait -> (step, scale) of its update."""
        self._reached: dict[int, tuple[bool, ...]] = {}
        """Block -> which of its parameters get a gradient here."""
        self._trained: dict[int, tuple[bool, ...]] = {}
        """Block -> which of them do on some rank; torch's optimizers leave the others alone."""
        self._parts: dict[int, list[tuple[BlockState, slice, bool]]] = {}
        """Block -> what an update takes: its state in stretches, one where all is trained alike,
        where each lies, and whether it decays."""
        self._hyper: dict[bool, torch.Tensor] = {}
        """Of the step, for updates on the device, with decay and without; _decide makes it."""
        self.handlers = self._handlers()

    def _handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.LOAD: self._load,
            Kind.GATHER: self._gather,
            Kind.SCATTER: self._scatter,
            Kind.STORE: self._store,
            Kind.EVICT: self._evict,
            Kind.DROP: self._drop,
            Kind.STAGE: self._stage,
            Kind.FETCH: self._fetch,
            Kind.EMBED: self._embed,
            Kind.FORWARD: self._forward,
            Kind.TAIL: self._tail,
            Kind.EVALUATE: self._evaluate,
            Kind.LOSS: self._loss,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.EMBED_BACKWARD: self._embed_backward,
            Kind.CLIP: self._clip,
            Kind.UPDATE_HERE: self._update_here,
            Kind.PARK: self._park,
            Kind.CHECK: self._check,
            Kind.UPDATE: self._update,
            Kind.MOMENTS: self._moments,
            Kind.READ_STATE: self._read_state,
            Kind.WRITE_STATE: self._write_state,
        }

    def run(self, batch: Batch, step: int) -> torch.Tensor:
        """Enqueue one step; the loss, fp32, 0-dim, on the device's current stream."""
        if len(self._tickets[1]) < len(self.ops):  # the first step, or after one that raised
            self.lanes.drain()
            self._tickets = ([], [])
        self.store.settle()
        state = self._begin(batch, step)
        self.gradient_norm = state.norm if self.blocks.clip else None
        before, now = self._tickets[1], list[Ticket]()
        self._tickets = (before, now)
        self._enqueue(self.ops, state, before, now)
        return state.loss

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Enqueue the forward alone; the loss. Every lane must be idle, and be so again before the
        next step."""
        state = self._begin(batch, -1)
        self._enqueue(self.evaluation, state, [], [])
        return state.loss

    def _begin(self, batch: Batch, index: int) -> StepState:
        loss, norm = (torch.zeros((), dtype=torch.float32, device=self.device) for _ in range(2))
        mine = batch.rows(self._ranks.part(batch.tokens.shape[1]))
        return StepState(index=index, batch=mine, num_tokens=batch.num_tokens, loss=loss, norm=norm)

    def _enqueue(
        self, ops: Sequence[Op], state: StepState, before: list[Ticket], now: list[Ticket]
    ) -> None:
        for op in ops:
            waits = [
                (before if offset else now)[i] for offset, i in op.waits if before or not offset
            ]
            now.append(self.lanes.submit(op, partial(self._do, op, state), waits))

    @torch.no_grad()
    def _do(self, op: Op, state: StepState) -> None:
        self.handlers[op.kind](op, state)

    # Device lanes: transfers.

    def _load(self, op: Op, _: StepState) -> None:
        source = self.store.states[op.block].weight
        self.memory.mine(op, self.memory.home(op)).copy_(source, non_blocking=True)
        self.counters["h2d_bytes"] += source.nbytes

    def _gather(self, op: Op, _: StepState) -> None:
        self.memory.gather(op)

    def _scatter(self, op: Op, _: StepState) -> None:
        part = self.memory.scatter(op)
        if self.blocks.clip:
            self.memory.norms[op.block] = norm_of([part.view(-1, BLOCK_ALIGNMENT)])
        if op.block not in self._trained:  # once: this thread waits for the other ranks
            here = torch.tensor([1, *self._reached[op.block]], dtype=torch.uint8)
            somewhere = self._ranks.stacked(here.to(self.device)).amax(0).tolist()
            self._trained[op.block] = tuple(map(bool, somewhere[1:]))

    def _store(self, op: Op, _: StepState) -> None:
        source = self.memory.mine(op, self.memory.slab(op))
        self.store.slabs[op.host_slab][: source.numel()].copy_(source, non_blocking=True)
        self.counters["d2h_bytes"] += source.nbytes

    def _evict(self, op: Op, s: StepState) -> None:
        for source, target in s.offloaded[op.block].copies(self.store.activations[op.block]):
            target.copy_(source, non_blocking=True)
        self.counters["d2h_bytes"] += s.offloaded[op.block].num_bytes

    def _drop(self, op: Op, s: StepState) -> None:
        s.offloaded[op.block].drop()

    def _stage(self, op: Op, s: StepState) -> None:
        s.offloaded[op.block].stage()

    def _fetch(self, op: Op, s: StepState) -> None:
        slab = self.store.activations[op.block]
        for target, source in s.offloaded[op.block].copies(slab, *op.part):
            target.copy_(source, non_blocking=True)
            self.counters["h2d_bytes"] += source.nbytes

    # Compute lane: forward.

    def _embed(self, _: Op, s: StepState) -> None:
        if self.memory.tied_gradients is not None:
            self.memory.tied_gradients.clear()  # a step that raised leaves its part
        masks, positions = s.batch.attention_mask, s.batch.position_ids
        for m in range(s.batch.num_micro_batches):
            mask = None if masks is None else self._to_device(masks[m])
            places = None if positions is None else self._to_device(positions[m])
            with torch.enable_grad():
                recording = self.decoder.record(self._to_device(s.batch.tokens[m]), mask, places)
            s.recordings.append(recording)
            s.hidden.append(recording.hidden.detach())

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # torch reuses a pinned block only after its copies
        return tensor.to(self.device, non_blocking=True)

    def _forward(self, op: Op, s: StepState) -> None:
        if op.fate is Fate.RECOMPUTED:
            if (op.block - 1) % self.blocks.checkpoint_interval == 0:
                s.saved[op.block] = list(s.hidden)
            with self._attention(op, s):
                s.hidden = self._run_layer(op, s, s.hidden, graph=False)
            return
        if op.fate is Fate.KEPT and op.slot < 0:
            graphs = self._run_layer(op, s, s.hidden, graph=True)
        else:
            waiting = s.rebound if op.fate is Fate.KEPT else s.offloaded
            waiting[op.block] = self._offloaded(op, s)
            with waiting[op.block].hooks():
                graphs = self._run_layer(op, s, s.hidden, graph=True)
        s.graphs[op.block] = graphs
        s.hidden = [output.detach() for _, output in graphs]

    def _run_layer(
        self, op: Op, s: StepState, inputs: list[torch.Tensor], *, graph: bool
    ) -> list[Any]:
        """The layer's outputs or, with `graph`, (input, output) with the graph between them."""
        weights, layer = self.memory.weights(op), op.block - 1
        template, pairs = self.decoder.templates[layer], zip(inputs, s.recordings, strict=True)
        run = template.forward_with_graph if graph else template.forward
        return [run(weights, x, r.calls[layer], layer) for x, r in pairs]

    def _offloaded(self, op: Op, s: StepState) -> Offloaded:
        """Takes what the layer's graph saves, but for what outlives the layer anyway; of a kept
        layer the weights alone."""
        template = self.decoder.templates[op.block - 1]
        calls = [recording.calls[op.block - 1] for recording in s.recordings]
        given = (value for call in calls for value in tensors((call.args, call.kwargs)))
        return Offloaded(
            weights=self.memory.weights(op),
            home=self.memory.home(op),
            shared=storages([*s.hidden, *given, *template.module.buffers()]),
            capacity=0 if op.fate is Fate.KEPT else self.store.activations[op.block].numel(),
        )

    def _attention(self, op: Op, s: StepState) -> AbstractContextManager[None]:
        """Around a layer that is recomputed: its forward keeps what attention gives, where there is
        room, here or on the host, and its recomputations are given that. Not where one of them is
        the first of its kind, which may run twice."""
        if op.kind is Kind.FORWARD:
            if op.block in self.blocks.attention_moved:
                room = self.store.activations[op.block].numel()
                found = Offloaded(
                    weights={}, home=self.memory.home(op), shared=set(), capacity=room
                )
                s.offloaded[op.block] = found
            once = self.decoder.templates[op.block - 1].runs_once
            if not once or op.block not in self.blocks.attention_kept:
                return nullcontext()
            s.attention[op.block] = Results(s.offloaded.get(op.block))
            return s.attention[op.block].kept()
        last = op.kind is Kind.BACKWARD
        if last:
            s.offloaded.pop(op.block, None)
        if op.block not in s.attention:
            return nullcontext()
        results = s.attention.pop(op.block) if last else s.attention[op.block]
        return results.given(last=last)

    def _recompute(self, op: Op, s: StepState) -> None:
        with self._attention(op, s):
            s.saved[op.block + 1] = self._run_layer(op, s, s.saved[op.block], graph=False)
        self._count_recomputed(s, self.memory.layout(op).num_params)

    def _count_recomputed(self, s: StepState, num_params: int) -> None:
        self.counters["recompute_flops"] += 2 * num_params * s.batch.tokens.numel()

    def _tail(self, op: Op, s: StepState) -> None:
        embed, head = self.memory.tied_gradients, self.memory.gradients(op)

        def add(grads: Sequence[torch.Tensor | None]) -> None:
            if embed is not None:
                embed.add(grads[: self._num_embed])
            head.add(grads[self._num_embed :])

        for m, hidden in enumerate(s.hidden):
            loss, grad = loss_and_gradients(
                self.decoder,
                hidden,
                self._to_device(s.batch.labels[m]),
                num_tokens=s.num_tokens,
                chunk=self.work.loss_chunk,
                parameters=list(self._outer_parameters.values()),
                add=add,
                summed=self._summed,
            )
            s.loss.add_(loss)
            s.grads.append(grad)
        s.hidden.clear()
        self._finish(op, head)

    def _evaluate(self, op: Op, s: StepState) -> None:
        s.hidden = self._run_layer(op, s, s.hidden, graph=False)

    def _loss(self, _: Op, s: StepState) -> None:
        given = {"num_tokens": s.num_tokens, "chunk": self.work.loss_chunk}
        for hidden, labels in zip(s.hidden, s.batch.labels, strict=True):
            here = self._to_device(labels)
            s.loss.add_(loss_alone(self.decoder, hidden, here, summed=self._summed, **given))
        s.loss.copy_(self._ranks.stacked(s.loss[None]).sum())

    # Compute lane: backward.

    def _backward(self, op: Op, s: StepState) -> None:
        if op.fate is Fate.RECOMPUTED:
            self._recompute_and_differentiate(op, s)
        elif op.fate is Fate.KEPT and op.slot < 0:
            self._differentiate(op, s, self.memory.weights(op))
        else:
            moved = (s.rebound if op.fate is Fate.KEPT else s.offloaded).pop(op.block)
            moved.home = self.memory.home(op)
            self._differentiate(op, s, moved.weights)

    def _differentiate(self, op: Op, s: StepState, weights: Mapping[str, torch.Tensor]) -> None:
        """Backward of a layer whose graphs are there; each goes as soon as it was used."""
        template, sums = self.decoder.templates[op.block - 1], self.memory.gradients(op)
        graphs = s.graphs.pop(op.block)
        for m in range(len(s.recordings)):
            hidden, output = graphs[m]
            s.grads[m], grads = template.differentiate(weights, hidden, output, s.grads[m])
            sums.add(grads)
            del hidden, output
            graphs[m] = ()
        self._finish(op, sums)
        self._count_recomputed(s, template.num_rebuilt(kept=True))

    def _recompute_and_differentiate(self, op: Op, s: StepState) -> None:
        weights, layer, sums = self.memory.weights(op), op.block - 1, self.memory.gradients(op)
        template, inputs = self.decoder.templates[layer], s.saved.pop(op.block)
        with self._attention(op, s):
            for m, recording in enumerate(s.recordings):
                call = recording.calls[layer]
                s.grads[m], grads = template.backward(weights, inputs[m], call, layer, s.grads[m])
                sums.add(grads)
        self._finish(op, sums)
        rebuilt = template.num_rebuilt(kept=False)
        self._count_recomputed(s, self.memory.layout(op).num_params + rebuilt)

    def _embed_backward(self, op: Op, s: StepState) -> None:
        names, parameters = list(self._outer_parameters), list(self._outer_parameters.values())
        sums = self.memory.gradients(op)
        for recording, grad in zip(s.recordings, s.grads, strict=True):
            if not recording.hidden.requires_grad:  # all that comes before the layers is frozen
                break
            grads = gradients(recording.hidden, parameters, grad)
            sums.add(grads[: self._num_embed])
            late = range(self._num_embed, len(grads))
            found = [names[i] for i in late if grads[i] is not None]
            assert not found, f"{found} are used before the layers but registered after them"
        self._finish(op, sums)
        s.recordings.clear()
        s.grads.clear()

    def _finish(self, op: Op, sums: Gradients) -> None:
        self._note(op, sums.reached)
        flat = sums.finish()
        if self._ranks.count > 1:
            return  # the norm is of the sum, and `_scatter`'s
        self._trained[op.block] = self._reached[op.block]
        if self.blocks.clip:
            self.memory.norms[op.block] = norm_of([flat.view(-1, BLOCK_ALIGNMENT)])

    def _note(self, op: Op, reached: tuple[bool, ...]) -> None:
        """Remember, at a block's first backward, what of it gets a gradient."""
        first = self._reached.setdefault(op.block, reached)
        if first != reached:
            triples = zip(self.memory.layout(op).fields, reached, first, strict=True)
            name = next(f.name for f, now, before in triples if now != before)
            raise ValueError(
                f"model: {self.decoder.full_name(op.block, name)} gets a gradient in some steps "
                "only, allowed are parameters that get one in all or in none; choose another model"
            )

    def _updated(self, block: int) -> list[tuple[BlockState, slice, bool]]:
        """What an update takes of this rank's part."""
        if block not in self._parts:
            layout, state = self.work.layouts[block], self.store.states[block]
            found = self._stretches(layout, self._trained[block], self.store.part(block))
            self._parts[block] = [(state.part(mine), mine, decays) for mine, decays in found]
        return self._parts[block]

    def _stretches(
        self, layout: Layout, reached: tuple[bool, ...], part: slice
    ) -> list[tuple[slice, bool]]:
        """What of a part of the block is trained, counted from its start, and whether it decays."""
        decayed = [self.optimizer.recipe.decays(len(field.shape)) for field in layout.fields]
        found = [
            (within(stretch, part), decays)
            for decays in (True, False)
            for stretch in layout.stretches(
                [r and d is decays for r, d in zip(reached, decayed, strict=True)]
            )
        ]
        return [(mine, decays) for mine, decays in found if mine.start < mine.stop]

    # Clipping and updates.

    def _clip(self, _: Op, s: StepState) -> None:
        """One verdict for updates on both sides and on every rank: the gradients' scale, not finite
        where the loss or the norm is not."""
        of_all = self._ranks.stacked(torch.cat((s.loss[None], self.memory.norms)))
        s.loss.copy_(of_all[:, 0].sum())
        scale = torch.ones_like(s.loss)
        if self.blocks.clip:
            s.norm.copy_(norm_of([of_all[:, 1:].flatten()]))
            scale = clip_scale(s.norm, self.optimizer.recipe.clip_norm)
        norm, scale = s.norm, scale + 0.0 * s.loss
        self.memory.verdict.copy_(torch.stack((s.loss, norm, scale)), non_blocking=True)
        if self.blocks.device_optimizer:
            self.memory.scale.copy_(scale)
            for decays in {True, self.optimizer.recipe.decays(1)}:
                hyper = self.optimizer.hyper_tensor(s.index, decays=decays)
                self._hyper[decays] = self._to_device(hyper)

    def _update_here(self, op: Op, _: StepState) -> None:
        gradient = self.memory.mine(op, self.memory.slab(op))
        self._before(op.block)
        for state, part, decays in self._updated(op.block):
            self.optimizer.device_step(
                state, gradient[part], hyper=self._hyper[decays], scale=self.memory.scale
            )

    def _check(self, _: Op, s: StepState) -> None:
        loss, norm, scale = self.memory.verdict.tolist()
        if math.isfinite(scale):
            return
        if self.blocks.clip:
            raise NonFiniteLossError(
                f"step {s.index}: loss {loss}, gradient norm {norm}; no optimizer step was taken"
            )
        raise NonFiniteLossError(
            f"step {s.index}: loss {loss}; no optimizer step was taken this time, but "
            "recipe.clip_norm=0 looks at no gradient: an earlier step may have applied one that "
            "was not finite; resume a checkpoint, or set recipe.clip_norm"
        )

    def _park(self, op: Op, _: StepState) -> None:
        target = self.store.parked[op.block]
        target.copy_(self.store.slabs[op.host_slab][: target.numel()])

    def _update(self, op: Op, s: StepState) -> None:
        started, scale = time.perf_counter(), float(self.memory.verdict[2])
        taken = Pass.WEIGHTS if self.blocks.late(op.block) else Pass.BOTH
        gradient = (
            self.store.parked[op.block] if op.host_slab < 0 else self.store.slabs[op.host_slab]
        )
        self._before(op.block)
        for state, part, decays in self._updated(op.block):
            g = gradient[part]
            self.optimizer.step(state, g, step=s.index, scale=scale, taken=taken, decays=decays)
        if taken is Pass.WEIGHTS:
            self._late[op.block] = (s.index, scale)
        self.counters["optimizer_s"] += time.perf_counter() - started

    def _read_state(self, op: Op, _: StepState) -> None:
        self.counters["disk_read_bytes"] += self.store.on_disk.read(op.block)

    def _write_state(self, op: Op, _: StepState) -> None:
        self.counters["disk_written_bytes"] += self.store.on_disk.write(op.block)

    def _moments(self, op: Op, _: StepState) -> None:
        self._update_moments(op.block)

    def _update_moments(self, block: int) -> None:
        if block not in self._late:  # the first step, or one after a checkpoint
            return
        started, (step, scale) = time.perf_counter(), self._late.pop(block)
        for state, part, _ in self._updated(block):
            gradient = self.store.slabs[block][part]
            self.optimizer.step(state, gradient, step=step, scale=scale, taken=Pass.MOMENTS)
        self.counters["optimizer_s"] += time.perf_counter() - started

    def finish_moments(self) -> None:
        """Update the moments that wait for the next step; every lane must be idle."""
        for block in list(self._late):
            self._update_moments(block)
