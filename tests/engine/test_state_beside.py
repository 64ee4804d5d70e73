"""A state that is copied beside training is that of its own step, bit for bit, whoever is first: the
copier, or the update that would change a block; and what goes wrong with it leaves training alone."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import MegaTrain, Recipe, blockfile, state
from tests.models import assert_same, make_engine, make_model, train
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow

RECIPE = Recipe(lr=1e-2)
ROOM = 1 << 40
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"twin": 4},
    {"depth": 1, "streams": 1, "gradient_slabs": 1},
    {"device_optimizer": 3, "keep_activations": 1},
    {"device_optimizer": 6},
    {"offload_activations": 2, "optimizer_overlap": False},
    {"checkpoint_interval": 2, "gradient_slabs": 2},
    {"master": "fp32", "late_moments": False},
]


class Copier:
    """Stands still before block `at` until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.go, copied = threading.Event(), state.Taking.copied

        def late(taking: state.Taking, block: int) -> Any:
            assert block < at or self.go.wait(60)
            return copied(taking, block)

        monkeypatch.setattr(state.Taking, "copied", late)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen2", num_hidden_layers=4, dtype=torch.bfloat16)


def make(model, recipe: Recipe, twin: int | None = None, **placement: Any) -> MegaTrain:
    """An engine, on a device that is simulated with the seed `twin` where one is given."""
    lanes = {} if twin is None else {"lanes": TwinLanes(seed=twin)}
    return make_engine(model, recipe=recipe, **lanes, **placement)


@pytest.mark.parametrize("disk_blocks", [0, 4])
def test_closing_waits_for_a_state_wherever_its_blocks_lie(
    model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_blocks: int
) -> None:
    """As after an error of the training loop, which closes the engine while a state is copied."""
    copier = Copier(monkeypatch, at=1)
    (tmp_path / "drive").mkdir()
    engine = make(model, RECIPE, folders=[tmp_path / "drive"], disk_blocks=disk_blocks)
    train(engine, 2)
    engine.save(tmp_path / "alone")
    engine.save_beside(tmp_path / "beside", room=ROOM)
    threading.Timer(0.2, copier.go.set).start()
    engine.close()
    assert_same_files(tmp_path / "beside", tmp_path / "alone")


def assert_same_files(found: Path, expected: Path) -> None:
    for path in expected.glob("block-*"):
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(found.iterdir())) == len(list(expected.iterdir()))


def wait_for_copies(engine: MegaTrain) -> None:
    """Until nothing is left to copy."""
    taking = engine.saver._taking
    for block in range(engine.blocks.num_blocks if taking is not None else 0):
        taking.before(block)


CASES = [(placement, at, 0.5) for placement in PLACEMENTS for at in (0, 3)]
CASES += [(PLACEMENTS[0], 6, 0.5), (PLACEMENTS[0], 3, 0.0), (PLACEMENTS[3], 0, 0.0)]


@pytest.mark.parametrize(("placement", "at", "clip_norm"), CASES, ids=str)
def test_a_state_copied_beside_training_is_that_of_its_own_step(
    model, placement, at, clip_norm, tmp_path, monkeypatch
):
    """Updates overtake the copier from block `at` on; twice, the second time over the same
    copies."""
    recipe = replace(RECIPE, clip_norm=clip_norm)
    plain = make(model, recipe, **placement)
    losses = train(plain, 2)[0]
    for step in (2, 4):
        plain.save(tmp_path / f"plain-{step}")
        more, parameters = train(plain, 2, first=step)
        losses += more
    engine = make(model, recipe, **placement)
    found, places = train(engine, 2)[0], []
    for step in (2, 4):
        with monkeypatch.context() as patched:
            copier = Copier(patched, at)
            engine.save_beside(tmp_path / f"beside-{step}", room=ROOM)
            more, ours = train(engine, 2, first=step)
            found += more
            assert not (tmp_path / f"beside-{step}").exists() or at == 6
            copier.go.set()
            engine.saved()
        assert_same_files(tmp_path / f"beside-{step}", tmp_path / f"plain-{step}")
        copies = engine.saver._copies
        places.append([t.data_ptr() for one in sorted(copies) for t in copies[one].values()])
    assert places[0] == places[1]
    assert_same((found, ours), (losses, parameters))


def test_what_was_copied_before_training_went_on_is_the_state(model, tmp_path):
    engine, plain = (make_engine(model, recipe=RECIPE) for _ in range(2))
    for one in (engine, plain):
        train(one, 2)
    plain.save(tmp_path / "plain")
    engine.save_beside(tmp_path / "beside", room=ROOM)
    wait_for_copies(engine)
    train(engine, 2, first=2)
    engine.saved()
    assert_same_files(tmp_path / "beside", tmp_path / "plain")


def test_who_waits_for_a_block_that_another_copies_does_not_copy_it_again(model, monkeypatch):
    """It may have changed by then."""
    store = make_engine(model).store
    taking, begun, found = state.Taking(store, {}), threading.Event(), []
    before, changed = store.states[0].weight.clone(), threading.Event()

    def again(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source if changed.wait(60) else target)

    monkeypatch.setattr(state, "_move", again)

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        begun.set()
        time.sleep(0.05)

    def change() -> None:
        taking._once(0, slow)
        store.states[0].weight.zero_()
        changed.set()

    threads = [threading.Thread(target=change)]
    threads.append(threading.Thread(target=lambda: found.append(taking.copied(0))))
    threads[0].start()
    begun.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0]["weight"], before)
    assert not store.states[0].weight.any()


def test_without_room_nothing_is_kept(model, tmp_path):
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 1)
    size = sum(map(state._num_bytes, engine.store.states))
    for room, kept in ((size, 6), (size - 1, 0), (size, 6), (0, 0)):
        engine.save_beside(tmp_path / f"{room}-{len(list(tmp_path.iterdir()))}", room=room)
        engine.saved()
        assert len(engine.saver._copies) == kept
        held = sum(t.nbytes for one in engine.saver._copies.values() for t in one.values())
        assert held <= room


def test_what_the_host_updates_is_copied_first(model, tmp_path, monkeypatch):
    """A GPU copies its own blocks by itself, and whoever waits for it copies nothing meanwhile."""
    monkeypatch.setattr(state, "COPIERS", 1)
    engine, asked = make_engine(model, recipe=RECIPE, device_optimizer=2), []
    copied, looked = state.Taking.copied, threading.Event()

    def noted(self: state.Taking, block: int) -> dict[str, torch.Tensor]:
        assert looked.wait(60)
        asked.append(block)
        return copied(self, block)

    monkeypatch.setattr(state.Taking, "copied", noted)
    engine.save_beside(tmp_path / "beside", room=ROOM)
    taking = engine.saver._taking
    assert [block for block in range(6) if taking.lacks(block)] == [2, 3, 4, 5]
    looked.set()
    engine.saved()
    assert asked == [2, 3, 4, 5, 0, 1]


def test_reserved_memory_is_what_states_are_copied_into(model, tmp_path):
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 1)
    size = sum(map(state._num_bytes, engine.store.states))
    engine.reserve(room=size - 1)
    assert not engine.saver._copies
    engine.reserve(room=size)
    reserved = {b: t["weight"].data_ptr() for b, t in engine.saver._copies.items()}
    assert len(reserved) == 6
    engine.save_beside(tmp_path / "beside", room=size)
    engine.saved()
    assert reserved == {b: t["weight"].data_ptr() for b, t in engine.saver._copies.items()}
    engine.save(tmp_path / "plain")
    assert_same_files(tmp_path / "beside", tmp_path / "plain")


def test_copies_that_have_too_little_room_are_made_before_training_goes_on(
    model, tmp_path, monkeypatch
):
    """Though the last block is written later."""
    engine, plain = (make_engine(model, recipe=RECIPE) for _ in range(2))
    for one in (engine, plain):
        train(one, 2)
    plain.save(tmp_path / "plain")
    write, trained = state._write_block, threading.Event()

    def late(path: Path, tensors: Any) -> Any:
        assert path.stem != "block-0005" or trained.wait(60)
        return write(path, tensors)

    monkeypatch.setattr(state, "_write_block", late)
    room = sum(map(state._num_bytes, engine.store.states)) - 1
    engine.save_beside(tmp_path / "beside", room=room)
    train(engine, 2, first=2)
    trained.set()
    engine.saved()
    assert_same_files(tmp_path / "beside", tmp_path / "plain")


def test_a_state_is_that_of_before_a_resume(model, tmp_path, monkeypatch):
    engine = make_engine(model, recipe=RECIPE)
    engine.save(tmp_path / "first")
    train(engine, 2)
    engine.save(tmp_path / "second")
    copier = Copier(monkeypatch, 0)
    engine.save_beside(tmp_path / "beside", room=ROOM)
    engine.resume(tmp_path / "first")
    copier.go.set()
    engine.saved()
    assert_same_files(tmp_path / "beside", tmp_path / "second")


@pytest.mark.parametrize(("at", "block"), [(0, 0), (3, 2), (3, 5), (6, 5)])
def test_a_disk_that_fills_while_blocks_are_copied_leaves_training_alone(
    model, at, block, tmp_path, monkeypatch
):
    expected = train(make_engine(model, recipe=RECIPE), 4)
    engine, write = make_engine(model, recipe=RECIPE), blockfile.write
    train(engine, 2)

    def full(path, tensors, name):
        if path.stem == f"block-{block:04}":
            raise OSError(28, "No space left on device")
        return write(path, tensors, name)

    with monkeypatch.context() as patched:
        copier = Copier(patched, at)
        patched.setattr(blockfile, "write", full)
        engine.save_beside(tmp_path / "saved", room=ROOM)
        found = train(engine, 2, first=2)
        copier.go.set()
        with pytest.raises(OSError, match=r"^save: .*No space left.*make room"):
            engine.saved()
    assert list(tmp_path.iterdir()) == []
    assert_same((expected[0][:2] + found[0], found[1]), expected)
    engine.save_beside(tmp_path / "after", room=ROOM)
    engine.saved()
    make_engine(model, recipe=RECIPE).resume(tmp_path / "after")


class NoRoom(dict):
    """Memory for copies of all blocks but one."""

    def __setitem__(self, block: int, tensors: Any) -> None:
        if block == 3:
            raise MemoryError("no memory")
        super().__setitem__(block, tensors)


@pytest.mark.parametrize("at", [0, 6])
def test_a_copy_that_fails_is_told_by_the_saver_and_leaves_training_alone(
    model, at, tmp_path, monkeypatch
):
    """Whoever made it."""
    expected = train(make_engine(model, recipe=RECIPE), 4)
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 2)
    engine.saver._copies = NoRoom()
    copier = Copier(monkeypatch, at)
    engine.save_beside(tmp_path / "saved", room=ROOM)
    found = train(engine, 2, first=2)
    copier.go.set()
    with pytest.raises(MemoryError, match="no memory"):
        engine.saved()
    assert list(tmp_path.iterdir()) == []
    assert_same((expected[0][:2] + found[0], found[1]), expected)


def counted(before: Any, calls: list[int]) -> Any:
    def counting(taking: state.Taking, block: int) -> None:
        calls.append(block)
        before(taking, block)

    return counting


def test_only_what_training_waited_for_is_counted_as_that(model, tmp_path, monkeypatch):
    """Copies made for an update are; those of the copier are not."""
    waited = []
    for at in (0, 6):
        engine = make_engine(model, recipe=RECIPE)
        train(engine, 1)
        with monkeypatch.context() as patched:
            copier, calls = Copier(patched, at), []
            patched.setattr(state.Taking, "before", counted(state.Taking.before, calls))
            engine.save_beside(tmp_path / str(at), room=ROOM)
            if at == 6:
                while engine.saver._taking is not None:
                    threading.Event().wait(0.01)
            train(engine, 1, first=1)
            copier.go.set()
            engine.saved()
        waited.append(calls)
        assert engine.counters()["save_s"] >= engine.counters()["save_wait_s"] > 0
    assert waited == [list(range(6)), []]
