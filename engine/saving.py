"""Save and resume. Invariants: a checkpoint directory appears whole or not at all, what is in it is
looked at before the first byte of the store changes, and resuming is bit-identical.

One file a block with its weight, remainder or master, and moments; state.json with what must match
and the size and SHA-256 of every file; COMMIT, written last, with the SHA-256 of state.json. All
are on the disk before the directory has its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.layers.decoder import Decoder
from engine.master import BlockState
from engine.recipe import Recipe
from engine.store import Store

FORMAT = 2
STATE, COMMIT = "state.json", "COMMIT"


def load(store: Store, decoder: Decoder, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the store with a model's parameters: (name, tensor) pairs, every one once.

    ValueError where a name or a shape is not the model's, or a parameter is missing.
    """
    shapes = {
        decoder.full_name(number, name): (number, name, shape)
        for number, block in enumerate(decoder.blocks)
        for name, shape in block.items()
    }
    missing = set(shapes)
    for name, value in weights:
        if name not in shapes:
            raise ValueError(
                f"weights: got {name!r}, allowed the model's {len(shapes)} parameters, "
                f"{min(shapes)} among them; leave it out"
            )
        block, local, shape = shapes[name]
        if value.shape != shape:
            raise ValueError(
                f"weights: got {name!r} of shape {tuple(value.shape)}, allowed {tuple(shape)}; "
                "load weights of this very model"
            )
        store.set_parameter(block, local, value)
        missing.discard(name)
    if missing:
        raise ValueError(
            f"weights: {len(missing)} parameters were not given, {sorted(missing)[0]} among them; "
            "allowed is a full set"
        )


def describe(store: Store) -> dict[str, Any]:
    """What a checkpoint and the store it is loaded into must have in common."""
    spec = store.spec
    return {
        "format": FORMAT,
        "dtype": str(spec.dtype),
        "master": spec.master,
        "blocks": [[[f.name, list(f.shape)] for f in layout.fields] for layout in spec.layouts],
    }


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write in: it is called `directory` when the block ends well, and is gone when
    it does not.

    ValueError where `directory` exists.
    """
    directory = Path(directory).absolute()
    if directory.exists():
        raise ValueError(
            f"save: {directory} exists, allowed a new directory; choose another name or remove it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    whole = scratch / "whole"  # mkdtemp's own mode is 0700 whatever the umask
    try:
        whole.mkdir()
        yield whole
        os.rename(whole, directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save(store: Store, directory: Path, step: int, recipe: Recipe) -> None:
    """Write `directory`; ValueError where it exists. step: optimizer steps taken so far."""
    with whole_directory(directory) as whole:
        _write(store, whole, step, recipe)


def _write(store: Store, whole: Path, step: int, recipe: Recipe) -> None:
    files = {}
    for block, state in enumerate(store.states):
        path = _file(whole, block)
        # copy: a view would be saved with the whole arena behind it
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(state).items()}
        torch.save({"block": block, "tensors": tensors}, path)
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    (whole / STATE).write_text(
        json.dumps(describe(store) | {"step": step, "recipe": asdict(recipe), "files": files})
    )
    _sync(whole / STATE)
    (whole / COMMIT).write_text(_digest(whole / STATE))
    _sync(whole / COMMIT)
    _sync(whole)


def resume(store: Store, directory: Path, recipe: Recipe) -> int:
    """Load `directory` into the store; the optimizer steps taken so far.

    ValueError, and a store as it was, where the checkpoint does not fit or a file is not the one
    that `save` wrote. Warns where the checkpoint was trained with another recipe: this run goes on
    with its own.
    """
    directory = Path(directory)
    found, wanted = _description(directory), describe(store)
    if store.spec.dtype == torch.float32:  # the weight is the master, whatever system.master says
        del wanted["master"]
    for key, expected in wanted.items():
        if found.get(key) != expected:
            got = "other parameters" if key == "blocks" else repr(found.get(key))
            raise ValueError(
                f"resume: {directory} has {key} {got}, allowed what this run has; use the "
                "checkpoint's own config"
            )
    for block in range(len(store.states)):
        _check_file(
            _file(directory, block), (found.get("files") or {}).get(_file(directory, block).name)
        )
    for _ in _blocks(store, directory):  # all, before the first is loaded over what the store has
        pass
    for state, tensors in _blocks(store, directory):
        for name, place in _tensors(state).items():
            place.copy_(tensors[name])
    _warn_of_another_recipe(directory, found.get("recipe") or {}, recipe)
    step: int = found["step"]
    return step


def _check_file(path: Path, expected: Any) -> None:
    """ValueError where the file is not, byte for byte, what the manifest says."""
    if not path.is_file():
        raise ValueError(
            f"resume: {path.parent} has no {path.name}, allowed one a block; copy it whole"
        )
    size = path.stat().st_size
    if not isinstance(expected, dict) or size != expected.get("bytes"):
        allowed = expected.get("bytes") if isinstance(expected, dict) else "none in"
        raise ValueError(
            f"resume: {path} has {size} bytes, allowed {allowed} by {STATE}; copy the checkpoint "
            "whole"
        )
    if _digest(path) != expected.get("sha256"):
        raise ValueError(
            f"resume: {path} has other bytes than {STATE} says; copy the checkpoint whole or take "
            "another"
        )


def _blocks(store: Store, directory: Path) -> Iterator[tuple[BlockState, dict[str, torch.Tensor]]]:
    """(state, what its file has for it) of every block; ValueError where these differ in more than
    their numbers."""
    for block, state in enumerate(store.states):
        path = _file(directory, block)
        try:
            found = torch.load(path, weights_only=True, mmap=True)
            got = (found["block"], _shapes(found["tensors"]))
        except Exception as error:  # of many kinds: pickle, zip, keys and what weights_only refuses
            raise ValueError(
                f"resume: {path} is no block of a checkpoint ({type(error).__name__}); take another"
            ) from None
        if got != (block, _shapes(_tensors(state))):
            raise ValueError(
                f"resume: {path} has block {got[0]} with {got[1]}, allowed block {block} of this "
                "model; take another"
            )
        yield state, found["tensors"]


def _tensors(state: BlockState) -> dict[str, torch.Tensor]:
    named = {name: getattr(state, name) for name in ("weight", "extra", "exp_avg", "exp_avg_sq")}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}


def _warn_of_another_recipe(directory: Path, theirs: dict[str, Any], recipe: Recipe) -> None:
    ours = asdict(recipe)
    other = [
        f"recipe.{name} {theirs.get(name)!r}, now {value!r}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if other:
        warnings.warn(
            f"resume: {directory} was trained with {'; '.join(other)}; this run goes on with its "
            "own",
            stacklevel=4,
        )


def _file(directory: Path, block: int) -> Path:
    return directory / f"block-{block:04}.pt"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Return when a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _description(directory: Path) -> dict[str, Any]:
    """What state.json says; ValueError where it is not there, not what `save` wrote or not
    committed."""
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / STATE).read_text())
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise ValueError(
            f"resume: {directory} is no checkpoint, allowed a directory that save() wrote; check "
            "the path"
        )
    if found.get("format") == FORMAT and not _is_committed(directory):
        raise ValueError(
            f"resume: {directory / COMMIT} is not that of {STATE}; copy the checkpoint whole or "
            "take another"
        )
    return found


def _is_committed(directory: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return (directory / COMMIT).read_text() == _digest(directory / STATE)
    return False
