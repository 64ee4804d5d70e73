"""THE step: one optimizer step as an ordered list of operations on lanes.

`Step.operations` writes it down. Every operation says what it reads and what it writes, and
`engine.waits` derives from that what it waits for on other lanes. Invariant: no wait is missing and
none is redundant; tests prove both by a happens-before check of their own. Pure Python: `Blocks`
in, operations out.

    python -m engine 3 2 3 1     # layers, depth, streams, checkpoint interval: draw the step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any

from engine.blocks import STAGES, Blocks, Fate
from engine.pace import paced
from engine.waits import derive

COMPUTE, H2D, D2H, CPU = "compute", "h2d", "d2h", "cpu"
PEERS, READ, WRITE = "peers", "read", "write"
LANES = {
    1: {COMPUTE: COMPUTE, H2D: COMPUTE, D2H: COMPUTE, PEERS: COMPUTE, CPU: CPU},
    2: {COMPUTE: COMPUTE, H2D: "copy", D2H: "copy", PEERS: "copy", CPU: CPU},
    3: {COMPUTE: COMPUTE, H2D: H2D, D2H: D2H, PEERS: PEERS, CPU: CPU},
}
"""Number of CUDA streams -> the lane that each kind of work runs on; the CPU worker is always its
own."""
HOST_LANES = (CPU, READ, WRITE)
"""Each a thread of its own, whatever the number of streams."""
PARTS = 8
"""In which a layer's activations come back, between the loads of weights on the same lane."""


class Kind(Enum):
    """What an operation does. The value is its name on timelines, recorded and drawn."""

    EMBED = "compute embed"  # what comes before the layers
    FORWARD = "compute forward"
    TAIL = "compute tail"  # final norm, head and loss, forward and backward
    EVALUATE = "compute evaluate"  # a layer's forward that no backward follows
    LOSS = "compute loss"  # final norm, head and loss, forward alone
    RECOMPUTE = "compute recompute"  # a layer's forward again, for the input of the next
    BACKWARD = (
        "compute backward"  # where activations are recomputed, their forward with a graph too
    )
    EMBED_BACKWARD = "compute embed_backward"
    LOAD = "load"  # a block's weights to the device; of several ranks, each one's part
    GATHER = "gather"  # the other ranks' parts of the weights
    SCATTER = "scatter"  # the sum of all ranks' gradients, of each one's part
    STORE = "store"  # a block's gradients, or a rank's part of them, to the host
    PARK = "keep"  # gradients out of a shared host slab, which frees it
    EVICT = "evict"  # a layer's activations to the host
    DROP = "drop"  # their device memory given up
    STAGE = "stage"  # device memory for them again
    FETCH = "fetch"  # and back
    CLIP = "clip"  # the verdict: the loss, the global norm and the scale of all gradients
    CHECK = "check"  # the CPU looks at the loss and the norm: after a bad one it does nothing more
    UPDATE = "step"  # AdamW on a block, on the CPU; in two passes the weights alone
    UPDATE_HERE = "step device_step"  # AdamW on a block that lives on the device
    MOMENTS = "moments"  # the second pass of the step before
    READ_STATE = "read state"  # a block's optimizer state from disk
    WRITE_STATE = "write state"  # and back, once it was updated


GRADIENTS = (Kind.TAIL, Kind.BACKWARD, Kind.EMBED_BACKWARD)
"""Computations that leave a block's gradients behind."""
AGAIN = (Kind.RECOMPUTE, Kind.BACKWARD)
"""Computations that run a layer's forward again, where its activations are recomputed."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation on one lane."""

    kind: Kind
    block: int
    lane: str
    fate: Fate = Fate.RECOMPUTED
    """What becomes of the activations, in a layer's forward and backward."""
    slot: int = -1
    """Device weight slot (load, computations) of a layer without a home."""
    slab: int = -1
    """Device gradient slab (backward, store) of a layer."""
    host_slab: int = -1
    """Host gradient slab (store, park, update, moments)."""
    stage: int = -1
    """Buffer of state on disk (read, update, write)."""
    part: tuple[int, int] = (0, 1)
    """Which of how many parts of a layer's activations (fetch)."""
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    waits: tuple[tuple[int, int], ...] = ()
    """(step offset 0 or -1, index) of operations on other lanes that must have finished."""
    signals: bool = False
    """Some other lane waits for this operation."""

    @property
    def label(self) -> str:
        """How the operation is called on a timeline."""
        return f"{self.kind.value}{self.fate.value} {self.block}"


def operations(blocks: Blocks, *, trains: bool = True) -> tuple[Op, ...]:
    """A steady-state step in issue order; a first step ignores the waits on the step before.

    trains: false leaves the loss of a batch alone: embed, every layer's forward, the head's.
    """
    plain = list(Step(blocks, trains=trains).operations())
    waits = derive([(op.lane, op.reads, op.writes) for op in plain])
    awaited = {index for found in waits for _, index in found}
    found = zip(plain, waits, strict=True)
    return tuple(replace(op, waits=w, signals=i in awaited) for i, (op, w) in enumerate(found))


@dataclass(frozen=True)
class Visit:
    """One computation on one block, and the places that it is given."""

    number: int
    kind: Kind
    block: int
    fate: Fate
    loads: bool
    """Whether the block's weights must come to the device for it."""
    slot: int
    slab: int
    host_slab: int


class Step:
    """Writes a step down. Layers without memory of their own take slots and slabs in turn."""

    def __init__(self, blocks: Blocks, *, trains: bool = True) -> None:
        self.blocks, self.trains = blocks, trains
        self.lanes = LANES[blocks.streams]
        self.peers = ["peers"] if blocks.num_ranks > 1 else []
        """What every operation writes in which ranks talk: they must do so in one order on all."""
        self.visits = list(self._visits())
        self.host_slab = {v.block: v.host_slab for v in self.visits if v.kind in GRADIENTS}
        self.drops = blocks.drops() | blocks.attention_drops()
        self.last_evicted = max((*blocks.offloaded, *blocks.attention_moved), default=0)
        """The last block whose forward an eviction follows; 0 where there is none."""
        self.to_read = [b for b in self._update_order() if blocks.on_disk(b)] if trains else []
        """Blocks whose state must still come from disk, in the order of their updates."""
        self.fetches = self._fetches()
        # On a lane shared with stores, loads must be issued a whole buffer ahead, or each would
        # queue behind a store. Elsewhere one visit ahead is enough, and it keeps the issuing thread
        # from waiting for an update too early.
        self.ahead = max(1, blocks.depth - 1) if blocks.streams == 2 else 1

    def operations(self) -> Iterator[Op]:
        """THE step."""
        if self.trains:
            yield from self.read_first()  # state on disk, as much as there are buffers for
        for visit in self.visits:  # embed, forwards, tail, backwards, embed
            yield from self.drop(visit)  # activations that have left
            yield from self.fetch_first(visit)
            yield from self.load_first(visit)
            yield from self.attention_ahead(visit)  # of the next layer that is recomputed
            yield from self.compute(visit)
            yield from self.attention_given(visit)
            yield from self.evict(visit)  # its activations, to the host
            yield from self.late_moments(visit)  # of the step before, once nothing is evicted
            yield from self.load_ahead(visit)  # weights of the visits to come
            yield from self.fetch(visit)  # activations of a backward to come
            yield from self.store(visit)  # its gradients; without clipping its update too
        if not self.trains:
            return
        yield from self.clip()
        yield from self.updates()  # in the order in which the next forward needs them

    # The order of computations.

    def _visits(self) -> Iterator[Visit]:
        """Every computation in order, with the next slot and slabs of each ring."""
        b, slots, slabs, host_slabs = self.blocks, count(), count(), count()
        computations = self._computations() if self.trains else self._evaluation()
        for number, (kind, block, fate) in enumerate(computations):
            here = kind is Kind.EMBED_BACKWARD or b.on_device(block)
            stay = fate is Fate.KEPT and not b.reload_weights  # since the forward
            loads = not here and not (kind is Kind.BACKWARD and stay)
            passes = kind in GRADIENTS and not b.owns_gradients(block)
            slot = next(slots) % b.depth if loads and not b.owns_weights(block) else -1
            slab = next(slabs) % b.depth if passes else -1
            host_slab = self._host_slab(kind, block, host_slabs)
            yield Visit(number, kind, block, fate, loads, slot, slab, host_slab)

    def _computations(self) -> Iterator[tuple[Kind, int, Fate]]:
        b, interval = self.blocks, self.blocks.checkpoint_interval
        assert interval == 1 or not b.offload_activations, "offloaded activations need interval 1"
        yield Kind.EMBED, 0, Fate.RECOMPUTED
        for layer in b.layers:
            yield Kind.FORWARD, layer, b.fate(layer)
        yield Kind.TAIL, b.head, Fate.RECOMPUTED
        for layer in reversed(b.layers[b.num_streamed :]):
            yield Kind.BACKWARD, layer, Fate.KEPT
        for start in reversed(range(1, b.num_streamed + 1, interval)):
            group = range(start, min(start + interval, b.num_streamed + 1))
            for layer in group[:-1]:
                yield Kind.RECOMPUTE, layer, Fate.RECOMPUTED
            for layer in reversed(group):
                yield Kind.BACKWARD, layer, b.fate(layer)
        yield Kind.EMBED_BACKWARD, 0, Fate.RECOMPUTED

    def _evaluation(self) -> Iterator[tuple[Kind, int, Fate]]:
        yield Kind.EMBED, 0, Fate.RECOMPUTED
        for layer in self.blocks.layers:
            yield Kind.EVALUATE, layer, Fate.RECOMPUTED
        yield Kind.LOSS, self.blocks.head, Fate.RECOMPUTED

    def _host_slab(self, kind: Kind, block: int, turns: Iterator[int]) -> int:
        """The block's own, numbered as the block after the pool, or the pool's next."""
        b = self.blocks
        if kind not in GRADIENTS or b.on_device(block):
            return -1
        if b.shares_slab(block):
            return next(turns) % b.gradient_slabs
        return block + (b.gradient_slabs if b.pooled else 0)

    # Weights.

    def load_first(self, visit: Visit) -> Iterator[Op]:
        """The weights of the step's first visit."""
        if visit.number == 0:
            yield from self._load(visit)

    def load_ahead(self, visit: Visit) -> Iterator[Op]:
        """The weights of the visit that is `ahead` of this one; after the first, of all up to
        it."""
        start = 1 if visit.number == 0 else visit.number + self.ahead
        for coming in self.visits[start : visit.number + self.ahead + 1]:
            yield from self._load(coming)

    def _load(self, visit: Visit) -> Iterator[Op]:
        if visit.loads:
            reads = [f"host weights {visit.block}", *self._updates_done()]
            writes = [_weights(visit.block, visit.slot)]
            yield self._op(Kind.LOAD, visit.block, H2D, reads, writes, slot=visit.slot)
            yield from self._gather(visit.block, visit.slot)

    def _gather(self, block: int, slot: int) -> Iterator[Op]:
        """Whole weights where a rank's part of them has come."""
        if self.peers:
            here = _weights(block, slot)
            writes = [here, *self.peers]
            yield self._op(Kind.GATHER, block, PEERS, [here], writes, slot=slot)

    def _updates_done(self) -> list[str]:
        """What a step's first operations read, and updates write, where it must not begin before
        every update of the last one is done."""
        return [] if self.blocks.optimizer_overlap else ["updates"]

    # Computations.

    def compute(self, visit: Visit) -> Iterator[Op]:
        """The visit's computation. Without clipping the loss alone decides about the updates."""
        kind, block, places = visit.kind, visit.block, {"slot": visit.slot, "slab": visit.slab}
        reads, writes = [_weights(block, visit.slot)], list[str]()
        if kind is Kind.EMBED:
            reads += self._updates_done()
        elif kind in (Kind.TAIL, Kind.LOSS):
            reads.append("device weights 0")  # tied embeddings, whose gradient begins here
        if kind is Kind.LOSS:
            writes += self.peers  # it is that of all ranks
        elif kind is Kind.TAIL:
            writes += ["device gradients 0", f"device gradients {block}"]
        elif kind in GRADIENTS:
            writes.append(_gradients(block, visit.slab))
        if visit.fate is Fate.OFFLOADED:
            # In the backward too: compiled code may use what it reads last as scratch.
            writes.append(f"activations {block}")
        elif block in self.blocks.attention_moved:
            (writes if kind is Kind.FORWARD else reads).append(f"activations {block}")
        yield self._op(kind, block, COMPUTE, reads, writes, fate=visit.fate, **places)
        if kind is Kind.TAIL and not self.blocks.clip:
            yield from self.decide()

    # Activations.

    def evict(self, visit: Visit) -> Iterator[Op]:
        """An offloaded layer's activations to the host, or those of its attention alone, once its
        forward has made them."""
        moved = visit.fate is Fate.OFFLOADED or visit.block in self.blocks.attention_moved
        if visit.kind is Kind.FORWARD and moved:
            here, there = f"activations {visit.block}", f"host activations {visit.block}"
            last = ["evictions"] if visit.block == self.last_evicted else []
            yield self._op(Kind.EVICT, visit.block, D2H, [here], [there, *last])

    def drop(self, visit: Visit) -> Iterator[Op]:
        """Device memory of activations that must have left before this forward, or the loss."""
        if visit.kind in (Kind.FORWARD, Kind.TAIL):
            for layer in [layer for layer, due in self.drops.items() if due == visit.block]:
                yield self._op(Kind.DROP, layer, COMPUTE, [], [f"activations {layer}"])

    def fetch_first(self, visit: Visit) -> Iterator[Op]:
        """Beside the tail where nothing is kept: what the first backward needs."""
        if visit.kind is Kind.TAIL:
            yield from self._fetch_parts(visit)

    def fetch(self, visit: Visit) -> Iterator[Op]:
        """Activations of offloaded layers, a part at a time."""
        if visit.kind is Kind.BACKWARD:
            yield from self._fetch_parts(visit)

    def _fetches(self) -> dict[int, list[tuple[int, int]]]:
        """Visit -> (layer, part) of the activations that come back with it: none before a backward
        gave up another layer's, which makes room, and all before their own."""
        turns = [visit for visit in self.visits if visit.kind in (Kind.TAIL, Kind.BACKWARD)]
        rooms = [i for i, v in enumerate(turns) if v.fate is not Fate.RECOMPUTED]
        if not self.blocks.keep_activations:
            rooms.insert(0, 0)
        due = [i for i, visit in enumerate(turns) if visit.fate is Fate.OFFLOADED]
        found = defaultdict[int, list[tuple[int, int]]](list)
        for layer, parts in zip(due, paced(rooms[: len(due)], due, PARTS), strict=True):
            for part, turn in enumerate(parts):
                found[turns[turn].number].append((turns[layer].block, part))
        return found

    def _fetch_parts(self, visit: Visit) -> Iterator[Op]:
        for layer, part in self.fetches.get(visit.number, []):
            yield from self._fetch(layer, part, PARTS)

    def _fetch(self, layer: int, part: int = 0, parts: int = 1) -> Iterator[Op]:
        here, there = f"activations {layer}", f"host activations {layer}"
        if part == 0:
            yield self._op(Kind.STAGE, layer, COMPUTE, [], [here])
        yield self._op(Kind.FETCH, layer, H2D, [there], [here], part=(part, parts))

    def attention_ahead(self, visit: Visit) -> Iterator[Op]:
        """What attention gave, back from the host, if the next visit is given it."""
        for coming in self.visits[visit.number + 1 : visit.number + 2]:
            if coming.kind in AGAIN and coming.block in self.blocks.attention_moved:
                yield from self._fetch(coming.block)

    def attention_given(self, visit: Visit) -> Iterator[Op]:
        """Its device memory given up until the layer's backward, after a recomputation for the next
        layer's input."""
        if visit.kind is Kind.RECOMPUTE and visit.block in self.blocks.attention_moved:
            here = [f"activations {visit.block}"]
            yield self._op(Kind.DROP, visit.block, COMPUTE, [], here)

    # Gradients and updates.

    def store(self, visit: Visit) -> Iterator[Op]:
        """Gradients to the host; then the update or, where it must wait and the slab is shared, the
        copy that frees the slab."""
        if visit.kind not in GRADIENTS:
            return
        block, host, b = visit.block, visit.host_slab, self.blocks
        here, there = _gradients(block, visit.slab), f"host slab {host}"
        if self.peers:
            writes = [here, "norms", *self.peers]
            yield self._op(Kind.SCATTER, block, PEERS, [here], writes, slab=visit.slab)
        if not b.on_device(block):
            places = {"slab": visit.slab, "host_slab": host}
            yield self._op(Kind.STORE, block, D2H, [here], [there], **places)
            if b.deferred and b.shares_slab(block):
                parked = f"host gradients {block}"
                yield self._op(Kind.PARK, block, CPU, [there], [parked], host_slab=host)
        if not b.deferred:
            yield from self._update(block)

    def clip(self) -> Iterator[Op]:
        """The scale of all gradients, once the last is there."""
        if self.blocks.clip:
            yield from self.decide()

    def decide(self) -> Iterator[Op]:
        """The verdict, from the loss and the norms of all ranks, and the CPU's look at it."""
        reads = ["norms"] if self.peers and self.blocks.clip else []
        yield self._op(Kind.CLIP, -1, COMPUTE, reads, ["verdict", *self.peers])
        yield self._op(Kind.CHECK, -1, CPU, ["verdict"], [])

    def updates(self) -> Iterator[Op]:
        """Those that waited for the whole backward."""
        if self.blocks.deferred:
            for block in range(self.blocks.num_blocks):
                yield from self._update(block)

    def _update(self, block: int) -> Iterator[Op]:
        """AdamW on one block, from its slab or from where its gradients were parked."""
        if self.blocks.on_device(block):
            reads, writes = [f"device gradients {block}"], [f"device weights {block}"]
            yield self._op(Kind.UPDATE_HERE, block, COMPUTE, reads, writes)
            yield from self._gather(block, -1)
            return
        parked = self.blocks.deferred and self.blocks.shares_slab(block)
        slab = -1 if parked else self.host_slab[block]
        gradients = f"host gradients {block}" if parked else f"host slab {slab}"
        moments, stage = f"host moments {block}", -1
        if self.blocks.on_disk(block):
            stage = self.blocks.stage(block)
            moments = f"stage {stage}"
        writes = [f"host weights {block}", *self._updates_done()]
        writes += [] if self.blocks.late(block) else [moments]
        reads = [gradients, "verdict", moments]
        yield self._op(Kind.UPDATE, block, CPU, reads, writes, host_slab=slab, stage=stage)
        if stage >= 0:
            there = [f"disk {block}"]
            yield self._op(Kind.WRITE_STATE, block, WRITE, [moments], there, stage=stage)
            yield from self._read_next()

    # State on disk.

    def _update_order(self) -> list[int]:
        """Blocks in the order in which the step updates them."""
        if self.blocks.deferred:
            return list(range(self.blocks.num_blocks))
        return [visit.block for visit in self.visits if visit.kind in GRADIENTS]

    def read_first(self) -> Iterator[Op]:
        """What is updated first, which nothing of this step changes before."""
        for _ in range(STAGES):
            yield from self._read_next()

    def _read_next(self) -> Iterator[Op]:
        """The next block's state, into the buffer that was written longest ago."""
        if self.to_read:
            block = self.to_read.pop(0)
            stage = self.blocks.stage(block)
            reads, here = [f"disk {block}", *self._updates_done()], [f"stage {stage}"]
            yield self._op(Kind.READ_STATE, block, READ, reads, here, stage=stage)

    def late_moments(self, visit: Visit) -> Iterator[Op]:
        """The last step's moments, in the order in which the backward needs the slabs: after the
        last eviction, for both are bound by the host's memory and evictions are waited for."""
        due = visit.kind in (Kind.EMBED, Kind.FORWARD) and visit.block == self.last_evicted
        if not (due and self.trains and self.blocks.two_passes):
            return
        after = ["evictions"] if visit.block else []
        for block in filter(self.blocks.late, reversed(self.blocks.hosted)):
            reads, writes = [f"host slab {block}", *after], [f"host moments {block}"]
            yield self._op(Kind.MOMENTS, block, CPU, reads, writes, host_slab=block)

    def _op(
        self, kind: Kind, block: int, lane: str, reads: list[str], writes: list[str], **places: Any
    ) -> Op:
        op = Op(kind=kind, block=block, lane=self.lanes.get(lane, lane), **places)
        return replace(op, reads=frozenset(reads), writes=frozenset(writes))


def _weights(block: int, slot: int) -> str:
    return f"slot {slot}" if slot >= 0 else f"device weights {block}"


def _gradients(block: int, slab: int) -> str:
    return f"slab {slab}" if slab >= 0 else f"device gradients {block}"
