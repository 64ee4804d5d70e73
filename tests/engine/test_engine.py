"""The engine as a machine: any pipeline gives the same bits, races become wrong numbers, state
survives a restart."""

import contextvars
import itertools
import math
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from engine import Batch, EngineConfig, MegaTrain, NonFiniteLossError, Recipe, trainer
from engine.device import Gradients
from engine.layers.decoder import Call
from engine.layers.template import Template
from engine.step import Kind
from tests.models import (
    assert_same,
    engine_gradients,
    make_batch,
    make_engine,
    make_model,
    plain_loss,
    train,
    weights_of,
)
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow

RECIPE = Recipe(lr=1e-2, clip_norm=0.5)


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """The tensors of these models are small: without this none would be offloaded."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_any_depth_streams_interval_and_slabs_give_identical_bits(models, dtype, micro_batches):
    batch = make_batch(0, micro_batches=micro_batches)
    reference = None
    for depth, streams, interval, slabs in itertools.product(
        (1, 2, 3), (1, 2, 3), (1, 2, 4), (0, 2)
    ):
        if (
            depth + streams + interval
        ) % 3 and reference:  # a third of the combinations, every value of each
            continue
        engine = make_engine(
            models[dtype],
            recipe=RECIPE,
            batch=batch,
            depth=depth,
            streams=streams,
            checkpoint_interval=interval,
            gradient_slabs=slabs,
            optimizer_overlap=bool(slabs) is (depth == 2),
            late_moments=streams > 1,
            poison=True,
        )
        found = train(engine, micro_batches=micro_batches)
        reference = reference or found
        assert_same(found, reference)


def test_a_serial_optimizer_without_clipping_gives_identical_bits(models):
    recipe = replace(RECIPE, clip_norm=0.0)
    expected = train(make_engine(models[torch.float32], recipe=recipe))
    serial = {"optimizer_overlap": False, "gradient_slabs": 2, "poison": True}
    assert_same(
        train(make_engine(models[torch.float32], recipe=recipe, lanes=TwinLanes(seed=3), **serial)),
        expected,
    )


def test_a_recording_that_fails_leaves_nothing_that_records(models):
    engine = make_engine(models[torch.float32])
    engine.store.states[2].weight.fill_(math.nan)
    with pytest.raises(NonFiniteLossError):
        engine.record([make_batch(0), make_batch(1)])
    engine.store.states[2].weight.zero_()
    engine.train_step(make_batch(2))
    with pytest.raises(AssertionError, match="start_recording comes first"):
        engine.executor.lanes.recorded()


def test_a_recorded_step_has_every_operation_of_the_schedule_and_changes_nothing(models):
    expected = train(make_engine(models[torch.float32]), 3)
    engine = make_engine(models[torch.float32])
    timeline = engine.record([make_batch(step) for step in range(3)])
    assert_same((expected[0], dict(engine.parameters())), expected)
    labels = [interval.label for interval in timeline.intervals]
    for label in (
        "compute embed 0",
        "compute forward 2",
        "compute backward 3",
        "compute tail 5",
        "load 1",
        "store 1",
        "step 0",
    ):
        assert label in labels, label
    assert all(0 <= i.start_s < i.end_s <= timeline.step_s for i in timeline.intervals)
    assert timeline.hidden_share("cpu") == 0  # the twin has one thread
    assert 0 < timeline.busy_s("compute") < timeline.step_s


def test_every_backward_runs_on_the_thread_that_submits_it(models, monkeypatch):
    """On a GPU autograd's own thread holds gradients, the head's of 1 GB, for a while after `grad`
    has returned."""
    threaded, real = [], torch.autograd.grad

    def grad(*args, **kwargs):
        threaded.append(torch._C._is_multithreading_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    train(make_engine(models[torch.float32], keep_activations=1), 1)
    assert threaded
    assert not any(threaded)
    assert torch._C._is_multithreading_enabled()  # the caller's own setting is back


PLACEMENTS = [
    {"device_optimizer": 1},
    {"device_optimizer": 3, "keep_activations": 2},
    {"keep_activations": 4},
    {"device_optimizer": 5, "keep_activations": 1, "checkpoint_interval": 2},
    {"device_optimizer": 6, "keep_activations": 4, "depth": 1},
    {"offload_activations": 4},
    {"offload_activations": 2, "keep_activations": 1, "device_optimizer": 3, "streams": 2},
    {"offload_activations": 1, "gradient_slabs": 2, "depth": 3, "streams": 1},
    {"keep_activations": 4, "reload_weights": 1},
    {"keep_activations": 3, "reload_weights": 1, "device_optimizer": 3, "streams": 2},
    {"keep_activations": 2, "reload_weights": 1, "offload_activations": 1, "depth": 1},
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
def test_any_placement_gives_identical_bits(models, placement, dtype, clip_norm, tmp_path):
    recipe, batch = replace(RECIPE, clip_norm=clip_norm), make_batch(0, micro_batches=2)
    expected = train(make_engine(models[dtype], recipe=recipe, batch=batch), 6, micro_batches=2)
    engine = make_engine(models[dtype], recipe=recipe, batch=batch, poison=True, **placement)
    first = train(engine, 3, micro_batches=2)
    engine.save(tmp_path / "half")
    assert sum(slab.any().item() for slab in engine._store.activations.values()) == placement.get(
        "offload_activations", 0
    )
    resumed = make_engine(
        models[dtype], recipe=recipe, batch=batch, lanes=TwinLanes(seed=1), **placement
    )
    resumed.resume(tmp_path / "half")
    second = train(resumed, 3, micro_batches=2, first=3)
    assert_same((first[0] + second[0], second[1]), expected)


def test_offloaded_activations_cross_the_link_once_each_way(models):
    """Beside weights and gradients what a graph holds, but not the layer's weights: they are loaded
    again as always."""
    counters = []
    for offloaded in (0, 4):
        batch = make_batch(0, rows=8, seq_len=64)  # tensors beyond what is too small to move
        engine = make_engine(models[torch.float32], batch=batch, offload_activations=offloaded)
        engine.train_step(batch)
        counters.append(engine.counters())
    moved = counters[1]["d2h_bytes"] - counters[0]["d2h_bytes"]
    assert moved == counters[1]["h2d_bytes"] - counters[0]["h2d_bytes"]
    slabs = sum(slab.numel() for slab in engine._store.activations.values())
    assert 0.6 * slabs < moved <= slabs
    assert counters[1]["recompute_flops"] == 0 < counters[0]["recompute_flops"]


def test_weights_of_kept_layers_pass_through_the_slots_twice_where_asked(models):
    """One load more a layer, none of the memory, and nothing is computed again."""
    batch, found = make_batch(0), []
    for reload in (0, 1):
        options = {"keep_activations": 3, "device_optimizer": 2, "reload_weights": reload}
        engine = make_engine(models[torch.float32], batch=batch, **options)
        engine.train_step(batch)
        found.append((engine.counters(), engine.plan().device["weights"], engine.placement))
    numel = engine.work.layouts[2].numel
    (once, owned, _), (twice, passed, placement) = found
    assert twice["h2d_bytes"] - once["h2d_bytes"] == 3 * 4 * numel
    assert owned - passed == (3 - engine.blocks.depth) * 4 * numel
    assert twice["recompute_flops"] == once["recompute_flops"]
    assert placement["reload_weights"] == 1


@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_adversarial_interleaving_of_lanes_gives_identical_bits(models, clip_norm, seed):
    """Lanes run late, early and in random order within the schedule's waits; freed slots are
    poisoned."""
    arguments = {
        "recipe": replace(RECIPE, clip_norm=clip_norm),
        "depth": 1 + seed % 3,
        "checkpoint_interval": 1 + seed % 2,
    }
    expected = train(make_engine(models[torch.float32], **arguments))
    offloaded = {"keep_activations": 1, "reload_weights": 1}
    offloaded |= {"offload_activations": 2} if arguments["checkpoint_interval"] == 1 else {}
    lanes = TwinLanes(seed=seed)
    delayed = make_engine(
        models[torch.float32], lanes=lanes, gradient_slabs=2, poison=True, **arguments, **offloaded
    )
    assert_same(train(delayed), expected)


LANE_ORDERS = list(itertools.permutations(("compute", "h2d", "d2h", "cpu")))


class Starving:
    """In place of the twin's random choice: the last lanes run only when no other can."""

    def __init__(self, order: Sequence[str]) -> None:
        self.order = order

    def choice(self, ready: list[str]) -> str:
        return min(ready, key=self.order.index)

    def randint(self, *_: int) -> int:
        return 1


def test_starved_lanes_give_identical_bits(models, monkeypatch):
    """A lane that is always last lets the others, late moments too, get as far ahead as may be."""
    recipe = replace(RECIPE, clip_norm=0.1)  # a scale of its own for every step
    expected = train(make_engine(models[torch.float32], recipe=recipe))
    for order in LANE_ORDERS:
        monkeypatch.setattr("tests.twin.random.Random", lambda _, order=order: Starving(order))
        lanes = TwinLanes(seed=0)
        starved = make_engine(models[torch.float32], recipe=recipe, lanes=lanes, poison=True)
        assert starved.blocks.two_passes
        assert_same(train(starved), expected)


def test_parameters_and_checkpoints_are_those_after_every_step_given(models, tmp_path):
    """Neither asks its caller to drain first, and what was handed out does not change any more."""
    expected = train(make_engine(models[torch.float32]), 3)
    late = [make_engine(models[torch.float32], lanes=TwinLanes(seed=seed)) for seed in (0, 1)]
    for engine, step in itertools.product(late, range(3)):
        engine.train_step(make_batch(step))
    found = dict(late[0].parameters())
    train(late[0], 1, first=3)
    late[1].save(tmp_path / "saved")
    resumed = make_engine(models[torch.float32])
    resumed.resume(tmp_path / "saved")
    assert_same((expected[0], found), expected)
    assert_same((expected[0], dict(resumed.parameters())), expected)


def test_the_adversarial_twin_finds_a_missing_wait(models):
    """Take all waits away from one kind of operation at a time: some interleaving must change the
    numbers."""
    expected = train(make_engine(models[torch.float32], recipe=RECIPE))
    computing = {
        op.kind for op in make_engine(models[torch.float32]).executor.ops if op.lane == "compute"
    }
    for kinds in (
        computing,
        *(
            {kind}
            for kind in (Kind.LOAD, Kind.STORE, Kind.UPDATE, Kind.EVICT, Kind.DROP, Kind.FETCH)
        ),
    ):
        differs = False
        for seed in range(12):
            lanes = TwinLanes(seed=seed)
            engine = make_engine(
                models[torch.float32],
                recipe=RECIPE,
                lanes=lanes,
                poison=True,
                offload_activations=3,
            )
            executor = engine._executor
            executor.ops = tuple(
                replace(op, waits=()) if op.kind in kinds else op for op in executor.ops
            )
            try:
                losses, parameters = train(engine)
            except (NonFiniteLossError, IndexError, KeyError, ValueError):
                differs = True
                break
            same = losses == expected[0] and all(
                torch.equal(v, expected[1][n]) for n, v in parameters.items()
            )
            if not same:
                differs = True
                break
        assert differs, kinds


def test_the_executor_submits_what_the_schedule_says(models):
    lanes = TwinLanes(recording=True)
    engine = make_engine(models[torch.float32], lanes=lanes)
    train(engine, 2)
    ops = engine._executor.ops
    labels = [op.label for op in ops]
    assert len(lanes.log) == 2 * len(ops)
    for index, (lane, label, waits) in enumerate(lanes.log):
        op = ops[index % len(ops)]
        first = index < len(ops)
        expected = tuple(labels[i] for offset, i in op.waits if not (first and offset))
        assert (lane, label, waits) == (op.lane, labels[index % len(ops)], expected)


def test_tied_embeddings_are_one_parameter_moved_once(models):
    engine = make_engine(make_model("qwen2", tie_word_embeddings=True))
    names = [name for name, _ in engine.parameters()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names
    stored = sum(layout.num_params for layout in engine.work.layouts)
    assert stored == sum(
        p.numel() for p in make_model("qwen2", tie_word_embeddings=True).parameters()
    )


def test_one_chunk_of_logits_is_alive_at_a_time(models, monkeypatch):
    """The published code keeps every chunk's logits; here the largest live logits tensor and their
    number are one chunk's.

    Nor are the gradients of the chunk before, one of which has the head's size, alive beside them.
    """
    model, batch = models[torch.float32], make_batch(0, rows=4)
    engine = make_engine(model, batch=batch, loss_chunk=16)
    sizes, alive, peak = [], [0], [0]
    inner, added, add = engine._decoder.logits, list[Any](), Gradients.add

    def adding(self: Gradients, grads: Sequence[torch.Tensor | None]) -> None:
        added.extend(weakref.ref(grad) for grad in grads if grad is not None)
        add(self, grads)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        assert not [one for one in added if one() is not None]
        output = inner(hidden)
        sizes.append(output.shape[:-1].numel())
        alive[0] += 1
        peak[0] = max(peak[0], alive[0])
        output.grad_fn.register_hook(lambda *_: alive.__setitem__(0, alive[0] - 1))
        return output

    engine._decoder.logits = logits
    monkeypatch.setattr(Gradients, "add", adding)
    engine.train_step(batch)
    assert sizes == [16] * 4
    assert added
    assert peak[0] == 1


@pytest.mark.parametrize("chunk", [1, 5, 16, 24, 1000])
def test_the_chunk_does_not_change_the_loss(models, chunk):
    batch = make_batch(0, rows=3)
    engine = make_engine(models[torch.float32], batch=batch, loss_chunk=chunk)
    torch.testing.assert_close(
        engine.train_step(batch),
        plain_loss(models[torch.float32], batch).detach(),
        rtol=1e-6,
        atol=0,
    )


def test_accumulation_divides_by_all_label_tokens_of_the_step(models):
    """Micro-batches with unequal numbers of label tokens weigh as one batch of all."""
    whole = make_batch(0, micro_batches=2)
    labels = whole.labels.clone()
    labels[0, :, 3:] = -100
    batch = Batch(tokens=whole.tokens, labels=labels)
    assert batch.num_tokens == 2 * 3 + 2 * 16
    engine = make_engine(models[torch.float32], batch=batch)
    model = models[torch.float32]
    expected = plain_loss(model, batch)
    torch.testing.assert_close(engine.train_step(batch), expected.detach(), rtol=1e-6, atol=0)
    model.zero_grad()
    expected.backward()
    gradients = engine_gradients(engine)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    model.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_all_gradients(models, dtype):
    batch = make_batch(0, micro_batches=2)
    engine = make_engine(models[dtype], batch=batch)
    engine.train_step(batch)
    engine.drain()
    squares = sum(g.double().square().sum() for g in engine_gradients(engine).values())
    found = engine._executor.memory.verdict[1].double()
    torch.testing.assert_close(found, squares.sqrt(), rtol=1e-5, atol=0)


def test_micro_batches_are_summed_in_fp32_and_rounded_once(models):
    """Eight of equal length: the loss is divided by eight times the tokens, exactly in bf16."""
    batch = make_batch(0, micro_batches=8)
    engine = make_engine(models[torch.bfloat16], batch=batch, loss_chunk=1000)
    engine.train_step(batch)
    alone: list[dict[str, torch.Tensor]] = []
    for m in range(8):
        part = Batch(tokens=batch.tokens[m : m + 1], labels=batch.labels[m : m + 1])
        single = make_engine(models[torch.bfloat16], batch=part, loss_chunk=1000)
        single.train_step(part)
        alone.append(engine_gradients(single))
    for name, gradient in engine_gradients(engine).items():
        total = torch.zeros_like(gradient)
        for one in alone:
            total += one[name] / 8
        assert torch.equal(gradient, total.bfloat16().float()), name


@pytest.mark.parametrize(("tied", "micro_batches"), [(True, 1), (False, 1), (False, 2)])
def test_a_sum_in_fp32_is_there_where_several_gradients_come_and_no_longer(tied, micro_batches):
    """An embedding that the loss does not use gets one a micro-batch; the head's sum lives as long
    as the loss."""
    batch = make_batch(0, micro_batches=micro_batches)
    model = make_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=tied)
    engine = make_engine(model, batch=batch, loss_chunk=8)
    memory, head = engine._executor.memory, engine.blocks.head
    assert engine.work.tied is tied
    assert (memory.tied_gradients is not None) is tied
    assert (memory._layer_wide is not None) is (micro_batches > 1)
    summed = engine.work.summed_bytes
    wide = memory.tied_gradients._sums[0]._base if tied else None
    allocated = sum(t.nbytes for t in (wide, memory._layer_wide) if t is not None)
    assert allocated == (summed(0) if tied else 0) + max(map(summed, engine.blocks.layers))
    assert summed(head) == 4 * engine.work.layouts[head].numel  # several chunks of the loss
    seen, real = [], memory._wide

    def noting(block):
        wide = real(block)
        seen.append((block, None if wide is None else weakref.ref(wide)))
        return wide

    memory._wide = noting
    engine.train_step(batch)
    engine.drain()
    assert [block for block, one in seen if one] == [head] + [0] * (not tied and micro_batches > 1)
    assert not any(one and one() is not None for _, one in seen)


class Sometimes(torch.nn.Module):
    """A weight that the output depends on, or not."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.weight, self.used = torch.nn.Parameter(torch.ones(32)), used

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight if self.used else hidden


def test_a_parameter_unused_in_every_other_layer_has_no_gradient_there():
    """All layers pass through one slab."""
    model = make_model("qwen2", num_hidden_layers=4)
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, Sometimes(index % 2 > 0))
    weights = weights_of(model)
    arguments = {"micro_batch_size": 2, "seq_len": 16, "dtype": torch.float32}
    engine = MegaTrain(model, recipe=Recipe(), config=EngineConfig(depth=1), **arguments)
    engine.setup(weights)
    for step in range(2):
        engine.train_step(make_batch(step))
        given = {
            int(name.split(".")[2]): gradient.any().item()
            for name, gradient in engine_gradients(engine).items()
            if name.endswith("input_layernorm.1.weight")
        }
        assert given == {0: False, 1: True, 2: False, 3: True}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_without_gradient_do_not_shift_the_others(compiled):
    """A layer with a parameter that its output ignores, in the middle: its neighbours keep their
    own gradients."""
    model = make_model("qwen2")

    def with_unused(target: torch.nn.Module) -> None:
        for layer in target.model.layers:
            parts = dict(layer.self_attn._modules)
            layer.self_attn._modules.clear()
            for index, (name, part) in enumerate(parts.items()):
                layer.self_attn._modules[name] = part
                if index == 1:
                    layer.self_attn.unused = torch.nn.Linear(3, 3)

    with_unused(model)
    weights = weights_of(model)
    batch = make_batch(1)
    skeleton = make_model("qwen2")
    with_unused(skeleton)
    config = EngineConfig(compile=compiled)
    engine = MegaTrain(
        skeleton,
        recipe=Recipe(),
        micro_batch_size=2,
        seq_len=16,
        dtype=torch.float32,
        config=config,
    )
    engine.setup(weights)
    engine.train_step(batch)
    plain_loss(model, batch).backward()
    gradients = engine_gradients(engine)
    assert any("unused" in name for name in gradients)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_layers_and_loss_agree_with_eager_ones(models):
    """One compilation serves all layers, whichever slot their weights are in."""
    expected = train(make_engine(models[torch.float32]))
    torch._dynamo.utils.counters.clear()
    losses, parameters = train(make_engine(models[torch.float32], compile=True, keep_activations=1))
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-4)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (
        compiled <= 6
    )  # the layer plain, with a graph and recomputed with its backward; the loss for two chunk lengths


@pytest.mark.slow
def test_a_compiled_recomputation_leaves_out_the_last_product(models):
    """Seven products forward, fourteen backward; what the layer would return is in nobody's way."""
    layer = models[torch.float32].model.layers[0]
    hidden = torch.randn(2, 16, layer.hidden_size)
    rotary = models[torch.float32].model.rotary_emb(hidden, torch.arange(16)[None])
    call, weights = (
        Call(args=(), kwargs={"position_embeddings": rotary, "attention_mask": None}),
        dict(layer.named_parameters()),
    )
    eager, compiled = Template(layer), Template(layer)
    compiled.compile()
    with torch.no_grad():
        expected = eager.backward(weights, hidden, call, 0, hidden)
        found, code = run_and_get_code(compiled.backward, weights, hidden, call, 0, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    products = re.findall(r"extern_kernels\.(?:mm|addmm)\(", "".join(code))
    assert len(products) == 20


def test_a_step_leaves_no_context_variable_behind(models):
    engine = make_engine(models[torch.float32], keep_activations=1)
    train(engine, 1)
    before = len(contextvars.copy_context())
    train(engine, 2)
    assert len(contextvars.copy_context()) == before


def test_a_call_of_a_kept_layer_of_a_rival_leaves_no_context_variable_behind():
    from baselines.loss import _kept

    _kept(torch.relu, torch.ones(1))
    before = len(contextvars.copy_context())
    _kept(torch.relu, torch.ones(1))
    assert len(contextvars.copy_context()) == before


def test_what_the_compiler_left_pinned_is_given_back_once_when_the_first_steps_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(trainer, "free_pinned_cache", lambda: freed.append(1))
    engine = make_engine(make_model("qwen2"))
    engine._untidied = True  # as where a GPU's kernels are tuned
    engine.drain()
    assert freed == []
    for _ in range(2):
        engine.train_step(make_batch(0))
        engine.drain()
    engine.close()
    assert freed == [1]
