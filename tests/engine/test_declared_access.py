"""What operations declare that they read and write is all that they touch, whatever the pipeline; a
declaration less is found."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import MegaTrain, Ranks, Recipe
from engine.blocks import Fate
from engine.step import Kind, Op
from tests.declared import VIRTUAL, UndeclaredError, declared_only
from tests.models import assert_same, make_batch, make_engine, make_model, train
from tests.threads import on_ranks

pytestmark = pytest.mark.slow

PIPELINES: list[dict[str, Any]] = [
    {"checkpoint_interval": 2, "depth": 1},
    {"checkpoint_interval": 3, "depth": 3, "streams": 2, "gradient_slabs": 2},
    {"optimizer_overlap": False, "streams": 1},
    {"optimizer_overlap": False, "gradient_slabs": 2, "late_moments": False},
    {"late_moments": False, "device_optimizer": 1},
    {"device_optimizer": 3, "keep_activations": 2, "streams": 2},
    {"device_optimizer": 6, "keep_activations": 4, "depth": 1},
    {"offload_activations": 4, "depth": 3},
    {"offload_activations": 2, "keep_activations": 1, "device_optimizer": 3, "streams": 2},
    {"offload_activations": 1, "gradient_slabs": 3, "streams": 1},
    {"mlp_chunk": 5, "keep_activations": 1, "keep_attention": 2},
    {"checkpoint_interval": 3, "keep_attention": 1, "offload_attention": 3, "depth": 1},
    {"offload_attention": 4, "offload_activations": 1, "streams": 2},
    {"keep_activations": 3, "reload_weights": 1, "device_optimizer": 1},
    {"disk_blocks": 4, "device_optimizer": 1},
    {"disk_blocks": 6, "gradient_slabs": 2},
]
Case = tuple[torch.dtype, float, int, bool]
CASES: list[Case] = [
    (torch.float32, 0.5, 1, True),
    (torch.float32, 0.0, 2, False),
    (torch.bfloat16, 0.5, 2, True),
    (torch.bfloat16, 0.0, 1, False),
]
"""dtype, clip_norm, micro-batches, tied."""


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """The tensors of these models are small: without this none would be offloaded."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)


@cache
def model_of(dtype: torch.dtype, tied: bool) -> torch.nn.Module:
    return make_model("qwen2", num_hidden_layers=4, dtype=dtype, tie_word_embeddings=tied)


RANKED: list[dict[str, Any]] = [
    {"checkpoint_interval": 2, "gradient_slabs": 2},
    {"device_optimizer": 2, "keep_activations": 1, "offload_activations": 1, "streams": 2},
]


@pytest.fixture(autouse=True, scope="module")
def a_drive(tmp_path_factory):
    """For state on disk."""
    FOLDERS[:] = [tmp_path_factory.mktemp("drive")]


FOLDERS: list[Path] = []


def engine_of(case: Case, **pipeline: Any) -> MegaTrain:
    pipeline = {"folders": FOLDERS} | pipeline
    dtype, clip_norm, micro_batches, tied = case
    recipe, batch = Recipe(lr=1e-2, clip_norm=clip_norm), make_batch(0, micro_batches=micro_batches)
    return make_engine(model_of(dtype, tied), recipe=recipe, batch=batch, **pipeline)


@cache
def unguarded(case: Case, mlp_chunk: int) -> Any:
    return train(engine_of(case, mlp_chunk=mlp_chunk), 2, micro_batches=case[2])


PAIRS = [
    (CASES[n], one) for number, one in enumerate(PIPELINES) for n in ((0, 3), (1, 2))[number % 2]
]
"""Every pipeline with and without clipping, in both dtypes."""


@pytest.mark.parametrize(("case", "pipeline"), PAIRS, ids=str)
def test_operations_touch_only_what_they_declare(case, pipeline):
    engine = declared_only(engine_of(case, **pipeline))
    engine.evaluate(make_batch(7, micro_batches=case[2]))
    found = train(engine, 2, micro_batches=case[2])
    assert_same(found, unguarded(case, pipeline.get("mlp_chunk", 0)))


@pytest.mark.parametrize(("case", "pipeline"), [(CASES[0], RANKED[0]), (CASES[3], RANKED[1])])
def test_operations_of_a_rank_touch_only_what_they_declare(case, pipeline):
    model_of(case[0], case[3])  # by one thread

    def guarded(ranks: Ranks) -> Any:
        engine = declared_only(engine_of(case, ranks=ranks, **pipeline))
        engine.evaluate(make_batch(7, micro_batches=case[2]))
        return train(engine, 2, micro_batches=case[2])

    def plainly(ranks: Ranks) -> Any:
        return train(engine_of(case, ranks=ranks), 2, micro_batches=case[2])

    assert_same(on_ranks(2, guarded)[1], on_ranks(2, plainly)[0])


def name_of(op: Op) -> str:
    return f"{op.kind.name}{op.fate.value}"


def operations(clip_norm: float, pipeline: dict[str, Any]) -> tuple[Op, ...]:
    executor = engine_of((torch.float32, clip_norm, 1, True), **pipeline).executor
    return executor.ops + executor.evaluation


def test_the_pipelines_have_every_kind_of_operation():
    found = {
        name_of(op)
        for one in PIPELINES
        for clip_norm in (0.5, 0.0)
        for op in operations(clip_norm, one)
    }
    both_ways = {
        f"{kind.name}{fate.value}" for kind in (Kind.FORWARD, Kind.BACKWARD) for fate in Fate
    }
    between_ranks = {Kind.GATHER.name, Kind.SCATTER.name}
    assert found == {kind.name for kind in Kind} - between_ranks | both_ways


UNUSED = {("EMBED_BACKWARD", "reads", "device weights")}
"""Declared for what these models have not: an embedding whose gradient needs its weights."""


DRIVES = {
    ("READ_STATE", "reads", "disk"),
    ("WRITE_STATE", "writes", "disk"),
    ("WRITE_STATE", "reads", "stage"),
}
"""What is on a drive cannot be hidden, and a wrong byte there is found by the update that reads it
in the next step."""


def declarations(ops: tuple[Op, ...]) -> Iterator[tuple[str, str, str]]:
    """(kind, reads or writes, resource without its number) of every declaration that has memory; to
    write is to read too."""
    for op in ops:
        for access, names in (("reads", op.reads - op.writes), ("writes", op.writes)):
            yield from (
                (name_of(op), access, name.rstrip("0123456789 ")) for name in names - VIRTUAL
            )


def without(ops: tuple[Op, ...], kind: str, access: str, resource: str) -> tuple[Op, ...]:
    """Less a written resource is less a read one too where both are declared."""

    def kept(names: frozenset[str]) -> frozenset[str]:
        return frozenset(name for name in names if name.rstrip("0123456789 ") != resource)

    less = {
        "reads": lambda op: {"reads": kept(op.reads)},
        "writes": lambda op: {"reads": kept(op.reads), "writes": kept(op.writes)},
    }
    return tuple(replace(op, **less[access](op)) if name_of(op) == kind else op for op in ops)


def is_found(pipeline: dict[str, Any], clip_norm: float, missing: tuple[str, str, str]) -> bool:
    engine = engine_of((torch.float32, clip_norm, 1, True), **pipeline)
    executor = engine.executor
    executor.ops, executor.evaluation = (
        without(ops, *missing) for ops in (executor.ops, executor.evaluation)
    )
    try:
        declared_only(engine).evaluate(make_batch(0))
        train(engine, 2)
    except UndeclaredError as error:
        ops = executor.ops + executor.evaluation
        return any(name_of(op) == missing[0] and str(op) in str(error) for op in ops)
    return False


@pytest.mark.parametrize("pipeline", RANKED, ids=str)
def test_every_missing_declaration_between_ranks_is_found(pipeline):
    """Of what several ranks have beside one."""
    model_of(torch.float32, True)
    kinds = ("GATHER", "SCATTER", "CLIP")

    def declared_here(ranks: Ranks) -> set[tuple[str, str, str]]:
        executor = engine_of((torch.float32, 0.5, 1, True), ranks=ranks, **pipeline).executor
        return {one for one in declarations(executor.ops) if one[0] in kinds}

    for missing in on_ranks(2, declared_here)[0]:
        with pytest.raises(UndeclaredError, match=f"Kind.{missing[0]}"):
            on_ranks(2, partial(raises_where_missing, pipeline, missing))


def raises_where_missing(
    pipeline: dict[str, Any], missing: tuple[str, str, str], ranks: Ranks
) -> None:
    engine = engine_of((torch.float32, 0.5, 1, True), ranks=ranks, **pipeline)
    if ranks.index == 0:  # whose NaN the other rank gets
        engine.executor.ops = without(engine.executor.ops, *missing)
    train(declared_only(engine), 2)


@pytest.mark.parametrize(
    ("pipeline", "clip_norm"),
    [
        ({"checkpoint_interval": 2, "gradient_slabs": 2}, 0.5),
        (
            {
                "offload_activations": 2,
                "keep_activations": 1,
                "device_optimizer": 2,
                "late_moments": True,
            },
            0.5,
        ),
        ({"late_moments": False}, 0.0),
        ({"disk_blocks": 4}, 0.5),
    ],
    ids=str,
)
def test_every_declaration_that_is_missing_is_found_where_it_is_missing(pipeline, clip_norm):
    declared = set(declarations(operations(clip_norm, pipeline)))
    missed = {one for one in declared if not is_found(pipeline, clip_norm, one)}
    assert missed == (UNUSED | DRIVES) & declared
    assert len(declared) >= 20


def loads_with_the_loss(executor: Any, op: Op, s: Any) -> None:
    assert s.loss is not None


def loads_with_a_norm(executor: Any, op: Op, s: Any) -> None:
    executor.memory.norms[0] = 1.0


def loads_with_what_an_update_left(executor: Any, op: Op, s: Any) -> None:
    executor._late.clear()


def loads_with_the_next_slot_too(executor: Any, op: Op, s: Any) -> None:
    executor.memory.slots[1 - op.slot].zero_()


def loads_from_memory_it_may_only_read(executor: Any, op: Op, s: Any) -> None:
    executor.store.states[op.block].weight.add_(1.0)


@pytest.mark.parametrize(
    "more",
    [
        loads_with_the_loss,
        loads_with_a_norm,
        loads_with_what_an_update_left,
        loads_with_the_next_slot_too,
        loads_from_memory_it_may_only_read,
    ],
)
def test_a_handler_that_does_more_than_its_operation_declares_is_found(more):
    engine = engine_of(CASES[0])
    executor = engine.executor
    load = executor.handlers[Kind.LOAD]

    def sneaky(op: Op, s: Any) -> None:
        load(op, s)
        if op.slot >= 0:
            more(executor, op, s)

    executor.handlers[Kind.LOAD] = sneaky
    with pytest.raises(UndeclaredError, match="load"):
        train(declared_only(engine), 1)
