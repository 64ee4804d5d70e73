"""What is put into free device memory: costs of operations, the simulated step, and the choice
against brute force."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.activations import Widths
from engine.blocks import Blocks, Fate
from engine.config import AUTO, PLACED
from engine.device import Gradients
from engine.layout import Layout, pack
from engine.planner.cost import (
    BESIDE_LOADS,
    EVICT_SHARE,
    LAYER_BANDWIDTH,
    LAYER_EFFICIENCY,
    UPDATE_BYTES,
    WEIGHTS_BYTES,
    Cost,
)
from engine.planner.placement import (
    EQUAL,
    RESIDENT,
    checkpoint_interval,
    choose,
    fewest_on_disk,
    usable,
)
from engine.planner.rates import Rates
from engine.sizes import StoreSpec, Work, device_bytes
from engine.step import Kind, Op, operations
from engine.timeline import Interval, last_step, simulate, window_s

NUMEL, TOKENS = 1 << 20, 100
WIDTHS = Widths(hidden=1, inner=1, queries=0, keys=0, vocab=1, heads=1)
WIDE = replace(WIDTHS, hidden=1 << 9, inner=1 << 10)
FORWARD = Op(kind=Kind.FORWARD, block=1, lane="compute")
BACKWARD = Op(kind=Kind.BACKWARD, block=1, lane="compute")
BACKWARD_KEPT = replace(BACKWARD, fate=Fate.KEPT)
EMBED_BACKWARD = Op(kind=Kind.EMBED_BACKWARD, block=0, lane="compute")
RATES = Rates(
    matmul_flops=2 * NUMEL * TOKENS / 0.01 / LAYER_EFFICIENCY,
    adamw_params=NUMEL / 0.02,
    weights_params=NUMEL / 0.012,
    moments_params=NUMEL / 0.02,
    h2d_bytes=1e15,
    d2h_bytes=1e15,
    device_bytes=1e15,
)
"""10 ms a layer's forward, 20 ms a block's update (12 and 20 in two passes); transfers and the rest
take next to nothing."""
BLOCKS = Blocks(num_layers=8)
SHARED = 1 + 2 / UPDATE_BYTES
"""An update beside the loads of the forward takes that much longer: two bytes a parameter over its
own."""


def layouts(num_layers: int = 8) -> list[Layout]:
    return [pack([("weight", torch.Size((NUMEL,)))]) for _ in range(num_layers + 2)]


class WorkOfRoundNumbers(Work):
    """Activations of a layer that can wait on the host are a megabyte."""

    moved_bytes = 10**6


def work_of(num_layers: int, **options: Any) -> Work:
    """One micro-batch of one row in bfloat16."""
    shape = {"num_micro_batches": 1, "rows": 1, "seq_len": TOKENS, "loss_chunk": TOKENS}
    given = {"layouts": layouts(num_layers), "widths": WIDTHS, "dtype": torch.bfloat16} | shape
    return WorkOfRoundNumbers(**given | options)


def cost_of(blocks: Blocks, rates: Rates = RATES, **options: Any) -> Cost:
    return Cost(blocks=blocks, work=work_of(blocks.num_layers, **options), rates=rates)


def step_s(blocks: Blocks, rates: Rates = RATES, *, compiled: bool = False) -> float:
    return simulate(operations(blocks), cost_of(blocks, rates, compiled=compiled).seconds).step_s


def bytes_of(blocks: Blocks) -> int:
    return 14 * blocks.device_optimizer + 5 * blocks.keep_activations


def test_a_plan_leaves_a_share_of_a_small_device_free_and_six_gigabytes_of_a_large_one():
    assert usable(24 * 10**9) == int(0.94 * 24 * 10**9)
    assert usable(100 * 10**9) == 94 * 10**9
    assert usable(150_754_820_096) == 150_754_820_096 - 6 * 10**9


def test_everything_on_the_host_waits_for_updates_and_recomputes():
    # 80 ms forward; the head's update ends after 10 x 20 ms, and its forward waits for it; then 8 x
    # (10 + 20) ms backward.
    assert step_s(BLOCKS) == pytest.approx(0.200 * SHARED + 0.240, rel=1e-3)


def test_late_moments_leave_the_weights_alone_to_wait_for():
    # 10 x 12 ms, then 8 x (10 + 20) ms backward, with 10 x 20 ms of moments beside them.
    weights = 0.120 * (1 + 2 / WEIGHTS_BYTES)
    assert step_s(replace(BLOCKS, late_moments=True)) == pytest.approx(weights + 0.240, rel=1e-3)
    # 10 x 50 ms: the backward waits for its slabs instead.
    slow = replace(RATES, moments_params=NUMEL / 0.05)
    assert step_s(replace(BLOCKS, late_moments=True), slow) == pytest.approx(
        weights + 10 * 0.050, rel=1e-3
    )


def test_everything_on_the_device_is_forward_and_backward_alone():
    assert step_s(replace(BLOCKS, device_optimizer=10, keep_activations=8)) == pytest.approx(
        0.080 + 0.160, rel=1e-3
    )


def test_without_clipping_updates_run_beside_the_backward():
    # The last gradients are those of layer 1 and embed; their updates, 20 ms each, are what the
    # next forward waits for.
    assert step_s(replace(BLOCKS, clip=False)) == pytest.approx(
        0.080 + 0.240 + 0.040 * SHARED, rel=1e-3
    )


def test_bytes_of_an_update_are_those_of_its_arrays():
    held = StoreSpec(
        layouts=layouts(1), dtype=torch.bfloat16, master="split", slabs={}
    ).host_bytes()
    state, moments = (
        sum(held[kind] for kind in kinds) / (3 * NUMEL)
        for kinds in (("weights", "master", "moments"), ("moments",))
    )
    assert 2 * state + 2 == UPDATE_BYTES  # all of it read and written, the gradient read
    assert 2 * (state - moments) + moments + 2 == WEIGHTS_BYTES  # the moments are read only


class Moved(TorchDispatchMode):
    """Counts the bytes that copies and sums read and write."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if name in ("_foreach_copy_", "_foreach_add_"):
            into, given = (sum(t.numel() * t.element_size() for t in each) for each in args[:2])
            self.num_bytes += given + into * (2 if name == "_foreach_add_" else 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [2, 8])
def test_gradients_of_several_micro_batches_cost_the_bytes_of_their_sums(number, dtype):
    block, device = layouts(1)[0], replace(RATES, device_bytes=1e6)

    def moved(contributions: int) -> int:
        slab, wide = torch.empty(NUMEL, dtype=dtype), torch.empty(NUMEL)
        several = contributions > 1 and dtype != torch.float32
        summed = Gradients(block, slab, wide if several else None)
        with Moved() as mode:
            for _ in range(contributions):
                summed.add([torch.ones(NUMEL, dtype=dtype)])
            summed.finish()
        return mode.num_bytes

    for op in (BACKWARD, BACKWARD_KEPT, EMBED_BACKWARD):
        parts = cost_of(BLOCKS, device, dtype=dtype, num_micro_batches=number).seconds(op)
        whole = cost_of(BLOCKS, device, dtype=dtype, rows=number).seconds(op)
        assert parts - whole == pytest.approx((moved(number) - moved(1)) / 1e6)


def test_a_slow_link_bounds_the_step():
    loaded = 2 * NUMEL / 0.05  # 50 ms a layer each way
    slow = replace(RATES, h2d_bytes=loaded, d2h_bytes=loaded)
    # Every layer is loaded twice, embed and head once; then layer 1's backward, two stores, and
    # embed's update.
    assert step_s(BLOCKS, slow) == pytest.approx(
        18 * 0.050 + 0.030 + 2 * 0.050 + 0.020 * SHARED, rel=1e-3
    )


def test_evictions_leave_the_optimizer_alone_and_a_serial_one_has_the_memory_to_itself():
    offloaded = replace(BLOCKS, offload_activations=4)
    saved = 4 * 0.010  # recomputations
    assert step_s(offloaded) == pytest.approx(0.200 * SHARED + 0.240 - saved, rel=1e-3)
    assert step_s(replace(BLOCKS, optimizer_overlap=False)) == pytest.approx(
        0.200 + 0.080 + 0.240, rel=1e-3
    )


def test_compiled_layers_leave_out_what_no_gradient_needs():
    cost = cost_of(BLOCKS, widths=WIDE, compiled=True)
    forward, kept, backward = (cost.seconds(op) for op in (FORWARD, BACKWARD_KEPT, BACKWARD))
    assert backward == pytest.approx(kept + forward / 2)  # the last product is half of this layer


def test_a_chunked_mlp_is_computed_again_where_its_graph_is_kept_and_chunked_norms_always():
    def seconds(op: Op, rates: Rates = RATES, **options: Any) -> float:
        return cost_of(BLOCKS, rates, widths=WIDE, **options).seconds(op)

    slow = replace(RATES, device_bytes=1e9)
    forward, backward, kept = (seconds(op) for op in (FORWARD, BACKWARD, BACKWARD_KEPT))
    assert seconds(FORWARD, mlp_chunk=30) == forward
    assert seconds(BACKWARD, mlp_chunk=30) == pytest.approx(backward, rel=1e-3)
    products = 1.5 * forward  # three matrices, half the layer each
    assert seconds(BACKWARD_KEPT, mlp_chunk=30) == pytest.approx(kept + products, rel=1e-3)
    assert seconds(BACKWARD_KEPT, mlp_chunk=30, compiled=True) == pytest.approx(
        kept + forward, rel=1e-3
    )
    summed = 4 * 10 * 3 * (1 << 19) / 1e9  # chunks, bytes, parameters
    norms = 2 * 36 * (1 << 9) * TOKENS / (LAYER_BANDWIDTH * 1e9)  # bytes, values
    assert seconds(BACKWARD, mlp_chunk=30, rates=slow) == pytest.approx(
        seconds(BACKWARD, rates=slow) + summed + norms
    )


def chosen(blocks: Blocks, budget: int) -> Blocks:
    return choose(
        blocks, fits=lambda p: bytes_of(p) <= budget, device_bytes=bytes_of, step_s=step_s
    )


@pytest.mark.parametrize("budget", [0, 13, 14, 40, 60, 100, 179, 180, 10**6])
def test_the_choice_is_the_best_that_fits(budget):
    found = chosen(replace(BLOCKS, device_optimizer=AUTO, keep_activations=AUTO), budget)
    assert bytes_of(found) <= budget
    fitting = [
        other
        for device_blocks in range(11)
        for kept in range(9)
        if bytes_of(other := replace(BLOCKS, device_optimizer=device_blocks, keep_activations=kept))
        <= budget
    ]
    assert step_s(found) <= (1 + EQUAL) * min(map(step_s, fitting))


@pytest.mark.parametrize(("update_s", "on_host"), [(0.0001, False), (0.0005, False), (0.002, True)])
def test_what_costs_little_leaves_nothing_to_the_cpu(update_s, on_host):
    """The CPU's updates of some blocks hide behind the step, the device's hide nowhere: all of them
    there cost up to 2%."""
    rates = replace(RATES, device_bytes=UPDATE_BYTES * NUMEL / update_s)
    auto = replace(BLOCKS, device_optimizer=AUTO, keep_activations=AUTO)
    found = choose(
        auto, fits=lambda p: True, device_bytes=bytes_of, step_s=lambda p: step_s(p, rates)
    )
    fastest = min(
        step_s(replace(BLOCKS, device_optimizer=blocks, keep_activations=8), rates)
        for blocks in range(11)
    )
    assert step_s(found, rates) <= (1 + RESIDENT) * fastest
    assert (found.device_optimizer < 10) is on_host
    assert chosen(auto, 179).device_optimizer < 10  # no room: the rest as ever


def test_an_idle_link_takes_activations_and_a_slow_one_none():
    auto = replace(BLOCKS, device_optimizer=10, offload_activations=AUTO)
    found = choose(auto, fits=lambda p: True, device_bytes=bytes_of, step_s=step_s)
    assert found.offload_activations == 8
    assert step_s(found) == pytest.approx(0.080 + 0.160, rel=1e-2)  # nothing is recomputed
    slow = replace(RATES, h2d_bytes=1e6 / 0.040, d2h_bytes=1e6 / 0.040)  # 40 ms a layer each way
    auto = replace(auto, evict_visits=4)
    found = choose(
        auto, fits=lambda p: True, device_bytes=bytes_of, step_s=lambda p: step_s(p, slow)
    )
    assert 0 < found.offload_activations < 4


def test_an_eviction_takes_longer_than_the_probed_copy() -> None:
    rates = replace(RATES, d2h_bytes=1e6 / 0.002)
    blocks = replace(BLOCKS, offload_activations=2)
    cost = cost_of(blocks, rates)
    assert cost.evict_s == pytest.approx(0.002 / EVICT_SHARE)
    evictions = [op for op in operations(blocks) if op.kind is Kind.EVICT]
    assert [cost.seconds(op) for op in evictions] == [cost.evict_s] * 2


def test_an_eviction_takes_as_long_as_the_probe_beside_adamw_says_where_adamw_runs() -> None:
    rates = replace(RATES, d2h_bytes=1e6 / 0.002, evict_bytes=1e6 / 0.003)
    blocks = replace(BLOCKS, offload_activations=2, device_optimizer=8)
    cost = cost_of(blocks, rates)
    share = cost._updating_share
    assert 0 < share < 1
    updates = [cost.seconds(op) for op in operations(blocks) if op.kind is Kind.UPDATE]
    assert share == pytest.approx(sum(updates) / (blocks.num_layers * cost.forward_s))
    told = (share * 0.003 + (1 - share) * 0.002) / BESIDE_LOADS
    assert cost.evict_s == pytest.approx(told)
    slow = replace(rates, adamw_params=1e6)
    assert cost_of(blocks, slow).evict_s == pytest.approx(0.003 / BESIDE_LOADS)
    for alone in ({"device_optimizer": blocks.num_blocks}, {"clip": False}):
        cost = cost_of(replace(blocks, **alone), slow)
        assert cost.evict_s == pytest.approx(0.002 / BESIDE_LOADS)
    serial = replace(blocks, optimizer_overlap=False)  # it runs before the forward
    assert cost_of(serial, slow).evict_s == pytest.approx(0.002 / BESIDE_LOADS)


def test_the_parts_of_a_fetch_take_as_long_as_the_whole() -> None:
    blocks = replace(BLOCKS, offload_activations=2)
    cost = cost_of(blocks, replace(RATES, h2d_bytes=1e6 / 0.003))
    fetches = [op for op in operations(blocks) if op.kind is Kind.FETCH]
    assert sum(map(cost.seconds, fetches)) == pytest.approx(2 * 0.003)


@pytest.mark.parametrize(("load_s", "reload"), [(1e-6, 1), (0.050, 0)])
def test_a_fast_link_loads_the_weights_of_kept_layers_again(load_s, reload):
    """Each then takes 3 of the 60 instead of 5; a slow one leaves them where they are."""
    rates = replace(RATES, h2d_bytes=2 * NUMEL / load_s)

    def size(blocks: Blocks) -> int:
        return bytes_of(blocks) - 2 * blocks.reload_weights * blocks.keep_activations

    auto = replace(BLOCKS, keep_activations=AUTO, reload_weights=AUTO)
    found = choose(
        auto,
        fits=lambda p: size(p) <= 21,
        device_bytes=size,
        step_s=lambda p: step_s(p, rates),
    )
    assert (found.reload_weights, found.keep_activations) == (reload, 7 if reload else 4)


def test_a_number_given_is_kept():
    found = chosen(replace(BLOCKS, keep_activations=AUTO, device_optimizer=2), 50)
    assert (found.device_optimizer, found.keep_activations) == (2, 4)


def test_the_fewest_layers_between_kept_inputs_that_fit():
    def kept(blocks: Blocks) -> int:
        between = blocks.checkpoint_interval
        return -(-blocks.num_layers // between) + between - 1 + bytes_of(blocks)

    asked = Blocks(
        num_layers=28, checkpoint_interval=AUTO, device_optimizer=AUTO, keep_activations=AUTO
    )
    for budget, interval in (
        (28, 1),
        (27, 2),
        (15, 2),
        (14, 3),
        (11, 4),
        (9, 4),
    ):  # of 10 by 4 as by 5, none fits 9
        assert (
            checkpoint_interval(
                asked, fits=lambda p, most=budget: kept(p) <= most, device_bytes=kept
            )
            == interval
        )


def test_room_between_the_points_of_the_grid_is_found():
    """As where state on disk leaves the host room for one number of blocks on the device alone."""
    auto = replace(BLOCKS, num_layers=68, device_optimizer=AUTO, keep_activations=0)
    for number in (7, 69):
        found = choose(
            auto,
            fits=lambda p: p.device_optimizer == number,  # noqa: B023
            device_bytes=bytes_of,
            step_s=lambda p: 1.0,
        )
        assert found.device_optimizer == number


@pytest.mark.parametrize("interval", [1, AUTO])
@pytest.mark.parametrize("host", [100, 262, 267, 310, 320, 400, 480, 700, 950, 970])
@pytest.mark.parametrize("wide", [0, 200])
@pytest.mark.parametrize("device", [0, AUTO])
def test_the_fewest_blocks_on_disk_with_which_some_placement_fits(host, interval, wide, device):
    """Of 70 blocks, of which the device has room for 11, and for one more without kept inputs. The
    state of outer ones passes through buffers that may be wide."""

    def fits(p: Blocks) -> bool:
        hosted = p.num_blocks - p.device_optimizer
        needed = 14 * hosted - 10 * p.disk_blocks + 30 * (p.disk_blocks > 0)
        needed += wide * (p.disk_blocks > p.num_layers)
        return p.disk_blocks <= hosted and needed <= host and room(p) <= 120

    def room(p: Blocks) -> int:
        return 10 * p.device_optimizer + 10 // p.checkpoint_interval

    options = {"device_optimizer": device, "checkpoint_interval": interval}
    asked = replace(BLOCKS, num_layers=68, disk_blocks=AUTO, **options)
    found = fewest_on_disk(asked, fits=fits, device_bytes=room)

    def some_fits(number: int) -> bool:
        return any(
            fits(replace(asked, disk_blocks=number, device_optimizer=here, checkpoint_interval=k))
            for here in (range(71) if device == AUTO else [device])
            for k in (asked.layers if interval == AUTO else [1])
        )

    assert some_fits(found) or found == 70
    assert not any(map(some_fits, range(found)))


def test_nothing_fits_is_the_smallest_for_plan_to_refuse():
    found = chosen(replace(BLOCKS, **dict.fromkeys(PLACED, AUTO)), -1)
    assert (found.device_optimizer, found.keep_activations, found.offload_activations) == (0, 0, 0)


@pytest.mark.parametrize("late_moments", [True, False])
def test_a_window_pays_for_its_last_updates_and_not_for_those_before_it(late_moments):
    """8 layers, 10 blocks: forward 80 ms, backward 240 ms with recomputation, updates 20 or 12 ms a
    block in forward order."""
    cost = cost_of(replace(BLOCKS, late_moments=late_moments))
    ops, seconds = operations(cost.blocks), cost.seconds
    steady, update = (
        simulate(ops, seconds).step_s,
        sum(seconds(op) for op in ops if op.kind is Kind.UPDATE),
    )
    first = window_s(ops, seconds, 1)
    alone = sum(seconds(op) for op in ops if op.lane == "compute")
    assert first == pytest.approx(
        alone + update, rel=1e-3
    )  # no update to wait for before it, nothing to hide the last one under
    windows = [window_s(ops, seconds, steps) for steps in (2, 3, 4)]
    assert [later - before for before, later in itertools.pairwise(windows)] == pytest.approx(
        [steady, steady], rel=1e-3
    )
    assert steady < windows[2] / 4 < windows[0] / 2 < first
    serial = operations(replace(BLOCKS, optimizer_overlap=False))
    assert window_s(serial, seconds, 3) == pytest.approx(
        3 * simulate(serial, seconds).step_s, rel=1e-3
    )


def test_a_timeline_is_the_last_whole_step_and_knows_what_is_hidden():
    intervals = [
        Interval(lane="compute", label="compute embed 0", start_s=0.0, end_s=1.0),
        Interval(lane="cpu", label="step 1", start_s=9.5, end_s=12.5),
        Interval(lane="compute", label="compute embed 0", start_s=10.0, end_s=11.0),
        Interval(lane="h2d", label="load 1", start_s=10.0, end_s=10.5),
        Interval(lane="compute", label="compute embed 0", start_s=13.0, end_s=14.0),
    ]
    timeline = last_step(intervals)
    assert timeline.step_s == pytest.approx(3.0)
    assert timeline.busy_s("cpu") == pytest.approx(2.5)  # what began in the step before is cut off
    assert timeline.hidden_share("cpu") == pytest.approx(1 / 2.5)
    assert timeline.hidden_share("h2d") == pytest.approx(1.0)
    assert timeline.hidden_share("d2h") is None
    with pytest.raises(ValueError, match="record more steps"):
        last_step(intervals[:1])


@pytest.mark.parametrize(("kept", "beside"), [(0, 1), (1, 0)])
def test_what_is_fetched_before_the_loss_is_planned_beside_the_logits(kept, beside):
    """Without kept activations one layer's come back while the logits are alive."""
    wide = work_of(8, widths=replace(WIDTHS, vocab=1 << 22))
    plain, offloaded = (
        device_bytes(replace(BLOCKS, keep_activations=kept, offload_activations=number), wide)
        for number in (0, 2)
    )
    assert offloaded["activations"] - plain["activations"] == beside * wide.moved_bytes
