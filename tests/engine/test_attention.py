"""Attention's results, kept for the recomputation: it runs once, and every bit is what it was."""

import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import EngineConfig, Machine, MegaTrain, Rates, Recipe
from engine.blocks import Blocks
from engine.layers.attention import _MODE, _PLAIN, KERNELS, Results
from engine.layers.live import LiveBytes
from engine.step import Kind, operations
from tests.models import assert_same, make_batch, make_engine, make_model, train
from tests.twin import TwinLanes

LAYERS, MICRO_BATCHES = 4, 2


class Counting(TorchDispatchMode):
    """Attention kernels that really run."""

    ran = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran += func in KERNELS
        return func(*args, **(kwargs or {}))


def engine_of(model: torch.nn.Module, **options: Any):
    return make_engine(model, batch=make_batch(0, micro_batches=MICRO_BATCHES), **options)


PLACEMENTS = [
    {},
    {"checkpoint_interval": 2, "depth": 1},
    {"checkpoint_interval": 3, "mlp_chunk": 5},
    {"keep_activations": 1, "offload_activations": 1},
]


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_layers_gives_identical_bits(models, dtype, placement, number) -> None:
    expected = train(engine_of(models[dtype], **placement), micro_batches=MICRO_BATCHES)
    kept = engine_of(
        models[dtype], keep_attention=number, poison=True, lanes=TwinLanes(seed=1), **placement
    )
    assert_same(train(kept, micro_batches=MICRO_BATCHES), expected)


@pytest.mark.parametrize("numbers", [(0, 4), (1, 2), (3, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_on_the_host_gives_identical_bits(
    models, dtype, placement, numbers, monkeypatch
) -> None:
    """numbers: of layers that keep it on the device, and that have it on the host."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    expected = train(engine_of(models[dtype], **placement), micro_batches=MICRO_BATCHES)
    kept, moved = numbers
    found = engine_of(
        models[dtype],
        keep_attention=kept,
        offload_attention=moved,
        poison=True,
        lanes=TwinLanes(seed=1),
        **placement,
    )
    assert_same(train(found, micro_batches=MICRO_BATCHES), expected)


@pytest.mark.parametrize(("interval", "times"), [(1, 1), (2, 1.5), (4, 1.75)])
def test_it_comes_back_for_each_time_that_the_layer_runs_again(
    models, interval, times, monkeypatch
) -> None:
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    copied = []
    for number in (0, LAYERS):
        engine = engine_of(
            models[torch.float32], offload_attention=number, checkpoint_interval=interval
        )
        for _ in range(2):  # the first step of a kind of layer keeps nothing
            before, counting = dict(engine.counters()), Counting()
            with counting:
                engine.train_step(make_batch(0, micro_batches=MICRO_BATCHES))
        now = engine.counters()
        copied.append([now[name] - before[name] for name in ("d2h_bytes", "h2d_bytes")])
    assert counting.ran == LAYERS * MICRO_BATCHES
    moved = LAYERS * engine.work.attention_bytes
    out, back = (there - here for here, there in zip(*copied, strict=True))
    assert (out, back) == (moved, times * moved)


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_at_most_two_layers_have_it_on_the_device_at_a_time(interval) -> None:
    blocks = Blocks(num_layers=6, checkpoint_interval=interval, offload_attention=6)
    here, most = set(), 0
    for op in operations(blocks):
        if op.kind in (Kind.FORWARD, Kind.STAGE):
            here.add(op.block)
        most = max(most, len(here))
        if op.kind in (Kind.DROP, Kind.BACKWARD):
            here.remove(op.block)
    assert (most, here) == (2, set())


def slack(monkeypatch, **options: Any) -> tuple[float, float]:
    """Bytes that the plan has for activations beyond the most that were alive in a step, and what
    attention gives for one micro-batch, both in hidden states. Attention's kernel on a CPU takes
    nothing for itself."""
    monkeypatch.setattr("engine.activations.kernel_bytes", lambda *_: 0)
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    shape: Any = {"num_hidden_layers": 6, "dtype": torch.bfloat16, "max_position_embeddings": 1024}
    batch = make_batch(0, rows=1, seq_len=1024, micro_batches=MICRO_BATCHES)
    engine = make_engine(make_model("qwen2", **shape), batch=batch, loss_chunk=128, **options)
    engine.train_step(batch)
    engine.drain()
    existing = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    with LiveBytes(existing) as live:
        engine.train_step(batch)
    planned, work = engine.plan().device, engine.work
    known = sum(planned.get(kind, 0) for kind in ("checkpoints", "activations", "attention"))
    one = work.attention_bytes / MICRO_BATCHES
    return (known - live.most) / work.hidden_bytes, one / work.hidden_bytes


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("chunk", [0, 64])
def test_the_plan_has_its_bytes_once(interval, chunk, monkeypatch) -> None:
    given = {"mlp_chunk": chunk, "checkpoint_interval": interval}
    without, _ = slack(monkeypatch, **given)
    for kept, moved in ((6, 0), (2, 4), (0, 6)):
        numbers = {"keep_attention": kept, "offload_attention": moved}
        with_it, _ = slack(monkeypatch, **given, **numbers)
        assert with_it == pytest.approx(without, abs=0.3), numbers


def test_what_is_left_of_a_group_lies_beside_what_comes_from_the_host(monkeypatch) -> None:
    """While the group runs again, no graph is there: the plan has one layer too many at most."""
    given = {"mlp_chunk": 64, "checkpoint_interval": 3}
    (without, one), (with_it, _) = (
        slack(monkeypatch, **given, **numbers)
        for numbers in ({}, {"keep_attention": 1, "offload_attention": 5})
    )
    assert without - 0.3 <= with_it <= without + MICRO_BATCHES * one + 0.3


@pytest.mark.parametrize(("interval", "once"), [(1, 2), (2, 2.5)])
def test_attention_of_a_layer_runs_once_a_step(models, interval, once) -> None:
    """Twice without, and of a layer that is no group's last three times."""
    ran = []
    for number in (0, 3, LAYERS):
        engine = engine_of(
            models[torch.float32], keep_attention=number, checkpoint_interval=interval
        )
        for _ in range(2):  # the first step of a kind of layer keeps nothing
            counting = Counting()
            with counting:
                engine.train_step(make_batch(0, micro_batches=MICRO_BATCHES))
        ran.append(counting.ran)
    assert ran[0] == once * LAYERS * MICRO_BATCHES
    assert ran[-1] == LAYERS * MICRO_BATCHES
    assert ran[0] > ran[1] > ran[2]


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
def test_the_first_step_keeps_it_of_all_but_the_first_layer(family) -> None:
    """In chunks too, whether or not a recomputation needs the MLP's output."""
    engine = make_engine(make_model(family), keep_attention=3, mlp_chunk=8)
    ran = []
    for _ in range(2):
        counting = Counting()
        with counting:
            engine.train_step(make_batch(0))
        ran.append(counting.ran)
    layers = engine.blocks.num_layers
    assert ran == [layers + 1, layers]


def test_a_first_forward_that_runs_twice_keeps_nothing(models, monkeypatch) -> None:
    """As on a GPU whose attention moves the generator of random numbers, dropping nothing."""

    def twice(module, device, run, *, again):
        result = run()
        again()
        return result

    expected = train(engine_of(models[torch.float32]), micro_batches=MICRO_BATCHES)
    monkeypatch.setattr("engine.layers.template.refuse_random", twice)
    kept = engine_of(models[torch.float32], keep_attention=LAYERS)
    assert_same(train(kept, micro_batches=MICRO_BATCHES), expected)


@pytest.mark.parametrize("kept", [{"keep_attention": 2}, {"offload_attention": 2}], ids=str)
@pytest.mark.parametrize("interval", [1, 2])
def test_a_first_recomputation_that_runs_twice_keeps_nothing(kept, interval, monkeypatch) -> None:
    """A chunked MLP that a norm reads is run again in full, once its first graph has shown that, of
    a layer that could not be tried before."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)
    monkeypatch.setattr("engine.layers.rehearsal._try_layer", lambda *_: None)
    model, pipeline = make_model("olmo2"), {"mlp_chunk": 4, "checkpoint_interval": interval}
    expected = train(engine_of(model, **pipeline), micro_batches=MICRO_BATCHES)
    found = train(engine_of(model, **pipeline, **kept), micro_batches=MICRO_BATCHES)
    assert_same(found, expected)


def test_what_is_no_fused_kernel_is_computed_again() -> None:
    model = make_model("gemma2", attention="eager", head_dim=8)
    found = [train(make_engine(model, keep_attention=number)) for number in (0, 3)]
    assert_same(*found)


def test_documents_in_one_sequence_still_do_not_see_each_other() -> None:
    model = make_model("qwen2")
    batch = make_batch(0)
    places = torch.cat((torch.arange(7), torch.arange(9))).expand(*batch.tokens.shape)
    packed = type(batch)(tokens=batch.tokens, labels=batch.labels, position_ids=places)
    found = []
    for number in (0, 3):
        engine = make_engine(model, batch=packed, keep_attention=number)
        losses = [engine.train_step(packed).item() for _ in range(3)]
        found.append((losses, dict(engine.parameters())))
    assert_same(*found)


def test_results_are_given_in_order_and_another_kernel_is_noticed() -> None:
    query = torch.randn(1, 2, 8, 4)
    results = Results()
    with results.kept():
        first, second = (
            torch.nn.functional.scaled_dot_product_attention(q, q, q) for q in (query, -query)
        )
    assert torch.nn.functional.scaled_dot_product_attention is _PLAIN
    assert _MODE.get() is None
    with results.given(last=True):
        again = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        other = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert torch.equal(again, first)
    assert torch.equal(other, second)  # given, not computed
    with results.given(last=True), pytest.raises(AssertionError, match="for the last time"):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)


def planned(
    room: float, *, host: int | None = None, layers: int = LAYERS, seq_len: int = 16, **options: Any
) -> MegaTrain:
    """An engine for a GPU with `room` bytes to fill. Nothing is allocated, so none is needed."""
    names = ("matmul_flops", "adamw_params", "weights_params", "moments_params")
    names += ("h2d_bytes", "d2h_bytes", "device_bytes")
    rates, memory = Rates(**dict.fromkeys(names, 1e12)), int(room / 0.94) + 1
    return MegaTrain(
        make_model("qwen2", num_hidden_layers=layers),
        recipe=Recipe(lr=1e-3),
        micro_batch_size=2,
        seq_len=seq_len,
        num_micro_batches=MICRO_BATCHES,
        device="cuda",
        machine=Machine(rates=rates, device_memory=memory, host_memory=host),
        config=EngineConfig(**options),
    )


def test_as_many_as_there_is_room_for() -> None:
    plain = planned(1e12).plan().device_bytes
    each = planned(1e12, keep_attention=1).plan().device["attention"]
    assert each == MICRO_BATCHES * 2 * 16 * (32 * 2 + 4 * 4)  # tokens, queries and heads
    # one micro-batch's of one layer are planned already, where the layer computes them again
    for more, number in ((0, 0), (2.25, 2), (2.75, 3), (99, LAYERS)):
        engine = planned(plain + more * each, keep_attention=-1)
        assert len(engine.blocks.attention_kept) == number
        assert engine.placement.get("kept_attention", 0) == number
    assert not planned(1e12, keep_attention=-1, compile=True).blocks.attention_kept
    # on the host what the device has no room for; two layers that come and go need room too
    plan = planned(plain + 1.75 * each, keep_attention=0, offload_attention=-1)
    assert (plan.blocks.keep_attention, len(plan.blocks.attention_moved)) == (0, LAYERS)
    assert plan.placement["offloaded_attention"] == LAYERS == plan.placement["kept_attention"]
    assert plan.plan().device["attention"] == 2 * each
    more = planned(plain + 2.75 * each, keep_attention=-1, offload_attention=-1)
    assert (more.blocks.keep_attention, len(more.blocks.attention_moved)) == (3, LAYERS - 3)
    all_here = planned(1e12, keep_attention=-1, offload_attention=-1)
    assert (all_here.blocks.keep_attention, all_here.blocks.attention_moved) == (LAYERS, [])
    assert LAYERS * each <= plan.plan().host["activations"] <= LAYERS * (1.1 * each + 4096)
    one, all_of_them = planned(1e12, keep_attention=1), planned(1e12, keep_attention=-1)
    assert all_of_them.predict().step_s < one.predict().step_s < planned(1e12).predict().step_s


@pytest.mark.parametrize(("results", "interval"), [(0, 2), (3, 3), (6, 3)])
def test_the_inputs_kept_are_as_many_as_make_the_shortest_step(results: int, interval: int) -> None:
    """Inputs and attention's results take the same room: held against trying every interval.
    results: how many find room on the host."""
    sizes: dict[str, Any] = {"layers": 12, "seq_len": 4096}
    chosen = {"keep_attention": -1, "offload_attention": -1}
    each = planned(1e12, keep_attention=1, **sizes).plan().device["attention"]
    room = planned(1e12, checkpoint_interval=2, **sizes).plan().device_bytes + each
    host = int((planned(1e12, **sizes).plan().host_bytes + (results + 0.5) * each) / 0.9)
    all_of_them = [
        planned(room, host=host, checkpoint_interval=number, **chosen, **sizes)
        for number in range(1, 8)
    ]
    steps = [
        engine.predict().step_s for engine in all_of_them if engine.plan().device_bytes <= room
    ]
    engine = planned(room, host=host, checkpoint_interval=-1, **chosen, **sizes)
    assert engine.plan().device_bytes <= room
    assert engine.predict().step_s == min(steps)
    assert engine.blocks.checkpoint_interval == interval


def test_layers_that_are_compiled_whole_cannot_keep_it() -> None:
    with pytest.raises(ValueError, match=r"^system\.keep_attention: got 2, allowed 0 or -1 where"):
        EngineConfig(keep_attention=2, compile=True)
    EngineConfig(keep_attention=2, compile=True, mlp_chunk=8)
