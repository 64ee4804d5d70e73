"""Every schedule is safe and minimal, by a happens-before check that shares no code with the
generator."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from engine.__main__ import drawing
from engine.blocks import Blocks, Fate
from engine.step import H2D, PARTS, Kind, Op, operations
from engine.timeline import simulate


def unroll(ops: tuple[Op, ...], num_steps: int = 3) -> list[tuple[Op, list[int]]]:
    """`num_steps` steps laid end to end, each operation with the absolute indices that it waits
    for."""
    size, unrolled = len(ops), []
    for step in range(num_steps):
        for op in ops:
            waits = [(step + offset) * size + index for offset, index in op.waits]
            unrolled.append((op, [w for w in waits if w >= 0]))
    return unrolled


def ancestors(unrolled: list[tuple[Op, list[int]]]) -> list[int]:
    """Bit set of all operations that happen before each one, through lane order and waits alone."""
    before, last = [], {}
    for index, (op, waits) in enumerate(unrolled):
        known = 0
        for predecessor in [*waits, *([last[op.lane]] if op.lane in last else [])]:
            known |= before[predecessor] | (1 << predecessor)
        before.append(known)
        last[op.lane] = index
    return before


def races(unrolled: list[tuple[Op, list[int]]]) -> list[tuple[int, int, str]]:
    """(earlier, later, resource) pairs of conflicting accesses that nothing orders."""
    before, found = ancestors(unrolled), []
    writers, users = dict[str, int](), dict[str, int]()
    for index, (op, _) in enumerate(unrolled):
        for resource in op.reads | op.writes:
            earlier = (users if resource in op.writes else writers).get(resource, 0)
            if unordered := earlier & ~before[index]:
                bits = (bit for bit in range(index) if unordered >> bit & 1)
                found += [(bit, index, resource) for bit in bits]
            users[resource] = users.get(resource, 0) | 1 << index
            if resource in op.writes:
                writers[resource] = writers.get(resource, 0) | 1 << index
    return found


def placements(num_layers: int, depth: int, streams: int, interval: int) -> list[Blocks]:
    """The combination with and without clipping, slabs in a pool, blocks on the device and
    activations kept."""
    base = Blocks(num_layers=num_layers, depth=depth, streams=streams, checkpoint_interval=interval)
    placed = replace(base, device_optimizer=num_layers // 2, keep_activations=num_layers // 3)
    everything = replace(
        base, device_optimizer=num_layers + 2, keep_activations=num_layers, clip=depth % 2 == 0
    )
    reloaded = replace(placed, reload_weights=1)
    pooled = replace(base, gradient_slabs=2, clip=False)
    unclipped = [replace(blocks, clip=False) for blocks in (base, placed)]
    serial = [replace(blocks, optimizer_overlap=False) for blocks in (base, pooled, placed)]
    offloaded = [
        replace(placed, offload_activations=n, reload_weights=n % 2)
        for n in {1, (num_layers + 1) // 2, num_layers}
        if interval == 1
    ]
    attended = [
        replace(base, keep_attention=1, offload_attention=num_layers),
        replace([placed, *offloaded][-1], offload_attention=(num_layers + 1) // 2),
    ]
    late = [replace(blocks, late_moments=True) for blocks in (base, placed, *offloaded[:1])]
    tiers = [
        replace(late[0], disk_blocks=num_layers + 2),
        replace(late[1], disk_blocks=num_layers // 2 + 1),
        replace(pooled, disk_blocks=(num_layers + 1) // 2),
        replace(serial[0], disk_blocks=2),
    ]
    alone = [
        base,
        replace(base, gradient_slabs=2),
        pooled,
        placed,
        reloaded,
        everything,
        *unclipped,
        *serial,
        *offloaded,
        *attended,
        *late,
        *tiers,
    ]
    return [replace(blocks, num_ranks=num) for num in (1, 2) for blocks in alone]


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", range(1, 13))
def test_every_combination_is_free_of_races_and_needs_every_wait(num_layers):
    for combination in itertools.product([num_layers], range(1, 5), range(1, 4), range(1, 6)):
        for blocks in placements(*combination):
            ops = operations(blocks)
            assert races(unroll(ops)) == [], blocks
            assert_every_wait_is_needed(ops, blocks)
        for blocks in evaluating(*combination):
            ops = operations(blocks, trains=False)
            assert races(unroll(ops)) == [], blocks
            assert_every_wait_is_needed(ops, blocks)


def evaluating(num_layers: int, depth: int, streams: int, interval: int) -> list[Blocks]:
    """Placements of the combination that no forward-only step tells from others are left out."""
    found = placements(num_layers, depth, streams, interval) if interval == 1 else []
    steps = {operations(blocks, trains=False): blocks for blocks in found}
    return list(steps.values())


def assert_every_wait_is_needed(ops: tuple[Op, ...], blocks: Blocks) -> None:
    """Without one wait, the operation it protected is unordered with the one it waited for, and
    they conflict."""
    unrolled = unroll(ops, 2)
    before, last = ancestors(unrolled), {}
    for index, (op, waits) in enumerate(unrolled):
        for removed in waits:
            rest = [w for w in waits if w != removed] + ([last[op.lane]] if op.lane in last else [])
            known = 0
            for predecessor in rest:
                known |= before[predecessor] | (1 << predecessor)
            other = unrolled[removed][0]
            conflict = (op.writes & (other.reads | other.writes)) | (op.reads & other.writes)
            assert conflict, (blocks, index, removed)
            assert not known >> removed & 1, (blocks, index, removed)
        last[op.lane] = index


@pytest.mark.parametrize(
    "combination", [(1, 1, 1, 1), (3, 1, 2, 2), (4, 2, 3, 1), (5, 3, 3, 2), (4, 4, 2, 3)]
)
def test_removing_any_one_wait_is_found(combination):
    for blocks in placements(*combination):
        ops = operations(blocks)
        for index, op in enumerate(ops):
            for wait in op.waits:
                broken = list(ops)
                broken[index] = replace(op, waits=tuple(w for w in op.waits if w != wait))
                assert races(unroll(tuple(broken))), (blocks, index, wait)


@pytest.mark.parametrize("blocks", placements(5, 2, 3, 1), ids=str)
def test_a_forward_only_step_loads_each_block_once_and_computes_the_loss(blocks):
    """One alone: what waits for a step before it has none to wait for."""
    ops = operations(blocks, trains=False)
    assert races(unroll(ops, 1)) == []
    computed = [(op.kind, op.block) for op in ops if op.kind not in (Kind.LOAD, Kind.GATHER)]
    layers = [(Kind.EVALUATE, layer) for layer in range(1, 6)]
    assert computed == [(Kind.EMBED, 0), *layers, (Kind.LOSS, 6)]
    loaded = [op.block for op in ops if op.kind is Kind.LOAD]
    assert loaded == list(blocks.hosted)
    gathered = [op.block for op in ops if op.kind is Kind.GATHER]
    assert gathered == (loaded if blocks.num_ranks > 1 else [])
    assert {op.lane for op in ops} <= {"compute", "h2d", "peers"}


@pytest.mark.parametrize("clip", [True, False])
def test_state_on_disk_is_written_before_it_is_read_again(clip):
    """And every block of it is read, updated in one pass and written once a step."""
    ops = operations(Blocks(num_layers=4, disk_blocks=5, late_moments=True, clip=clip))
    for kind, blocks in ((Kind.READ_STATE, 5), (Kind.UPDATE, 6), (Kind.WRITE_STATE, 5)):
        assert sorted(op.block for op in ops if op.kind is kind) == list(range(blocks))
    assert [op.block for op in ops if op.kind is Kind.MOMENTS] == ([5] if clip else [])
    unrolled = unroll(ops)
    before = ancestors(unrolled)
    written = dict[int, int]()
    for index, (op, _) in enumerate(unrolled):
        if op.kind is Kind.WRITE_STATE:
            written[op.block] = index
        if op.kind is Kind.READ_STATE and op.block in written:
            assert before[index] >> written[op.block] & 1


def test_an_evaluation_of_ranks_ends_with_the_loss_of_all():
    """They ask each other for it, in order with what else they ask."""
    ops = operations(Blocks(num_layers=2, num_ranks=2), trains=False)
    assert ops[-1].kind is Kind.LOSS
    assert "peers" in ops[-1].writes


def test_each_layer_is_loaded_once_each_way_and_stored_once_with_interval_one():
    ops = operations(Blocks(num_layers=6))
    loads = [op.block for op in ops if op.kind is Kind.LOAD]
    stores = [op.block for op in ops if op.kind is Kind.STORE]
    assert loads == [0, 1, 2, 3, 4, 5, 6, 7, 6, 5, 4, 3, 2, 1]
    assert stores == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("streams", "depth", "ahead"), [(1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 4, 3), (3, 4, 1)]
)
def test_weights_are_loaded_once_for_each_computation_and_so_many_ahead(streams, depth, ahead):
    """One ahead, or where stores take the same lane a whole buffer; the first computation waits for none but its own."""
    ops = operations(Blocks(num_layers=6, depth=depth, streams=streams))
    loads = [i for i, op in enumerate(ops) if op.kind is Kind.LOAD]
    computed = [sum(op.kind.value.startswith("compute ") for op in ops[:i]) for i in loads]
    assert computed == [0, *(max(1, n - ahead + 1) for n in range(1, 14))]


def test_ranks_gather_what_they_load_or_update_and_scatter_before_anybody_takes_a_gradient():
    ops = operations(Blocks(num_layers=4, device_optimizer=2, num_ranks=2))
    for before, op in itertools.pairwise(ops):
        if op.kind is Kind.GATHER:
            assert before.block == op.block
            assert before.kind is (Kind.UPDATE_HERE if op.block < 2 else Kind.LOAD)
        if op.kind in (Kind.STORE, Kind.SCATTER) and op.block >= 2:
            assert (before.kind is Kind.SCATTER) is (op.kind is Kind.STORE)
    assert [op.block for op in ops if op.kind is Kind.SCATTER] == [5, 4, 3, 2, 1, 0]
    talking = [op for op in ops if "peers" in op.writes]
    assert {op.kind for op in talking} == {Kind.GATHER, Kind.SCATTER, Kind.CLIP}


@pytest.mark.parametrize(("depth", "slabs"), [(1, 1), (2, 3), (3, 2)])
def test_rings_are_used_in_turn(depth, slabs):
    """Weight slots, device gradient slabs and a pool of host slabs: the next layer's is the
    next."""
    ops = operations(Blocks(num_layers=6, depth=depth, gradient_slabs=slabs))
    loads = [op.slot for op in ops if op.kind is Kind.LOAD and op.slot >= 0]
    assert loads == [i % depth for i in range(12)]
    stores = [op for op in ops if op.kind is Kind.STORE and 1 <= op.block <= 6]
    assert [op.slab for op in stores] == [i % depth for i in range(6)]
    assert [op.host_slab for op in stores] == [i % slabs for i in range(6)]


def test_moments_are_updated_last_block_first_before_their_slabs_are_written_again():
    ops = operations(Blocks(num_layers=4, device_optimizer=2, late_moments=True))
    assert [op.block for op in ops if op.kind is Kind.MOMENTS] == [5, 4, 3, 2]
    unrolled = unroll(ops)
    before = ancestors(unrolled)
    stores = [i for i, (op, _) in enumerate(unrolled) if op.kind is Kind.STORE]
    for store in stores:
        own = [
            i
            for i, (op, _) in enumerate(unrolled[:store])
            if op.kind is Kind.MOMENTS and op.block == unrolled[store][0].block
        ]
        assert before[store] >> own[-1] & 1


@pytest.mark.parametrize("placed", [{"offload_activations": 3}, {"offload_attention": 2}], ids=str)
def test_no_moments_are_updated_before_the_last_eviction(placed):
    """Both are bound by the host's memory, and the forward waits for evictions alone."""
    ops = operations(Blocks(num_layers=6, late_moments=True, **placed))
    last = [i for i, op in enumerate(ops) if op.kind is Kind.EVICT][-1]
    moments = [i for i, op in enumerate(ops) if op.kind is Kind.MOMENTS]
    assert len(moments) == 8
    assert (0, last) in ops[moments[0]].waits
    quick = simulate(ops, lambda op: 0.1 if op.kind is Kind.MOMENTS else 1.0)
    evicted = max(i.end_s for i in quick.intervals if i.label.startswith("evict"))
    assert all(i.start_s >= evicted for i in quick.intervals if i.label.startswith("moments"))


@pytest.mark.parametrize(
    "reason", [{"clip": False}, {"optimizer_overlap": False}, {"gradient_slabs": 2}], ids=str
)
def test_one_pass_updates_all_where_gradients_cannot_wait(reason):
    blocks = Blocks(num_layers=4, **reason)
    assert operations(replace(blocks, late_moments=True)) == operations(blocks)


@pytest.mark.parametrize(
    "blocks", [blocks for blocks in placements(6, 2, 3, 1) if blocks.deferred], ids=str
)
def test_updates_that_wait_come_in_the_order_of_the_next_forward(blocks):
    updates = [op.block for op in operations(blocks) if op.kind in (Kind.UPDATE, Kind.UPDATE_HERE)]
    assert updates == list(range(8))


def test_without_clipping_updates_start_in_the_backward():
    kinds = [op.kind for op in operations(Blocks(num_layers=4, clip=False))]
    assert kinds.index(Kind.UPDATE) < kinds.index(Kind.EMBED_BACKWARD)


@pytest.mark.parametrize("blocks", placements(6, 2, 3, 2), ids=str)
def test_a_serial_optimizer_runs_between_one_step_and_the_next(blocks):
    """Every update is after every backward of its step and, through lane order and waits, before
    any work of the next."""
    ops = operations(replace(blocks, optimizer_overlap=False))
    unrolled, size = unroll(ops, 2), len(ops)
    before = ancestors(unrolled)
    updates = [i for i, op in enumerate(ops) if op.kind is Kind.UPDATE]
    last = max(i for i, op in enumerate(ops) if op.kind is Kind.EMBED_BACKWARD)
    assert all(i > last for i in updates)
    for later in range(size, 2 * size):
        assert all(before[later] >> i & 1 for i in updates), unrolled[later][0]


@pytest.mark.parametrize("share", range(8))
def test_offloaded_layers_are_spread_evenly_and_never_recomputed(share):
    blocks = Blocks(num_layers=8, keep_activations=2, offload_activations=share)
    offloaded = [layer for layer in range(1, 9) if blocks.fate(layer) is Fate.OFFLOADED]
    assert len(offloaded) == min(share, 6)
    assert offloaded[:1] == [1] * (share > 0)
    gaps = [after - before for before, after in itertools.pairwise([*offloaded, 7])]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    ops = operations(blocks)
    for kind in (Kind.EVICT, Kind.DROP, Kind.STAGE):
        assert sorted(op.block for op in ops if op.kind is kind) == offloaded
    recomputed = [op.block for op in ops if op.kind is Kind.BACKWARD and op.fate is Fate.RECOMPUTED]
    assert recomputed == [i for i in range(6, 0, -1) if i not in offloaded]


@pytest.mark.parametrize(("keep", "offload"), [(0, 2), (0, 4), (0, 8), (2, 3), (3, 2), (4, 4)])
def test_activations_come_back_only_into_what_others_gave_up(keep, offload):
    """No more layers at once, kept or fetched, than the plan has room for."""
    held, most = keep, max(1, keep)
    for op in operations(Blocks(num_layers=8, keep_activations=keep, offload_activations=offload)):
        if op.kind is Kind.STAGE:
            held += 1
        elif op.kind is Kind.BACKWARD and op.fate is not Fate.RECOMPUTED:
            held -= 1
        assert 0 <= held <= most, op


@pytest.mark.parametrize("num_layers", range(1, 10))
def test_all_parts_of_offloaded_activations_come_in_order_before_their_backward(num_layers):
    for keep, offload in itertools.product(range(num_layers), range(1, num_layers + 1)):
        blocks = Blocks(num_layers=num_layers, keep_activations=keep, offload_activations=offload)
        come: dict[int, list[tuple[int, int]]] = {}
        for op in operations(blocks):
            if op.kind is Kind.FETCH:
                come.setdefault(op.block, []).append(op.part)
            elif op.kind is Kind.BACKWARD and op.fate is Fate.OFFLOADED:
                assert come.pop(op.block) == [(part, PARTS) for part in range(PARTS)]
        assert come == {}


def test_between_two_loads_no_more_activations_come_back_than_must():
    """3B on 80 GB: 26 layers kept and 5 offloaded. Whole, each would hold up the next weights."""
    blocks = Blocks(num_layers=36, keep_activations=26, offload_activations=5, reload_weights=1)
    lane = [op.kind for op in operations(blocks) if op.lane == H2D]
    between = [len(list(run)) for kind, run in itertools.groupby(lane) if kind is Kind.FETCH]
    assert max(between) == 2
    assert sum(between) == 5 * PARTS


@pytest.mark.parametrize(("interval", "recomputes"), [(1, 0), (2, 3), (3, 4), (6, 5), (9, 5)])
def test_checkpoint_interval_recomputes_all_but_the_last_layer_of_each_group(interval, recomputes):
    ops = operations(Blocks(num_layers=6, checkpoint_interval=interval))
    assert sum(op.kind is Kind.RECOMPUTE for op in ops) == recomputes


def test_depth_two_lets_the_next_load_run_beside_the_computation():
    """With one slot a load waits for the computation just before it; with two it never does."""
    for depth, expected in ((1, True), (2, False)):
        ops = operations(Blocks(num_layers=4, depth=depth))
        computed, waits_for_previous = 0, False
        for index, op in enumerate(ops):
            if op.kind in (Kind.FORWARD, Kind.BACKWARD):
                computed = index
            elif op.kind is Kind.LOAD and op.slot >= 0 and computed:
                waits_for_previous |= (0, computed) in op.waits
        assert waits_for_previous is expected


def test_the_picture_in_the_documentation_is_drawn_from_the_schedule():
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    lines = drawing(Blocks(num_layers=3, late_moments=True))
    assert [line.split()[0] for line in lines] == ["cpu", "compute", "h2d", "d2h"]
    assert "\n".join(lines) in page


@pytest.mark.parametrize(("depth", "waits"), [(2, True), (3, False)])
def test_with_a_third_slot_the_last_backward_load_need_not_wait(depth, waits):
    """What the documentation reads from the picture: layer 1's load and the first backward."""
    ops = operations(Blocks(num_layers=3, depth=depth))
    first = next(i for i, op in enumerate(ops) if op.kind is Kind.BACKWARD)
    load = [op for op in ops if op.kind is Kind.LOAD and op.block == 1][-1]
    assert ((0, first) in load.waits) is waits


def test_evicted_activations_give_up_their_memory_once_their_copies_had_the_time():
    """Each eviction takes so many forwards, one begins when the one before is done, and whatever is
    left goes before the loss."""
    every_other = Blocks(num_layers=8, offload_activations=4, evict_visits=1)
    assert every_other.offloaded == [1, 3, 5, 7]
    assert every_other.drops() == {1: 3, 3: 5, 5: 7, 7: 9}
    slow = Blocks(num_layers=8, offload_activations=4, evict_visits=3)
    assert slow.drops() == {1: 5, 3: 8, 5: 9, 7: 9}
    ops = operations(every_other)
    for layer, due in every_other.drops().items():
        after = [op for op in ops[ops.index(one(ops, Kind.DROP, layer)) :] if op.kind in FORWARDS]
        assert after[0].block == due


FORWARDS = (Kind.FORWARD, Kind.TAIL)


def one(ops: tuple[Op, ...], kind: Kind, block: int) -> Op:
    """The operation of this kind on this block."""
    return next(op for op in ops if (op.kind, op.block) == (kind, block))
