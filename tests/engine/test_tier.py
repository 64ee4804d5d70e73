"""Optimizer state on disk: the same bits with none, some and all of it there, whatever else a
pipeline does, and a state that is saved and resumed from any of them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, Machine, MegaTrain, NonFiniteLossError, Ranks, Recipe
from engine.blocks import STAGES
from engine.config import ALL
from engine.disk import Drives
from engine.planner.planner import CPU_OVERHEAD
from engine.step import Kind, Op
from tests.engine.test_disk import FAILS, IS_LATE, MOVES_LESS, inject
from tests.engine.test_ranks import batch_of, model_of
from tests.engine.test_ranks import engine_of as engine_of_ranks
from tests.models import assert_same, make_batch, make_engine, make_model, train
from tests.threads import on_ranks
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow
RECIPE = Recipe(lr=1e-2, clip_norm=0.5)
NUM_BLOCKS = 6
Found = tuple[list[float], dict[str, torch.Tensor]]


@cache
def model(dtype: torch.dtype = torch.bfloat16, **config: Any) -> torch.nn.Module:
    return make_model("qwen2", num_hidden_layers=4, dtype=dtype, **config)


def engine_of(folder: Path, dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> MegaTrain:
    arguments = {"recipe": RECIPE, "folders": [folder]} | arguments
    return make_engine(model(dtype), **arguments)


def trained(folder: Path, num_steps: int = 4, **arguments: Any) -> Found:
    engine = engine_of(folder, **arguments)
    try:
        return train(engine, num_steps)
    finally:
        engine.close()


@cache
def in_memory(dtype: torch.dtype, clip_norm: float, master: str) -> Found:
    recipe = replace(RECIPE, clip_norm=clip_norm)
    return train(make_engine(model(dtype), recipe=recipe, master=master), 4)


@pytest.mark.parametrize("disk_blocks", [1, 2, 4, NUM_BLOCKS])
@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        (torch.bfloat16, "split"),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float32, "split"),
    ],
)
def test_where_state_lies_changes_no_bit(dtype, master, clip_norm, disk_blocks, tmp_path):
    found = trained(
        tmp_path,
        dtype=dtype,
        master=master,
        recipe=replace(RECIPE, clip_norm=clip_norm),
        disk_blocks=disk_blocks,
    )
    assert_same(found, in_memory(dtype, clip_norm, master))
    assert list(tmp_path.iterdir()) == [], "nothing is left on the drive"


PIPELINES: list[dict[str, Any]] = [
    {"disk_blocks": 3, "device_optimizer": 2, "keep_activations": 1},
    {"disk_blocks": 4, "depth": 1, "streams": 1, "checkpoint_interval": 2},
    {"disk_blocks": 5, "gradient_slabs": 2},
    {"disk_blocks": 6, "optimizer_overlap": False},
    {"disk_blocks": 4, "late_moments": False, "offload_activations": 2, "streams": 2},
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_nor_does_it_beside_other_placements(pipeline, tmp_path):
    assert_same(trained(tmp_path, **pipeline), in_memory(torch.bfloat16, 0.5, "split"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
def test_adversarial_interleaving_changes_no_bit(clip_norm, seed, tmp_path):
    """Reads and writes run late, early and in random order within the waits of the schedule."""
    recipe = replace(RECIPE, clip_norm=clip_norm)
    lanes = TwinLanes(seed=seed)
    found = trained(
        tmp_path, recipe=recipe, lanes=lanes, poison=True, disk_blocks=6 - seed % 3, depth=2
    )
    assert_same(found, in_memory(torch.bfloat16, clip_norm, "split"))


@pytest.mark.parametrize("kind", [Kind.READ_STATE, Kind.WRITE_STATE, Kind.UPDATE])
def test_the_twin_finds_a_missing_wait(kind, tmp_path):
    expected = in_memory(torch.bfloat16, 0.5, "split")
    for seed in range(16):
        engine = engine_of(tmp_path, lanes=TwinLanes(seed=seed), disk_blocks=NUM_BLOCKS)
        executor = engine.executor
        executor.ops = tuple(
            replace(op, waits=()) if op.kind is kind else op for op in executor.ops
        )
        try:
            losses, parameters = train(engine)
        except (NonFiniteLossError, KeyError):
            return
        finally:
            engine.close()
        if losses != expected[0] or any(
            not torch.equal(value, expected[1][name]) for name, value in parameters.items()
        ):
            return
    pytest.fail(f"nobody noticed that {kind} waits for nothing")


def test_every_step_reads_and_writes_what_is_there_once(tmp_path):
    """Ten bytes a parameter each way, and so many less in memory."""
    engine, plain = engine_of(tmp_path, disk_blocks=4), make_engine(model(), recipe=RECIPE)
    train(engine, 3)
    layers = engine.work.layouts[1:-1]
    away = 10 * sum(layout.numel for layout in layers)
    counters = engine.counters()
    assert counters["disk_read_bytes"] == counters["disk_written_bytes"] == 3 * away
    assert engine.plan().disk == {"optimizer": away}
    assert plain.plan().disk == {}
    host, before = engine.plan().host, plain.plan().host
    assert host["staging"] == STAGES * 10 * max(layout.numel for layout in layers)
    assert sum(before.values()) - sum(host.values()) == away - host["staging"]
    here = engine.store.states[0], engine.store.states[-1]
    state = [t for s in here for t in (s.extra, s.exp_avg, s.exp_avg_sq)]
    assert host["master"] + host["moments"] == sum(t.nbytes for t in state)
    engine.close()


@pytest.mark.parametrize("beside", [None, 0, 1 << 30])
@pytest.mark.parametrize(("wrote", "reads"), [(0, 4), (4, 0), (3, 6)])
def test_a_state_is_saved_and_resumed_whatever_lies_where(wrote, reads, beside, tmp_path):
    """Beside steps too, which change what is on disk while it is copied."""
    drive = tmp_path / "drive"
    drive.mkdir()
    expected = trained(drive, 6)
    engine = engine_of(drive, disk_blocks=wrote)
    train(engine, 3)
    if beside is None:
        engine.save(tmp_path / "state")
    else:
        engine.save_beside(tmp_path / "state", room=beside)
        for step in range(3, 6):
            engine.train_step(make_batch(step))
        engine.saved()
        assert_same(([], dict(engine.parameters())), ([], expected[1]))
    engine.close()
    resumed = engine_of(drive, disk_blocks=reads)
    resumed.resume(tmp_path / "state")
    losses = [resumed.train_step(make_batch(step)) for step in range(3, 6)]
    resumed.drain()
    assert [loss.item() for loss in losses] == expected[0][3:]
    assert_same(([], dict(resumed.parameters())), ([], expected[1]))
    resumed.close()


def test_parameters_and_moments_between_steps_disturb_nothing(tmp_path):
    """They come through the buffers that the next step uses."""
    expected = in_memory(torch.bfloat16, 0.5, "split")
    plain = make_engine(model(), recipe=RECIPE)
    engine = engine_of(tmp_path, disk_blocks=5)
    losses = []
    for step in range(4):
        losses.append(engine.train_step(make_batch(step)))
        plain.train_step(make_batch(step))
        pairs = zip(engine.moments(), plain.moments(), strict=True)
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)
        next(iter(engine.parameters()))
    engine.drain()
    assert_same(([loss.item() for loss in losses], dict(engine.parameters())), expected)
    engine.close()


def test_ranks_have_a_drive_s_part_each(tmp_path):
    case = (torch.bfloat16, 0.5, 1, False)
    model_of(*case[::3])

    def work(ranks: Ranks, **arguments: Any) -> Found:
        engine = engine_of_ranks(case, ranks, folders=[tmp_path], **arguments)
        losses = [engine.train_step(batch_of(step, 1)).item() for step in range(3)]
        engine.drain()
        found = losses, dict(engine.parameters())
        engine.close()
        return found

    expected = on_ranks(2, work)[0]
    assert_same(on_ranks(2, partial(work, disk_blocks=4))[1], expected)


def test_an_initial_weight_in_fp32_leaves_its_remainder_on_disk(tmp_path):
    weights = [(n, p.detach().float() + 1e-4) for n, p in model().named_parameters()]
    engines = [engine_of(tmp_path, disk_blocks=number) for number in (0, NUM_BLOCKS)]
    for engine in engines:
        engine.setup(weights)
    pairs = zip(*(engine.parameters() for engine in engines), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("call", "step"), [("read", 0), ("read", 1), ("write", 0), ("write", 1)])
def test_a_drive_that_fails_ends_the_run_in_one_line(call, step, tmp_path, monkeypatch):
    """What was saved before is as it was."""
    drive = tmp_path / "drive"
    drive.mkdir()
    engine = engine_of(drive, disk_blocks=4)
    engine.train_step(make_batch(0))
    engine.save(tmp_path / "state")

    def fails(*_: Any) -> None:
        raise OSError("drive/file: it is gone")

    for number in range(step):
        engine.train_step(make_batch(1 + number))
    engine.drain()
    monkeypatch.setattr(Drives, call, fails)
    with pytest.raises(OSError, match="it is gone"):
        engine.train_step(make_batch(5))
    monkeypatch.undo()
    engine.close()
    resumed = engine_of(drive, disk_blocks=4)
    resumed.resume(tmp_path / "state")
    loss = resumed.train_step(make_batch(1)).item()
    assert loss == in_memory(torch.bfloat16, 0.5, "split")[0][1]
    resumed.close()


@pytest.mark.parametrize(
    ("wrong", "value"), [(MOVES_LESS, 4096), (MOVES_LESS, 8192), (IS_LATE, 2000)], ids=str
)
def test_a_drive_that_stutters_changes_no_bit(wrong, value, tmp_path):
    """Short reads and writes, and calls that take their time."""
    engine = engine_of(tmp_path, disk_blocks=5)
    drives = engine.store.on_disk._drives
    inject(drives, wrong, value, after=3, times=200)
    found = train(engine, 4)
    engine.close()
    assert_same(found, in_memory(torch.bfloat16, 0.5, "split"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("after", [0, 7, 13])
def test_an_error_of_a_drive_ends_the_run_before_a_wrong_byte_is_used(code, after, tmp_path):
    """Losses up to there are right, and every later step raises too."""
    engine = engine_of(tmp_path, disk_blocks=5)
    drives = engine.store.on_disk._drives
    inject(drives, FAILS, code, after=after, times=1)
    losses: list[float] = []

    def go_on() -> None:
        for step in range(4):
            losses.append(engine.train_step(make_batch(step)).item())

    with pytest.raises(OSError, match=str(tmp_path)) as error:
        go_on()
    assert "\n" not in str(error.value)
    assert losses == in_memory(torch.bfloat16, 0.5, "split")[0][: len(losses)]
    with pytest.raises(OSError, match=str(tmp_path)):
        engine.train_step(make_batch(9))
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"disk_blocks": 2, "folders": []}, "machine.nvme_path: got nothing, allowed a folder"),
        ({"disk_blocks": 7}, "system.disk_blocks: got 7, allowed 0 to 6 where system.device_opti"),
        ({"disk_blocks": -3}, "system.disk_blocks: got -3, allowed an integer >= -2"),
        ({"disk_blocks": 5, "device_optimizer": 2}, "system.disk_blocks: got 5, allowed 0 to 4"),
        (
            {"disk_blocks": 1, "folders": [Path("/no/such")]},
            "machine.nvme_path: got /no/such, which is no folder, allowed a folder",
        ),
    ],
)
def test_what_cannot_be_is_one_line(arguments, said, tmp_path):
    with pytest.raises(ValueError, match=f"^{said}") as error:
        engine_of(tmp_path, **arguments)
    assert "\n" not in str(error.value)


def test_a_file_system_that_keeps_pages_is_named_before_anything_lies_there(tmp_path, monkeypatch):
    direct = engine_of(tmp_path, disk_blocks=1)
    assert "page cache" not in (direct.caveat or "")
    direct.close()

    def buffered(path: Path, direct: bool) -> tuple[int, bool]:
        return os.open(path, os.O_RDWR), False

    monkeypatch.setattr("engine.disk._open", buffered)
    said = f"{tmp_path}: through the page cache, which copies every byte once more"
    assert planned(tmp_path, None, disk_blocks=1).caveat == said
    engine = engine_of(tmp_path, disk_blocks=1)
    assert engine.caveat == said
    assert_same(train(engine, 4), in_memory(torch.bfloat16, 0.5, "split"))
    engine.close()


@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_is_not_finite_leaves_what_is_on_drives_as_it_was(tmp_path, seed, clip_norm):
    """Whatever of the step before is still to be written then."""

    def after_a_bad_step(disk_blocks: int) -> tuple[dict[str, Any], dict[str, Any]]:
        recipe, lanes = Recipe(lr=1e-2, clip_norm=clip_norm), TwinLanes(seed=seed)
        engine = engine_of(tmp_path, recipe=recipe, disk_blocks=disk_blocks, lanes=lanes)
        clip = engine.executor.handlers[Kind.CLIP]

        def spoilt(op: Op, s: Any) -> None:
            if s.index == 2:
                s.loss.fill_(float("nan"))
            clip(op, s)

        engine.executor.handlers[Kind.CLIP] = spoilt
        for step in range(5):
            with suppress(NonFiniteLossError):
                engine.train_step(make_batch(step))
        with suppress(NonFiniteLossError):
            engine.drain()
        state = dict(engine.parameters()), dict(engine.moments())
        engine.close()
        return state

    for found, expected in zip(after_a_bad_step(NUM_BLOCKS), after_a_bad_step(0), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def planned(
    tmp_path: Path,
    host_memory: int | None,
    given: Any = None,
    num_ranks: int = 1,
    **arguments: Any,
) -> MegaTrain:
    given = given or model()
    return MegaTrain(
        type(given)(given.config).bfloat16(),
        recipe=RECIPE,
        micro_batch_size=2,
        seq_len=16,
        config=EngineConfig(**arguments),
        machine=Machine(host_memory=host_memory),
        ranks=Ranks(count=num_ranks),
        folders=[tmp_path],
    )


def test_all_that_is_not_on_the_device_goes_to_disk_where_that_is_asked_for(tmp_path):
    for here in (0, 2):
        blocks = planned(tmp_path, None, disk_blocks=ALL, device_optimizer=here).blocks
        assert blocks.on_disks == blocks.hosted == range(here, NUM_BLOCKS)


@pytest.mark.parametrize(("vocab_size", "num_ranks"), [(96, 1), (8192, 1), (96, 2)])
def test_as_little_goes_to_disk_as_there_must(tmp_path, vocab_size, num_ranks):
    """By the bytes of the plan and of the process, each rank's, of which a tenth stays free. The
    buffers of outer blocks that are larger than a layer take more than their state."""
    wide = model(vocab_size=vocab_size)

    def of(room: int | None, disk_blocks: int) -> MegaTrain:
        return planned(tmp_path, room, wide, num_ranks, disk_blocks=disk_blocks)

    def needed(disk_blocks: int) -> int:
        plan = of(None, disk_blocks).plan()
        return num_ranks * (plan.host_bytes + plan.device_bytes + CPU_OVERHEAD)

    each = [needed(number) for number in range(NUM_BLOCKS + 1)]
    for number in range(NUM_BLOCKS + 1):
        room = -(-each[number] * 10 // 9) + 1
        fewest = next(at for at, size in enumerate(each) if size <= 0.9 * room)
        assert of(room, -1).blocks.disk_blocks == fewest
    assert (each[-1] > min(each)) is (vocab_size > 96)
    assert of(1 << 40, -1).blocks.disk_blocks == 0
    assert of(1, -1).blocks.disk_blocks == NUM_BLOCKS
