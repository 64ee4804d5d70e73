"""Checkpoint files that are not what `save` wrote: one line that names the file, and a store that
is as it was."""

import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import MegaTrain, Recipe, blockfile, state
from tests.models import make_engine, make_model, train

pytestmark = pytest.mark.slow

LAST, OTHER = (
    "block-0004.safetensors",
    "block-0003.safetensors",
)  # layers of one shape, behind blocks that are in order
RECIPE = Recipe(lr=1e-2)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen2", num_hidden_layers=4, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 2)
    directory = tmp_path_factory.mktemp("checkpoint") / "step-2"
    engine.save(directory)
    return directory


def bits(engine: MegaTrain) -> list[torch.Tensor]:
    states = engine._store.states
    return [
        t.clone().view(torch.uint8)
        for s in states
        for t in (s.weight, s.extra, s.exp_avg, s.exp_avg_sq)
    ]


def sign(directory: Path) -> None:
    """Make the manifest and its record those of the files as they are now."""
    state = json.loads((directory / "state.json").read_text())
    for name in state["files"]:
        data = (directory / name).read_bytes()
        state["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "state.json").write_text(json.dumps(state))
    commit(directory)


def commit(directory: Path) -> None:
    (directory / "COMMIT").write_text(
        hashlib.sha256((directory / "state.json").read_bytes()).hexdigest()
    )


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    shutil.copy(path.with_name(OTHER), path)


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edited(path: Path) -> None:
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"block": path.stem})

    return edited


FAULTS = {
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "one bit": flip,
    "another layer's": swap,
    "no exp_avg_sq": edit(lambda tensors: tensors.pop("exp_avg_sq")),
    "one element": edit(lambda tensors: tensors.update(exp_avg=torch.ones(1))),
    "other dtype": edit(lambda tensors: tensors.update(exp_avg=tensors["exp_avg"].double())),
    "one too many": edit(lambda tensors: tensors.update(more=torch.ones(1))),
    "other content": lambda path: path.write_bytes(b"\x80pickle"),
}
CASES = [
    (fault, signed)
    for signed in (False, True)
    for fault in FAULTS
    if not (signed and fault == "one bit")
]
"""Whether the manifest was made to fit; a checksum that fits other bits says that they are
right."""


def assert_refused(model: torch.nn.Module, directory: Path, name: str) -> None:
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 1)
    engine._executor.finish_moments()  # which the next step would do first
    before = bits(engine)
    with pytest.raises(ValueError, match=f"^resume: .*{name}") as caught:
        engine.resume(directory)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(one, other) for one, other in zip(before, bits(engine), strict=True))
    assert engine._next_step == 1


@pytest.mark.parametrize(("fault", "signed"), CASES)
def test_a_block_file_that_is_another_is_one_line_and_changes_nothing(
    model, saved, tmp_path, fault, signed
):
    """With a manifest that knows nothing of it, and with one made to fit: then names, shapes and
    dtypes tell."""
    directory = shutil.copytree(saved, tmp_path / "copy")
    FAULTS[fault](directory / LAST)
    if signed:
        sign(directory)
    assert_refused(model, directory, LAST)


@pytest.mark.parametrize("change", ["step", "files", "no record", "record of another"])
def test_a_description_without_its_record_is_one_line(model, saved, tmp_path, change):
    directory = shutil.copytree(saved, tmp_path / "copy")
    state = json.loads((directory / "state.json").read_text())
    if change == "no record":
        (directory / "COMMIT").unlink()
    elif change == "record of another":
        (directory / "COMMIT").write_text("0" * 64)
    else:
        state[change] = {"step": 7, "files": {}}[change]
        (directory / "state.json").write_text(json.dumps(state))
    assert_refused(model, directory, "COMMIT")


@pytest.mark.parametrize("files", [{}, None, {LAST: None}, {LAST: 3}], ids=str)
def test_a_manifest_that_does_not_know_a_file_is_one_line(model, saved, tmp_path, files):
    directory = shutil.copytree(saved, tmp_path / "copy")
    state = json.loads((directory / "state.json").read_text())
    state["files"] = files if files is None else {**(state["files"] if files else {}), **files}
    (directory / "state.json").write_text(json.dumps(state))
    commit(directory)
    assert_refused(
        model, directory, LAST if files else "block-0000.safetensors" if files == {} else ""
    )


def test_everything_is_on_the_disk_before_the_directory_has_its_name(model, tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    make_engine(model).save(tmp_path / "parent" / "saved")
    files = [path.name for path in (tmp_path / "parent" / "saved").iterdir()]
    at = done.index("rename")
    assert sorted(done[:at]) == sorted([*files, "whole"])
    assert done[at - 3 : at] == ["state.json", "COMMIT", "whole"]
    assert done[at + 1 :] == ["parent"]


def test_another_recipe_is_told_in_one_line(model, saved):
    engine = make_engine(model, recipe=replace(RECIPE, lr=1e-3, beta2=0.95))
    with pytest.warns(
        UserWarning,
        match=r"recipe\.lr 0\.01, now 0\.001; recipe\.beta2 0\.999, now 0\.95; this run",
    ) as caught:
        engine.resume(saved)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(model, recipe=RECIPE).resume(saved)


def test_a_state_of_before_a_field_of_the_recipe_is_of_what_was_done_then(model, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "copy")
    state = json.loads((directory / "state.json").read_text())
    assert state["recipe"].pop("decayed") == "all"
    (directory / "state.json").write_text(json.dumps(state))
    commit(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(model, recipe=RECIPE).resume(directory)


def test_a_state_written_beside_training_is_that_of_its_own_step(
    model, saved, tmp_path, monkeypatch
):
    """Whatever room the copies have, and though nothing is written before the next steps ran."""
    trained, write = threading.Event(), state._write_block
    for room in (0, 1 << 20, 1 << 40):
        trained.clear()
        engine = make_engine(model, recipe=RECIPE)
        train(engine, 2)
        if room == 1 << 40:
            late = lambda *given: trained.wait(60) and write(*given)  # noqa: E731
            monkeypatch.setattr(state, "_write_block", late)
        engine.save_beside(tmp_path / f"beside-{room}", room=room)
        train(engine, 3, first=2)
        trained.set()
        engine.saved()
        for path in saved.glob("block-*"):
            written = tmp_path / f"beside-{room}" / path.name
            assert written.read_bytes() == path.read_bytes(), (room, path.name)
        counted = engine.counters()
        size = sum(path.stat().st_size for path in saved.glob("block-*"))
        assert counted["saved_bytes"] == size
        assert counted["save_s"] > 0


def test_copies_take_no_more_room_than_given(model, tmp_path, monkeypatch):
    """A writer that stands still is waited for: at most `room` bytes, or one block, are copied and
    not yet written."""
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 1)
    sizes = [sum(t.nbytes for t in state.tensors_of(s).values()) for s in engine.store.states]
    room, held, most = max(sizes) * 2, 0, 0
    lock, write, block = threading.Lock(), state._write_block, iter(sizes)

    def slow(path, tensors):
        nonlocal held
        time.sleep(0.02)
        done = write(path, tensors)
        with lock:
            held -= sum(t.nbytes for t in tensors.values())
        return done

    submit = engine.saver._threads.submit

    def counted(task, *arguments):
        nonlocal held, most
        if task is slow:
            with lock:
                held += next(block)
                most = max(most, held)
        return submit(task, *arguments)

    monkeypatch.setattr(state, "_write_block", slow)
    monkeypatch.setattr(engine.saver._threads, "submit", counted)
    engine.save_beside(tmp_path / "saved", room=room)
    engine.saved()
    assert max(sizes) < most <= room


@pytest.mark.parametrize("told_by", ["saved", "save", "close"])
def test_a_disk_that_fills_is_told_once_and_leaves_nothing(model, tmp_path, monkeypatch, told_by):
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 1)

    write = blockfile.write

    def full(path, tensors, block):
        if path.name == LAST:
            raise OSError(28, "No space left on device")
        return write(path, tensors, block)

    with monkeypatch.context() as patched:
        patched.setattr(blockfile, "write", full)
        engine.save_beside(tmp_path / "saved", room=1 << 40)
        train(engine, 1, first=1)
        tell = {
            "saved": engine.saved,
            "save": lambda: engine.save(tmp_path / "next"),
            "close": engine.close,
        }
        with pytest.raises(OSError, match=r"^save: .*No space left.*make room") as caught:
            tell[told_by]()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    if told_by != "close":
        engine.save(tmp_path / "after")
        make_engine(model, recipe=RECIPE).resume(tmp_path / "after")
        engine.close()
    engine.close()


def test_a_disk_that_fills_while_blocks_are_copied_leaves_nothing(model, tmp_path, monkeypatch):
    engine = make_engine(model, recipe=RECIPE)
    train(engine, 1)

    def full(path, tensors, block):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blockfile, "write", full)
    with pytest.raises(OSError, match=r"^save: .*No space left"):
        engine.save_beside(tmp_path / "saved", room=0)
    assert list(tmp_path.iterdir()) == []
    engine.saved()


@pytest.mark.parametrize(("written", "read"), [("split", "fp32"), ("fp32", "split")])
def test_masters_that_hold_the_same_numbers_resume_each_other(model, tmp_path, written, read):
    first = make_engine(model, recipe=RECIPE, master=written)
    train(first, 2)
    first.save(tmp_path / "saved")
    second = make_engine(model, recipe=RECIPE, master=read)
    second.resume(tmp_path / "saved")
    losses = [train(engine, 3, first=2)[0] for engine in (first, second)]
    assert losses[0] == losses[1]
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


@pytest.mark.parametrize(("written", "read"), [("split", "bf16"), ("bf16", "split")])
def test_a_master_of_fewer_bits_is_another_run(model, tmp_path, written, read):
    make_engine(model, master=written).save(tmp_path / "saved")
    with pytest.raises(ValueError, match=f"has master '{written}', allowed what this run has"):
        make_engine(model, master=read).resume(tmp_path / "saved")


def test_a_state_does_not_depend_on_placement(model, saved, tmp_path):
    """It resumes under any depth, placement and interval between kept inputs, bit for bit."""
    reference = None
    for number, options in enumerate(
        (
            {},
            {"depth": 1, "streams": 1, "gradient_slabs": 1},
            {"device_optimizer": 3, "keep_activations": 1},
            {"offload_activations": 2, "optimizer_overlap": False},
            {"checkpoint_interval": 2, "gradient_slabs": 2},
        )
    ):
        engine = make_engine(model, recipe=RECIPE, **options)
        engine.resume(saved)
        found = train(engine, 2, first=2)
        reference = reference or found
        assert found[0] == reference[0], options
        assert all(torch.equal(found[1][name], value) for name, value in reference[1].items())
        engine.save(tmp_path / str(number))
        for path in (tmp_path / "0").glob("block-*"):
            assert (tmp_path / str(number) / path.name).read_bytes() == path.read_bytes(), options
