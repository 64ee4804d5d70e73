"""Checkpoint files that are not what `save` wrote: one line that names the file, and a store that
is as it was."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import MegaTrain, Recipe
from tests.models import make_engine, make_model, train

LAST, OTHER = (
    "block-0004.pt",
    "block-0003.pt",
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
        found = torch.load(path, weights_only=True)
        change(found.get("tensors", found))
        torch.save(found, path)

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
    "other content": lambda path: torch.save([1, 2], path),
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
    assert_refused(model, directory, LAST if files else "block-0000.pt" if files == {} else "")


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
