"""One optimizer step as an ordered list of operations: load, compute, store, evict, stage, fetch, keep, clip, check, step, moments.

Pure Python: (layers, depth, streams, checkpoint interval, slabs, placement, clipping) -> operations on lanes, with the
waits between lanes. Invariant: waits are derived from what each operation reads and writes, none is missing
and none is redundant (tests prove both by an independent happens-before check).

    python -m engine 4 2 3 1     # layers, depth, streams, checkpoint interval: print the step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.pipeline import COMPUTE, CPU, D2H, FETCH, H2D, LANES, Pipeline
from engine.waits import derive

GRADIENT_PHASES = ("tail", "backward", "backward_kept", "backward_offloaded", "embed_backward")
"""Computations that leave a block's gradients behind."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation on one lane."""

    kind: str
    """load, compute, store, keep, clip, check, free, step or moments; for activations evict, drop, stage or fetch."""
    block: int
    lane: str
    phase: str = ""
    """Of compute: embed, forward, tail, recompute, backward, embed_backward, and forward and backward _kept or _offloaded; of step:
    device_step."""
    slot: int = -1
    """Device weight slot (load, compute, free) of a layer."""
    slab: int = -1
    """Device gradient slab (compute, store) of a layer."""
    host_slab: int = -1
    """Host gradient slab (store, keep, step, moments)."""
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
    waits = derive([(op.lane, op.reads, op.writes) for op in plain])
    awaited = {index for found in waits for _, index in found}
    return tuple(replace(op, waits=waits[i], signals=i in awaited) for i, op in enumerate(plain))


def _visits(p: Pipeline) -> list[tuple[str, int]]:
    """(phase, block) of every computation, in order; each needs its block's weights on the device."""
    layers = range(1, p.num_layers + 1)
    streamed = p.num_layers - p.kept_layers
    visits = [("embed", 0), *((f"forward{_suffix(p, i)}", i) for i in layers), ("tail", p.head)]
    visits += [("backward_kept", i) for i in reversed(layers[streamed:])]
    for start in reversed(range(1, streamed + 1, p.checkpoint_interval)):
        group = range(start, min(start + p.checkpoint_interval, streamed + 1))
        visits += [("recompute", i) for i in group[:-1]]
        visits += [(f"backward{_suffix(p, i)}", i) for i in reversed(group)]
    return [*visits, ("embed_backward", 0)]


def _suffix(p: Pipeline, layer: int) -> str:
    """What becomes of the layer's activations: kept, offloaded or, without a suffix, recomputed."""
    return "_kept" if p.is_kept(layer) else "_offloaded" if p.is_offloaded(layer) else ""


def _operations(p: Pipeline) -> Iterator[Op]:
    """Operations in issue order, without waits."""
    lanes, visits, slabs = LANES[p.streams], _visits(p), _Slabs(p)
    loads = list(_loads(p, visits, lanes))
    slots = [op.slot if op else -1 for op in loads]
    # On a lane shared with stores, loads must be issued a whole buffer ahead, or each would queue behind a store.
    # Elsewhere one visit ahead is enough, and it keeps the issuing thread from waiting for an update too early.
    ahead = max(1, p.depth - 1) if p.streams == 2 else 1
    issued, drops = 0, p.drops()
    waiting = [block for phase, block in visits if phase == "backward_offloaded"]
    assert not waiting or p.checkpoint_interval == 1, "offloaded activations need a checkpoint interval of 1"
    yield from _late_moments(p)
    for n, (phase, block) in enumerate(visits):
        for dropped in [layer for layer, due in drops.items() if due == n]:
            yield Op(kind="drop", block=dropped, lane=lanes[COMPUTE], writes=frozenset({f"activations {dropped}"}))
        if phase == "tail" and not p.kept_layers:
            yield from _stage_next(waiting, lanes)
        if n == 0:
            yield from filter(None, loads[:1])
            issued = 1
        slab = slabs.device(phase, block)
        yield _compute(p, phase, block, slots[n], slab, lanes)
        if phase == "tail" and not p.clip:
            yield _check()
        if phase == "forward_offloaded":
            yield _evict(block, lanes)
        if slots[n] >= 0:
            yield Op(kind="free", block=block, lane=lanes[COMPUTE], slot=slots[n], writes=frozenset({f"slot {slots[n]}"}))
        yield from filter(None, loads[issued : n + ahead + 1])
        issued = max(issued, n + ahead + 1)
        if phase in ("backward_kept", "backward_offloaded"):  # a layer's memory is free: room for another's
            yield from _stage_next(waiting, lanes)
        if phase in GRADIENT_PHASES:
            yield from slabs.store(block, slab, lanes)
    yield from _finish(p, slabs, lanes)


def _loads(p: Pipeline, visits: list[tuple[str, int]], lanes: dict[str, str]) -> Iterator[Op | None]:
    """The load that each visit needs; layers take slots in ring order, embed and head own their device memory."""
    num_layer_loads = 0
    for phase, block in visits:
        if p.on_device(block) or phase in ("embed_backward", "backward_kept"):  # there already
            yield None
        elif not p.owns_weights(block):
            yield _load(p, block, num_layer_loads % p.depth, lanes)
            num_layer_loads += 1
        else:
            yield _load(p, block, -1, lanes)


def _evict(block: int, lanes: dict[str, str]) -> Op:
    """A layer's activations to the host."""
    reads, writes = frozenset({f"activations {block}"}), frozenset({f"host activations {block}"})
    return Op(kind="evict", block=block, lane=lanes[D2H], reads=reads, writes=writes)


def _stage_next(waiting: list[int], lanes: dict[str, str]) -> Iterator[Op]:
    """Device memory for the next layer's activations, and the copy that brings them back."""
    if waiting:
        block = waiting.pop(0)
        there, here = frozenset({f"host activations {block}"}), frozenset({f"activations {block}"})
        yield Op(kind="stage", block=block, lane=lanes[COMPUTE], writes=here)
        yield Op(kind="fetch", block=block, lane=lanes[FETCH], reads=there, writes=here)


def _weights(block: int, slot: int) -> str:
    return f"slot {slot}" if slot >= 0 else f"device weights {block}"


def _gradients(block: int, slab: int) -> str:
    return f"slab {slab}" if slab >= 0 else f"device gradients {block}"


def _after_updates(p: Pipeline) -> set[str]:
    """What the first operations of a step read where it must not begin before every update of the last one is done."""
    return set() if p.overlap else {"updates"}


def _load(p: Pipeline, block: int, slot: int, lanes: dict[str, str]) -> Op:
    return Op(
        kind="load",
        block=block,
        slot=slot,
        lane=lanes[H2D],
        reads=frozenset({f"host weights {block}"} | _after_updates(p)),
        writes=frozenset({_weights(block, slot)}),
    )


def _compute(p: Pipeline, phase: str, block: int, slot: int, slab: int, lanes: dict[str, str]) -> Op:
    reads, writes = {_weights(block, slot)}, set()
    if phase == "embed":
        reads |= _after_updates(p)
    if phase == "tail":
        reads.add("device weights 0")  # tied embeddings, whose gradient begins here
        writes |= {"device gradients 0", f"device gradients {block}"}
        if not p.clip:
            writes.add("verdict")
    elif phase in GRADIENT_PHASES:
        writes.add(_gradients(block, slab))
    if phase.endswith("_offloaded"):
        writes.add(f"activations {block}")  # in the backward too: compiled code may use what it reads last as scratch
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
    """The clipping scale, and the updates that waited for it, in the order in which the next forward needs them."""
    if p.clip:
        yield Op(kind="clip", block=-1, lane=lanes[COMPUTE], writes=frozenset({"verdict"}))
        yield _check()
    for block in range(p.num_blocks) if p.deferred else ():
        yield slabs.step(block, lanes)


def _late_moments(p: Pipeline) -> Iterator[Op]:
    """The last step's moments, in the order in which the backward needs the slabs."""
    for block in reversed(range(p.device_blocks, p.num_blocks)) if p.two_passes else ():
        gradients, moments = frozenset({f"host slab {block}"}), frozenset({f"host moments {block}"})
        yield Op(kind="moments", block=block, host_slab=block, lane=CPU, reads=gradients, writes=moments)


def _check() -> Op:
    """The CPU lane looks at the loss (and norm): after a bad one it does nothing more."""
    return Op(kind="check", block=-1, lane=CPU, reads=frozenset({"verdict"}))


class _Slabs:
    """Hands out device and host gradient slabs in ring order."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.p = pipeline
        self.num_device = self.num_host = 0
        self.held: dict[int, int] = {}

    def device(self, phase: str, block: int) -> int:
        """Next device slab for a layer's backward, else -1 (other blocks own theirs)."""
        if phase not in GRADIENT_PHASES or self.p.owns_gradients(block):
            return -1
        self.num_device += 1
        return (self.num_device - 1) % self.p.depth

    def store(self, block: int, slab: int, lanes: dict[str, str]) -> Iterator[Op]:
        """Gradients out; then the update or, where it is deferred and the slab is shared, the copy that frees the slab."""
        if self.p.on_device(block):
            if not self.p.deferred:
                yield self.step(block, lanes)
            return
        host = self._host(block)
        yield Op(
            kind="store",
            block=block,
            slab=slab,
            host_slab=host,
            lane=lanes[D2H],
            reads=frozenset({_gradients(block, slab)}),
            writes=frozenset({f"host slab {host}"}),
        )
        if not self.p.deferred:
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
        """AdamW on one block, from its slab or, deferred and with a shared slab, from where it was kept."""
        if self.p.on_device(block):
            return Op(
                kind="step",
                phase="device_step",
                block=block,
                lane=lanes[COMPUTE],
                reads=frozenset({f"device gradients {block}"}),
                writes=frozenset({f"device weights {block}"}),
            )
        kept = self.p.deferred and self._shared(block)
        slab = self.held[block]
        moments = frozenset({f"host moments {block}"})
        return Op(
            kind="step",
            block=block,
            host_slab=-1 if kept else slab,
            lane=lanes[CPU],
            reads=frozenset({f"host gradients {block}" if kept else f"host slab {slab}", "verdict"}) | moments,
            writes=frozenset({f"host weights {block}"} | _after_updates(self.p)) | (frozenset() if self.p.two_passes else moments),
        )

    def _shared(self, block: int) -> bool:
        return self.p.pooled and self.p.is_layer(block)

    def _host(self, block: int) -> int:
        """The slab of a block: its own (numbered as the block, after the pool), or the pool's next."""
        if self._shared(block):
            self.held[block] = self.num_host % self.p.gradient_slabs
            self.num_host += 1
        else:
            self.held[block] = block + (self.p.gradient_slabs if self.p.pooled else 0)
        return self.held[block]
