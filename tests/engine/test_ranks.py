"""Several ranks train as one does, and whatever the pipeline give each other the same bits."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import EngineConfig, Group, Machine, MegaTrain, NonFiniteLossError, Ranks, Recipe
from engine.layout import BLOCK_ALIGNMENT, pack, within
from engine.step import Kind, operations
from tests.models import H200, assert_same, make_batch, make_engine, make_model
from tests.threads import ThreadRank, on_ranks
from tests.twin import TwinLanes

RECIPE = Recipe(lr=1e-3, clip_norm=0.5)
Case = tuple[torch.dtype, float, int, bool]
"""dtype, clip_norm, micro-batches, tied."""
ROWS = 4


@cache
def model_of(dtype: torch.dtype, tied: bool) -> torch.nn.Module:
    return make_model("qwen2", num_hidden_layers=3, dtype=dtype, tie_word_embeddings=tied)


for found in itertools.product((torch.float32, torch.bfloat16), (False, True)):
    model_of(*found)  # in one thread, for whoever imports this: they draw from one generator


def batch_of(step: int, micro_batches: int) -> Any:
    """The last rank has fewer label tokens than the others."""
    batch = make_batch(step, micro_batches=micro_batches, rows=ROWS)
    labels = batch.labels.clone()
    labels[:, -1, 5:] = -100
    return replace(batch, labels=labels)


def engine_of(case: Case, ranks: Ranks | None = None, **pipeline: Any) -> MegaTrain:
    dtype, clip_norm, micro_batches, tied = case
    recipe, batch = replace(RECIPE, clip_norm=clip_norm), batch_of(0, micro_batches)
    model = model_of(dtype, tied)
    return make_engine(model, recipe=recipe, batch=batch, ranks=ranks, **pipeline)


def trained(
    case: Case, num_steps: int, ranks: Ranks | None = None, **pipeline: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_of(case, ranks, **pipeline)
    try:
        found = [engine.train_step(batch_of(step, case[2])) for step in range(num_steps)]
        engine.drain()
        found.append(engine.evaluate(batch_of(99, case[2])))
        return [loss.item() for loss in found], dict(engine.parameters())
    finally:
        engine.close()


@cache
def alone(case: Case, num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(case, num_steps)


SPREAD: list[tuple[Case, int, dict[str, Any]]] = [
    ((torch.float32, 0.5, 1, True), 2, {"depth": 1}),
    ((torch.float32, 0.5, 3, False), 4, {"depth": 3, "checkpoint_interval": 2}),
    ((torch.float32, 0.0, 3, True), 4, {"device_optimizer": 3, "keep_activations": 1}),
    ((torch.float32, 0.5, 1, False), 4, {"device_optimizer": 5, "streams": 1}),
    ((torch.float32, 0.0, 1, False), 2, {"gradient_slabs": 2, "streams": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "count", "pipeline"), SPREAD, ids=str)
def test_fp32_50_steps_are_those_of_one_rank(case, count, pipeline):
    expected = alone(case, 50)
    found = on_ranks(count, lambda ranks: trained(case, 50, ranks, **pipeline))
    for other in found[1:]:
        assert_same(other, found[0])
    losses, parameters = found[0]
    torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [2, 4])
def test_what_decays_decays_wherever_it_lies(count, monkeypatch):
    """Matrices alone: every rank's part has several stretches of its own."""
    recipe = replace(RECIPE, decayed="matrices", weight_decay=0.5)
    monkeypatch.setattr("tests.engine.test_ranks.RECIPE", recipe)
    case = (torch.float32, 0.5, 1, False)
    expected = trained(case, 5)[1]
    for _, found in on_ranks(count, lambda ranks: trained(case, 5, ranks)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("master", ["split", "fp32", "bf16"])
def test_bf16_losses_are_those_of_one_rank(count, master):
    case = (torch.bfloat16, 0.5, 2, False)
    found = on_ranks(count, lambda ranks: trained(case, 10, ranks, master=master))
    assert found[0][0] == pytest.approx(trained(case, 10, master=master)[0], abs=2e-3)


PROCESSES: list[tuple[Case, dict[str, Any]]] = [
    ((torch.float32, 0.5, 3, True), {"device_optimizer": 2}),
    ((torch.bfloat16, 0.5, 1, False), {"depth": 3}),
    ((torch.bfloat16, 0.0, 1, True), {"device_optimizer": 5}),
]


def a_process(index: int, count: int, folder: Path) -> None:
    """One rank of torch's own group, which saves a state too and resumes it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=where, rank=index, world_size=count)
    ranks = Group(count)
    assert ranks.joined
    found = [trained(case, 10, ranks, **pipeline) for case, pipeline in PROCESSES]
    engine = engine_of(PROCESSES[0][0], ranks)
    engine.train_step(batch_of(0, 3))
    engine.save(folder / "state")
    before = dict(engine.parameters())
    engine.train_step(batch_of(1, 3))
    engine.resume(folder / "state")
    assert all(torch.equal(value, before[name]) for name, value in engine.parameters())
    engine.close()
    if index == count - 1:
        torch.save(found, folder / "found")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_with_gloo_give_the_bits_that_threads_give(count, tmp_path):
    """Nothing is summed by a library, so that how ranks talk changes nothing."""
    torch.multiprocessing.spawn(a_process, (count, tmp_path), nprocs=count)
    for (case, pipeline), found in zip(PROCESSES, torch.load(tmp_path / "found"), strict=True):
        assert_same(found, on_ranks(count, partial(trained, case, 10, **pipeline))[0])


PIPELINES: list[dict[str, Any]] = [
    {"depth": 1, "streams": 1},
    {"depth": 3, "streams": 2, "checkpoint_interval": 3, "gradient_slabs": 2},
    {"optimizer_overlap": False, "gradient_slabs": 2},
    {"late_moments": False, "device_optimizer": 2},
    {"device_optimizer": 5, "keep_activations": 3},
    {"offload_activations": 2, "keep_activations": 1, "device_optimizer": 1},
    {"keep_activations": 3, "reload_weights": 1},
    {"checkpoint_interval": 3, "keep_attention": 2},
    {"checkpoint_interval": 2, "offload_attention": 3},
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize(
    "case", [(torch.float32, 0.5, 1, True), (torch.bfloat16, 0.0, 2, False)], ids=str
)
def test_a_pipeline_changes_no_bit(case, pipeline):
    expected = on_ranks(2, lambda ranks: trained(case, 3, ranks))
    for found in on_ranks(2, lambda ranks: trained(case, 3, ranks, **pipeline)):
        assert_same(found, expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
def test_adversarial_interleaving_changes_no_bit(clip_norm, seed):
    """Every rank in an order of its own; only the order in which they talk is the same."""
    case = (torch.float32, clip_norm, 1, True)
    pipeline = {"depth": 1 + seed % 3, "device_optimizer": 2 * (seed % 2)}
    expected = on_ranks(2, lambda ranks: trained(case, 3, ranks))[0]

    def delayed(ranks: Ranks) -> Any:
        lanes = TwinLanes(seed=seed * 2 + ranks.index)
        return trained(case, 3, ranks, lanes=lanes, poison=True, **pipeline)

    for found in on_ranks(2, delayed):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER, Kind.LOAD, Kind.STORE])
def test_the_twin_finds_a_missing_wait(kind):
    case = (torch.float32, 0.5, 1, True)
    expected = on_ranks(2, lambda ranks: trained(case, 3, ranks))[0]

    def hasty(ranks: Ranks, seed: int) -> Any:
        lanes = TwinLanes(seed=seed)  # the same on both: they talk in one order all the same
        engine = engine_of(case, ranks, lanes=lanes, poison=True)
        executor = engine.executor
        executor.ops = tuple(
            replace(op, waits=()) if op.kind is kind else op for op in executor.ops
        )
        return train_here(engine)

    def train_here(engine: MegaTrain) -> Any:
        losses = [engine.train_step(batch_of(step, 1)) for step in range(3)]
        engine.drain()
        return [loss.item() for loss in losses], dict(engine.parameters())

    for seed in range(12):
        try:
            losses, parameters = on_ranks(2, lambda ranks, seed=seed: hasty(ranks, seed))[0]
        except (NonFiniteLossError, AssertionError, KeyError):
            return
        if losses != expected[0][:3] or any(
            not torch.equal(value, expected[1][name]) for name, value in parameters.items()
        ):
            return
    pytest.fail(f"nobody noticed that {kind} waits for nothing")


def test_each_rank_holds_and_moves_its_part():
    """Host bytes and host traffic are those of one rank, divided."""
    case = (torch.bfloat16, 0.5, 1, False)
    one = engine_of(case)
    one.train_step(batch_of(0, 1))

    def seen(ranks: Ranks) -> Any:
        engine = engine_of(case, ranks)
        engine.train_step(batch_of(0, 1))
        engine.drain()
        return engine.counters(), engine.plan(), engine.store

    padded = sum(-(-layout.numel // 4096) * 4096 for layout in one.work.layouts)
    for counters, plan, store in on_ranks(2, seen):
        assert counters["d2h_bytes"] == 2 * padded // 2
        assert plan.host["moments"] == 8 * padded // 2
        assert sum(state.weight.numel() for state in store.states) == padded // 2
        assert sum(state.exp_avg.numel() for state in store.states) == padded // 2
        assert sum(slab.numel() for slab in store.slabs.values()) == padded // 2


def test_ranks_talk_in_one_order():
    """Whatever their lanes do: a scatter a gradient, a gather a load, one verdict a step."""

    def calls(ranks: ThreadRank) -> list[tuple[str, int]]:
        engine = engine_of((torch.float32, 0.5, 1, True), ranks, lanes=TwinLanes(seed=ranks.index))
        engine.train_step(batch_of(0, 1))
        engine.drain()
        first = len(ranks.calls)
        engine.train_step(batch_of(1, 1))
        engine.drain()
        return ranks.calls[first:]

    one, other = on_ranks(2, calls)
    assert one == other
    names = [name for name, _ in one]
    assert {name: names.count(name) for name in names} == {
        "gather": 5 + 3,
        "exchange": 5,
        "stacked": 1,
    }


def test_a_loss_that_is_not_finite_is_every_rank_s():
    """One rank's rows alone have it."""
    case = (torch.float32, 0.5, 1, False)

    def broken(ranks: Ranks) -> str:
        engine = engine_of(case, ranks)
        before = dict(engine.parameters())
        if ranks.index:  # an embedding that the other rank's rows need not have
            executor = engine.executor
            tail = executor.handlers[Kind.TAIL]

            def spoiled(op: Any, s: Any) -> None:
                tail(op, s)
                s.loss.fill_(torch.nan)

            executor.handlers[Kind.TAIL] = spoiled
        with pytest.raises(NonFiniteLossError) as error:
            train_one(engine)
        after = dict(engine.parameters())
        assert all(torch.equal(after[name], value) for name, value in before.items())
        return str(error.value)

    def train_one(engine: MegaTrain) -> None:
        engine.train_step(batch_of(0, 1))
        engine.drain()

    one, other = on_ranks(2, broken)
    assert one == other
    assert one.startswith("step 0: loss nan")


def test_a_rank_that_fails_lets_the_others_fail():
    def fails(ranks: Ranks) -> None:
        engine = engine_of((torch.float32, 0.5, 1, False), ranks)
        if ranks.index:
            raise MemoryError("here")
        engine.train_step(batch_of(0, 1))

    with pytest.raises(MemoryError, match="here"):
        on_ranks(2, fails)


def test_a_parameter_that_one_rank_alone_uses_is_updated_on_all(monkeypatch):
    """Torch's optimizers leave a parameter alone that gets no gradient; here some rank's did."""
    case = (torch.float32, 0.5, 1, False)

    def partly(ranks: Ranks) -> dict[str, torch.Tensor]:
        engine = engine_of(case, ranks)
        before = dict(engine.parameters())
        reached = engine.executor._note

        def less(op: Any, found: tuple[bool, ...]) -> None:
            reached(op, (False,) * len(found) if op.block == 2 and ranks.index else found)

        monkeypatch.setattr(engine.executor, "_note", less)
        engine.train_step(batch_of(0, 1))
        engine.drain()
        return {k: v - before[k] for k, v in engine.parameters() if "layers.1." in k}

    for changed in on_ranks(2, partly):
        assert all(change.abs().max() > 0 for change in changed.values())


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_equal_and_cover_the_block(count):
    layout = pack([("a", torch.Size([3000])), ("b", torch.Size([70, 70]))]).in_parts(count)
    parts = [Ranks(index=index, count=count).part(layout.numel) for index in range(count)]
    assert {part.stop - part.start for part in parts} == {layout.numel // count}
    assert all(part.start % BLOCK_ALIGNMENT == 0 for part in parts)
    flat = torch.arange(layout.numel)
    assert torch.equal(torch.cat([flat[part] for part in parts]), flat)
    for field in layout.fields:
        found = torch.cat([flat[part][within(field.stretch, part)] for part in parts])
        assert torch.equal(found, flat[field.stretch])


def test_gradients_of_ranks_are_summed_in_fp32_and_rounded_once():
    """In bf16 what is small beside the first would be lost one after the other."""
    case = (torch.bfloat16, 0.5, 1, False)
    values = (256.0, 1.0, 1.0, 1.0)

    def summed(ranks: Ranks) -> list[float]:
        engine = engine_of(case, ranks)
        (op,) = (o for o in engine.executor.ops if o.kind is Kind.SCATTER and o.block == 2)
        engine.executor.memory.slab(op).fill_(values[ranks.index])
        return engine.executor.memory.scatter(op).unique().tolist()

    expected = torch.tensor(sum(values)).bfloat16().item()
    assert on_ranks(4, summed) == [[expected]] * 4
    assert expected != 256.0


RATES = replace(H200, peer_bytes=1e11)


def planner_of(num_ranks: int, rates: Any = RATES, **blocks: Any) -> Any:
    """One that plans for a GPU, and what it decided."""
    case = (torch.bfloat16, 0.5, 1, False)
    ranks = Ranks(count=num_ranks) if num_ranks > 1 else None
    engine = engine_of_plan(case, ranks, machine=Machine(rates=rates), **blocks)
    return engine._planner, engine.blocks


def engine_of_plan(case: Case, ranks: Ranks | None, **arguments: Any) -> MegaTrain:
    model = model_of(case[0], case[3])
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    machine, folders = arguments.pop("machine"), arguments.pop("folders", ())
    return MegaTrain(
        skeleton.to(case[0]),
        recipe=RECIPE,
        micro_batch_size=ROWS,
        seq_len=16,
        dtype=case[0],
        config=EngineConfig(**arguments),
        machine=machine,
        ranks=ranks,
        folders=folders,
    )


def test_a_prediction_knows_the_ranks():
    """Links and devices have a part each, the CPU has them all, and talking has a price."""
    found = {}
    for count in (1, 4):
        planner, blocks = planner_of(count, device_optimizer=2)
        seconds = planner._cost(blocks).seconds
        numel = planner.work.layouts[3].numel  # parts of a block are padded
        found[count] = {(op.kind, op.block): seconds(op) / numel for op in operations(blocks)}
    one, four = found[1], found[4]
    for kind in (Kind.LOAD, Kind.STORE):
        assert four[kind, 3] == pytest.approx(one[kind, 3] / 4)
    assert four[Kind.UPDATE_HERE, 1] == pytest.approx(one[Kind.UPDATE_HERE, 1] / 4)
    assert four[Kind.UPDATE, 3] == pytest.approx(one[Kind.UPDATE, 3], rel=0.05)
    assert four[Kind.GATHER, 3] * numel == pytest.approx(2 * numel * 3 / 4 / 1e11)
    assert four[Kind.SCATTER, 3] > four[Kind.GATHER, 3]


def test_ranks_without_a_rate_of_what_they_say_are_refused_in_a_line():
    said = r"^rates.peer_bytes: got 0, allowed > 0 with 2 ranks, bytes that a device gets from the"
    planner, blocks = planner_of(2, rates=H200)
    with pytest.raises(ValueError, match=said):
        planner.predict(blocks)
    planner, blocks = planner_of(1, rates=H200)
    assert planner.predict(blocks).step_s > 0


def test_rates_are_the_first_rank_s_on_all(monkeypatch):
    """Each would choose a placement of its own, and then wait for the others for ever."""
    probed, layers = list[int](), list[int]()

    def measure(device: Any, threads: Any, layer_numel: int, **_: Any) -> Any:
        probed.append(layer_numel)
        return H200

    monkeypatch.setattr("engine.planner.planner.measure", measure)
    monkeypatch.setattr("engine.planner.planner.peer_rate", lambda _, ranks: 1e11 + ranks.index)

    def rates(ranks: Ranks) -> Any:
        case = (torch.bfloat16, 0.5, 1, False)
        planner = engine_of_plan(case, ranks, machine=Machine())._planner
        layers.append(planner.work.layouts[1].numel)
        return planner._probed()  # before Python 3.12 one lock is every cached property's

    assert on_ranks(2, rates) == [RATES, RATES]
    assert probed == layers[:1], "by one, on a block as large as a layer"


def test_rows_that_ranks_do_not_divide_are_refused():
    said = "^ranks: got 3, allowed a divisor of the 4 rows of a micro-batch; change one of them$"
    with pytest.raises(ValueError, match=said):
        engine_of((torch.float32, 0.5, 1, False), Ranks(count=3))


def test_threads_meet_in_the_same_call():
    """The stand-in itself: ranks that ask different things are found."""

    def confused(ranks: Ranks) -> None:
        ask = ranks.gather if ranks.index else lambda flat: ranks.exchange(flat, flat.clone())
        ask(torch.zeros(8))

    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        on_ranks(2, confused)
