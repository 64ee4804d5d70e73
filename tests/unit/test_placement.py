"""What is put into free device memory: costs of operations, the simulated step, and the choice against brute force."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.planner.cost import ADAMW_SHARE, LAYER_EFFICIENCY, UPDATE_BYTES, WEIGHTS_BYTES, Cost, Rates
from engine.store import HostSpec
from engine.layout import Layout, pack
from engine.pipeline import Pipeline
from engine.planner.placement import AUTO, EQUAL, RESIDENT, checkpoint_interval, choose
from engine.sizes import Widths
from engine.step import Op, build
from engine.timeline import Interval, last_step, simulate, window_s

NUMEL, TOKENS = 1 << 20, 100
WIDTHS = Widths(hidden=1, inner=1, queries=0, keys=0, vocab=1, heads=1)
RATES = Rates(
    matmul_flops=2 * NUMEL * TOKENS / 0.01 / LAYER_EFFICIENCY,
    adamw_params=NUMEL / 0.02 / ADAMW_SHARE,
    weights_params=NUMEL / 0.012 / ADAMW_SHARE,
    moments_params=NUMEL / 0.02 / ADAMW_SHARE,
    h2d_bytes=1e15,
    d2h_bytes=1e15,
    device_bytes=1e15,
)
"""10 ms a layer's forward, 20 ms a block's update (12 and 20 in two passes); transfers and the rest take next to nothing."""
PIPELINE = Pipeline(num_layers=8)
SHARED = 1 + 2 / UPDATE_BYTES
"""An update beside the loads of the forward takes that much longer: two bytes a parameter over its own."""


def layouts(num_layers: int = 8) -> list[Layout]:
    return [pack([("weight", torch.Size((NUMEL,)))]) for _ in range(num_layers + 2)]


def cost_of(pipeline: Pipeline, rates: Rates = RATES, *, compiled: bool = False) -> Cost:
    return Cost(
        pipeline=pipeline,
        layouts=layouts(pipeline.num_layers),
        widths=WIDTHS,
        shape=(1, 1, TOKENS),
        itemsize=2,
        activation_bytes=10**6,
        loss_chunk=TOKENS,
        compiled=compiled,
        rates=rates,
    )


def step_s(pipeline: Pipeline, rates: Rates = RATES, *, compiled: bool = False) -> float:
    return simulate(build(pipeline), cost_of(pipeline, rates, compiled=compiled).seconds).step_s


def bytes_of(pipeline: Pipeline) -> int:
    return 14 * pipeline.device_blocks + 5 * pipeline.kept_layers


def test_everything_on_the_host_waits_for_updates_and_recomputes():
    # 80 ms forward; the head's update ends after 10 x 20 ms, and its forward waits for it; then 8 x (10 + 20) ms backward.
    assert step_s(PIPELINE) == pytest.approx(0.200 * SHARED + 0.240, rel=1e-3)


def test_late_moments_leave_the_weights_alone_to_wait_for():
    # 10 x 12 ms, then 8 x (10 + 20) ms backward, with 10 x 20 ms of moments beside them.
    weights = 0.120 * (1 + 2 / WEIGHTS_BYTES)
    assert step_s(replace(PIPELINE, late_moments=True)) == pytest.approx(weights + 0.240, rel=1e-3)
    slow = replace(RATES, moments_params=NUMEL / 0.05 / ADAMW_SHARE)  # 10 x 50 ms: the backward waits for its slabs instead
    assert step_s(replace(PIPELINE, late_moments=True), slow) == pytest.approx(weights + 10 * 0.050, rel=1e-3)


def test_everything_on_the_device_is_forward_and_backward_alone():
    assert step_s(replace(PIPELINE, device_blocks=10, kept_layers=8)) == pytest.approx(0.080 + 0.160, rel=1e-3)


def test_without_clipping_updates_run_beside_the_backward():
    # The last gradients are those of layer 1 and embed; their updates, 20 ms each, are what the next forward waits for.
    assert step_s(replace(PIPELINE, clip=False)) == pytest.approx(0.080 + 0.240 + 0.040 * SHARED, rel=1e-3)


def test_bytes_of_an_update_are_those_of_its_arrays():
    held = HostSpec(layouts=layouts(1), dtype=torch.bfloat16, master="split", slabs={}).host_bytes()
    state, moments = (sum(held[kind] for kind in kinds) / (3 * NUMEL) for kinds in (("weights", "master", "moments"), ("moments",)))
    assert 2 * state + 2 == UPDATE_BYTES  # all of it read and written, the gradient read
    assert 2 * (state - moments) + moments + 2 == WEIGHTS_BYTES  # the moments are read only


def test_a_slow_link_bounds_the_step():
    loaded = 2 * NUMEL / 0.05  # 50 ms a layer each way
    slow = replace(RATES, h2d_bytes=loaded, d2h_bytes=loaded)
    # Every layer is loaded twice, embed and head once; then layer 1's backward, two stores, and embed's update.
    assert step_s(PIPELINE, slow) == pytest.approx(18 * 0.050 + 0.030 + 2 * 0.050 + 0.020 * SHARED, rel=1e-3)


def test_evictions_slow_the_optimizer_down_and_a_serial_one_has_the_memory_to_itself():
    offloaded = replace(PIPELINE, offloaded_layers=4)
    hosted = 10 * NUMEL
    updates = 0.200 * (1 + (2 * hosted + 4 * 10**6) / (UPDATE_BYTES * hosted))
    assert step_s(offloaded) == pytest.approx(updates + 0.240 - 4 * 0.010, rel=1e-2)
    assert step_s(replace(PIPELINE, overlap=False)) == pytest.approx(0.200 + 0.080 + 0.240, rel=1e-3)


def test_compiled_layers_leave_out_what_no_gradient_needs():
    cost = Cost(
        pipeline=PIPELINE,
        layouts=layouts(),
        widths=replace(WIDTHS, hidden=1 << 9, inner=1 << 10),
        shape=(1, 1, TOKENS),
        itemsize=2,
        activation_bytes=10**6,
        loss_chunk=TOKENS,
        compiled=True,
        rates=RATES,
    )
    forward, kept, backward = (
        cost.seconds(Op(kind="compute", phase=phase, block=1, lane="compute")) for phase in ("forward", "backward_kept", "backward")
    )
    assert backward == pytest.approx(kept + forward / 2)  # the last product is half of this layer


def test_a_chunked_mlp_is_computed_again_where_its_graph_is_kept_and_its_gradients_are_summed():
    def seconds(phase: str, **options: object) -> float:
        cost = replace(cost_of(PIPELINE), widths=replace(WIDTHS, hidden=1 << 9, inner=1 << 10), **options)
        return cost.seconds(Op(kind="compute", phase=phase, block=1, lane="compute"))

    slow = replace(RATES, device_bytes=1e9)
    forward, backward, kept = (seconds(phase) for phase in ("forward", "backward", "backward_kept"))
    assert seconds("forward", mlp_chunk=30) == forward
    assert seconds("backward", mlp_chunk=30) == pytest.approx(backward, rel=1e-3)
    products = 1.5 * forward  # three matrices, half the layer each
    assert seconds("backward_kept", mlp_chunk=30) == pytest.approx(kept + products, rel=1e-3)
    assert seconds("backward_kept", mlp_chunk=30, compiled=True) == pytest.approx(kept + forward, rel=1e-3)
    summed = 4 * 10 * 3 * (1 << 19) / 1e9  # chunks, bytes, parameters
    assert seconds("backward", mlp_chunk=30, rates=slow) == pytest.approx(seconds("backward", rates=slow) + summed)


def chosen(pipeline: Pipeline, budget: int) -> Pipeline:
    return choose(pipeline, fits=lambda p: bytes_of(p) <= budget, device_bytes=bytes_of, step_s=step_s)


@pytest.mark.parametrize("budget", [0, 13, 14, 40, 60, 100, 179, 180, 10**6])
def test_the_choice_is_the_best_that_fits(budget):
    found = chosen(replace(PIPELINE, device_blocks=AUTO, kept_layers=AUTO), budget)
    assert bytes_of(found) <= budget
    fitting = [
        other
        for device_blocks in range(11)
        for kept in range(9)
        if bytes_of(other := replace(PIPELINE, device_blocks=device_blocks, kept_layers=kept)) <= budget
    ]
    assert step_s(found) <= (1 + EQUAL) * min(map(step_s, fitting))


@pytest.mark.parametrize(("update_s", "on_host"), [(0.0001, False), (0.0005, False), (0.002, True)])
def test_what_costs_little_leaves_nothing_to_the_cpu(update_s, on_host):
    """The CPU's updates of some blocks hide behind the step, the device's hide nowhere: all of them there cost up to 2%."""
    rates = replace(RATES, device_bytes=UPDATE_BYTES * NUMEL / update_s)
    auto = replace(PIPELINE, device_blocks=AUTO, kept_layers=AUTO)
    found = choose(auto, fits=lambda p: True, device_bytes=bytes_of, step_s=lambda p: step_s(p, rates))
    fastest = min(step_s(replace(PIPELINE, device_blocks=blocks, kept_layers=8), rates) for blocks in range(11))
    assert step_s(found, rates) <= (1 + RESIDENT) * fastest
    assert (found.device_blocks < 10) is on_host
    assert chosen(auto, 179).device_blocks < 10  # no room: the rest as ever


def test_an_idle_link_takes_activations_and_a_slow_one_none():
    auto = replace(PIPELINE, device_blocks=10, offloaded_layers=AUTO)
    found = choose(auto, fits=lambda p: True, device_bytes=bytes_of, step_s=step_s)
    assert found.offloaded_layers == 8
    assert step_s(found) == pytest.approx(0.080 + 0.160, rel=1e-2)  # nothing is recomputed
    slow = replace(RATES, h2d_bytes=1e6 / 0.040, d2h_bytes=1e6 / 0.040)  # 40 ms a layer each way
    auto = replace(auto, evict_visits=4)
    found = choose(auto, fits=lambda p: True, device_bytes=bytes_of, step_s=lambda p: step_s(p, slow))
    assert 0 < found.offloaded_layers < 4


def test_a_number_given_is_kept():
    found = chosen(replace(PIPELINE, kept_layers=AUTO, device_blocks=2), 50)
    assert (found.device_blocks, found.kept_layers) == (2, 4)


def test_the_fewest_layers_between_kept_inputs_that_fit():
    def kept(pipeline: Pipeline) -> int:
        between = pipeline.checkpoint_interval
        return -(-pipeline.num_layers // between) + between - 1 + bytes_of(pipeline)

    asked = Pipeline(num_layers=28, checkpoint_interval=AUTO, device_blocks=AUTO, kept_layers=AUTO)
    for budget, interval in ((28, 1), (27, 2), (15, 2), (14, 3), (11, 4), (9, 4)):  # of 10 by 4 as by 5, none fits 9
        assert checkpoint_interval(asked, fits=lambda p, most=budget: kept(p) <= most, device_bytes=kept) == interval


def test_nothing_fits_is_the_smallest_for_plan_to_refuse():
    found = chosen(replace(PIPELINE, device_blocks=AUTO, kept_layers=AUTO, offloaded_layers=AUTO), -1)
    assert (found.device_blocks, found.kept_layers, found.offloaded_layers) == (0, 0, 0)


@pytest.mark.parametrize("late_moments", [True, False])
def test_a_window_pays_for_its_last_updates_and_not_for_those_before_it(late_moments):
    """8 layers, 10 blocks: forward 80 ms, backward 240 ms with recomputation, updates 20 or 12 ms a block in forward order."""
    cost = cost_of(replace(PIPELINE, late_moments=late_moments))
    ops, seconds = build(cost.pipeline), cost.seconds
    steady, update = simulate(ops, seconds).step_s, sum(seconds(op) for op in ops if op.kind == "step")
    first = window_s(ops, seconds, 1)
    alone = sum(seconds(op) for op in ops if op.lane == "compute")
    assert first == pytest.approx(alone + update, rel=1e-3)  # no update to wait for before it, nothing to hide the last one under
    windows = [window_s(ops, seconds, steps) for steps in (2, 3, 4)]
    assert [later - before for before, later in itertools.pairwise(windows)] == pytest.approx([steady, steady], rel=1e-3)
    assert steady < windows[2] / 4 < windows[0] / 2 < first
    serial = build(replace(PIPELINE, overlap=False))
    assert window_s(serial, seconds, 3) == pytest.approx(3 * simulate(serial, seconds).step_s, rel=1e-3)


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
