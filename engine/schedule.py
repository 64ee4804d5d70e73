"""One optimizer step as an ordered list of Load, Compute, Store, Keep, Clip, Free and Step operations.

Pure Python: (layers, depth, streams, checkpoint interval, slabs, clipping) -> operations on lanes, with the
waits between lanes. Invariant: waits are derived from what each operation reads and writes, none is missing
and none is redundant (tests prove both by an independent happens-before check).

    python -m engine 4 2 3 1     # layers, depth, streams, checkpoint interval: print the step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

COMPUTE, H2D, D2H, CPU = "compute", "h2d", "d2h", "cpu"
LANES = {
    1: {COMPUTE: COMPUTE, H2D: COMPUTE, D2H: COMPUTE, CPU: CPU},
    2: {COMPUTE: COMPUTE, H2D: "copy", D2H: "copy", CPU: CPU},
    3: {COMPUTE: COMPUTE, H2D: H2D, D2H: D2H, CPU: CPU},
}
"""Number of CUDA streams -> the lane that each kind of work runs on; the CPU worker is always its own lane."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a schedule is made from."""

    num_layers: int
    depth: int = 2
    """Device weight slots, and device gradient slabs, for decoder layers."""
    streams: int = 3
    """CUDA streams: 1 serial, 2 compute and copy, 3 compute, H2D and D2H."""
    checkpoint_interval: int = 1
    """K: every K-th layer's input is kept; the others are recomputed from it in the backward."""
    gradient_slabs: int = 0
    """Pinned host gradient slabs that the layers share; 0, or as many as layers, gives every layer its own."""
    clip: bool = True
    """Exact global-norm clipping: no update before the whole backward is done."""
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


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation on one lane."""

    kind: str
    """load, compute, store, keep, clip, free or step."""
    block: int
    lane: str
    phase: str = ""
    """Of compute: embed, forward, tail, recompute, backward, embed_backward."""
    slot: int = -1
    """Device weight slot (load, compute, free) of a layer."""
    slab: int = -1
    """Device gradient slab (compute, store) of a layer."""
    host_slab: int = -1
    """Host gradient slab (store, keep, step)."""
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    waits: tuple[tuple[int, int], ...] = ()
    """(step offset 0 or -1, index) of operations on other lanes that must have finished."""
    signals: bool = False
    """Some other lane waits for this operation."""

    def __str__(self) -> str:
        place = "".join(
            f" {name}{value}" for name, value in (("slot", self.slot), ("slab", self.slab), ("host", self.host_slab)) if value >= 0
        )
        waits = " ".join(f"#{index}" + ("'" if offset else "") for offset, index in self.waits)
        return f"{self.lane:8}{self.kind:8}{self.phase:15}block {self.block:<4}{place:20}" + (f"after {waits}" if waits else "")


def build(pipeline: Pipeline) -> tuple[Op, ...]:
    """The operations of a steady-state step in issue order; a first step ignores the waits on the step before."""
    plain = list(_operations(pipeline))
    tracker, steps = _Tracker(), []
    for _ in range(3):
        steps.append([tracker.place(op) for op in plain])
    waits = [tuple((index // len(plain) - 2, index % len(plain)) for index in found) for found in steps[2]]
    assert all(offset >= -1 for found in waits for offset, _ in found), "a wait reaches back more than one step"
    awaited = {index for found in waits for _, index in found}
    return tuple(replace(op, waits=waits[i], signals=i in awaited) for i, op in enumerate(plain))


def _visits(p: Pipeline) -> list[tuple[str, int]]:
    """(phase, block) of every computation, in order; each needs its block's weights on the device."""
    layers = range(1, p.num_layers + 1)
    visits = [("embed", 0), *(("forward", i) for i in layers), ("tail", p.head)]
    starts = range(1, p.num_layers + 1, p.checkpoint_interval)
    for start in reversed(starts):
        group = range(start, min(start + p.checkpoint_interval, p.num_layers + 1))
        visits += [("recompute", i) for i in group[:-1]]
        visits += [("backward", i) for i in reversed(group)]
    return [*visits, ("embed_backward", 0)]


def _operations(p: Pipeline) -> Iterator[Op]:
    """Operations in issue order, without waits."""
    lanes, visits, slabs = LANES[p.streams], _visits(p), _Slabs(p)
    loads = list(_loads(p, visits, lanes))
    slots = [op.slot if op else -1 for op in loads]
    # On a lane shared with stores, loads must be issued a whole buffer ahead, or each would queue behind a store.
    # Elsewhere one visit ahead is enough, and it keeps the issuing thread from waiting for an update too early.
    ahead = max(1, p.depth - 1) if p.streams == 2 else 1
    issued = 0
    for n, (phase, block) in enumerate(visits):
        if n == 0:
            yield from filter(None, loads[:1])
            issued = 1
        slab = slabs.device(phase)
        yield _compute(p, phase, block, slots[n], slab, lanes)
        if slots[n] >= 0:
            yield Op(kind="free", block=block, lane=lanes[COMPUTE], slot=slots[n], writes=frozenset({f"slot {slots[n]}"}))
        yield from filter(None, loads[issued : n + ahead + 1])
        issued = max(issued, n + ahead + 1)
        if phase in ("tail", "backward", "embed_backward"):
            yield from slabs.store(block, slab, lanes)
    yield from _finish(p, slabs, lanes)


def _loads(p: Pipeline, visits: list[tuple[str, int]], lanes: dict[str, str]) -> Iterator[Op | None]:
    """The load that each visit needs; layers take slots in ring order, embed and head own their device memory."""
    num_layer_loads = 0
    for phase, block in visits:
        if phase == "embed_backward":  # on the device since the step's first load
            yield None
        elif 1 <= block <= p.num_layers:
            yield _load(block, num_layer_loads % p.depth, lanes)
            num_layer_loads += 1
        else:
            yield _load(block, -1, lanes)


def _weights(block: int, slot: int) -> str:
    return f"slot {slot}" if slot >= 0 else f"device weights {block}"


def _load(block: int, slot: int, lanes: dict[str, str]) -> Op:
    return Op(
        kind="load",
        block=block,
        slot=slot,
        lane=lanes[H2D],
        reads=frozenset({f"host weights {block}"}),
        writes=frozenset({_weights(block, slot)}),
    )


def _compute(p: Pipeline, phase: str, block: int, slot: int, slab: int, lanes: dict[str, str]) -> Op:
    reads, writes = {_weights(block, slot)}, set()
    if phase == "tail":
        reads.add("device weights 0")  # tied embeddings
        writes.add(f"device gradients {block}")
        if not p.clip:
            writes.add("verdict")
    elif phase == "backward":
        writes.add(f"slab {slab}")
    elif phase == "embed_backward":
        writes.add(f"device gradients {block}")
    return Op(
        kind="compute",
        phase=phase,
        block=block,
        slot=slot,
        slab=slab,
        lane=lanes[COMPUTE],
        reads=frozenset(reads),
        writes=frozenset(writes),
    )


def _finish(p: Pipeline, slabs: _Slabs, lanes: dict[str, str]) -> Iterator[Op]:
    """With clipping: the scale, then the updates in the order in which the next forward needs them."""
    if p.clip:
        yield Op(kind="clip", block=-1, lane=lanes[COMPUTE], writes=frozenset({"verdict"}))
        for block in range(p.num_blocks):
            yield slabs.step(block, lanes)


class _Slabs:
    """Hands out device and host gradient slabs in ring order."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.p = pipeline
        self.num_device = self.num_host = 0
        self.held: dict[int, int] = {}

    def device(self, phase: str) -> int:
        """Next device slab for a layer's backward, else -1 (embed and head own theirs)."""
        if phase != "backward":
            return -1
        self.num_device += 1
        return (self.num_device - 1) % self.p.depth

    def store(self, block: int, slab: int, lanes: dict[str, str]) -> Iterator[Op]:
        """Gradients out; then, without clipping, the update; with clipping and a shared slab, the copy that frees it."""
        host = self._host(block)
        source = f"slab {slab}" if slab >= 0 else f"device gradients {block}"
        yield Op(
            kind="store",
            block=block,
            slab=slab,
            host_slab=host,
            lane=lanes[D2H],
            reads=frozenset({source}),
            writes=frozenset({f"host slab {host}"}),
        )
        if not self.p.clip:
            yield self.step(block, lanes)
        elif self._shared(block):
            yield Op(
                kind="keep",
                block=block,
                host_slab=host,
                lane=lanes[CPU],
                reads=frozenset({f"host slab {host}"}),
                writes=frozenset({f"host gradients {block}"}),
            )

    def step(self, block: int, lanes: dict[str, str]) -> Op:
        """AdamW on one block, from its slab or, with clipping and a shared slab, from where it was kept."""
        kept = self.p.clip and self._shared(block)
        slab = self.held[block]
        return Op(
            kind="step",
            block=block,
            host_slab=-1 if kept else slab,
            lane=lanes[CPU],
            reads=frozenset({f"host gradients {block}" if kept else f"host slab {slab}", "verdict"}),
            writes=frozenset({f"host weights {block}"}),
        )

    def _shared(self, block: int) -> bool:
        return self.p.pooled and 1 <= block <= self.p.num_layers

    def _host(self, block: int) -> int:
        """The slab of a block: its own (numbered as the block, after the pool), or the pool's next."""
        if self._shared(block):
            self.held[block] = self.num_host % self.p.gradient_slabs
            self.num_host += 1
        else:
            self.held[block] = block + (self.p.gradient_slabs if self.p.pooled else 0)
        return self.held[block]


@dataclass
class _Tracker:
    """Finds the waits of each operation: conflicts with earlier ones, less those that are already implied.

    An operation must follow the last writer of what it reads, and the last writer and all later readers of
    what it writes. Clocks say which operations of each lane a finished operation implies. Trying the latest
    candidate first leaves no redundant wait, because an operation can only imply earlier ones.
    """

    clocks: list[dict[str, int]] = field(default_factory=list)
    last_on: dict[str, int] = field(default_factory=dict)
    writer: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    lanes: list[str] = field(default_factory=list)

    def place(self, op: Op) -> list[int]:
        """Record `op` as issued next; return the absolute indices that it must wait for."""
        index = len(self.clocks)
        candidates = {self.writer[r] for r in op.reads | op.writes if r in self.writer}
        candidates.update(reader for r in op.writes for reader in self.readers.get(r, ()))
        clock = dict(self.clocks[self.last_on[op.lane]]) if op.lane in self.last_on else {}
        waits = []
        for candidate in sorted(candidates, reverse=True):
            if clock.get(self.lanes[candidate], -1) < candidate:
                waits.append(candidate)
                for lane, seen in self.clocks[candidate].items():
                    clock[lane] = max(clock.get(lane, -1), seen)
        clock[op.lane] = index
        self.clocks.append(clock)
        self.lanes.append(op.lane)
        self.last_on[op.lane] = index
        for r in op.writes:
            self.writer[r], self.readers[r] = index, []
        for r in op.reads - op.writes:
            self.readers.setdefault(r, []).append(index)
        return waits
