"""A saved state read back: looked at whole before the first byte of the store changes.

Invariants: a state that does not fit, or of which a file is not the one that was saved, leaves the
store as it was, on every rank; any placement, depth and number of ranks resumes what any other
wrote.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine import blockfile
from engine.layout import within
from engine.master import BlockState, read_master, write_master
from engine.ranks import Ranks
from engine.recipe import Recipe
from engine.saving import digest
from engine.state import COMMIT, COPIERS, FORMAT, STATE, describe, file_of, tensors_of
from engine.store import Store

EXACT = {"split": torch.int16, "fp32": torch.float32}
"""Masters that hold the same fp32 numbers, and the dtype of what each has beside the weight."""
READERS = COPIERS
"""Blocks that are checked, and then read, at a time."""


def resume(store: Store, directory: Path, recipe: Recipe) -> int:
    """Load `directory` into the store; the optimizer steps taken so far.

    ValueError, and a store as it was, where the state does not fit or a file is not the one that
    was saved: on all ranks where one finds it. Warns where it was trained with another recipe: this
    run goes on with its own.
    """
    directory, refused, found = Path(directory), None, dict[str, Any]()
    try:
        found = _fitting(store, directory)
    except OSError as error:
        refused = ValueError(
            f"resume: {directory}: {error}, allowed a state that can be read; take another"
        )
    except ValueError as error:
        refused = error
    if store.ranks.count > 1:
        said = list(filter(None, store.ranks.texts(str(refused or ""))))
        refused = refused or (ValueError(said[0]) if said else None)
    if refused is not None:
        raise refused
    _read_all(store, directory, found["parts"])
    _warn_of_another_recipe(directory, found.get("recipe") or {}, recipe)
    step: int = found["step"]
    return step


def _fitting(store: Store, directory: Path) -> dict[str, Any]:
    """What a state says of itself; ValueError where it does not fit, or where a file that this
    rank would read is not the one that was saved."""
    found, wanted = _description(directory), describe(store)
    if store.spec.dtype == torch.float32:  # the weight is the master, whatever system.master says
        del wanted["master"]
    elif found.get("master") in EXACT and wanted["master"] in EXACT:
        wanted["master"] = found["master"]
    for key, expected in wanted.items():
        if found.get(key) != expected:
            got = "other parameters" if key == "blocks" else repr(found.get(key))
            raise ValueError(
                f"resume: {directory} has {key} {got}, allowed what this run has; use the "
                "state's own config"
            )
    master = None if store.spec.dtype == torch.float32 else EXACT.get(wanted["master"])
    files, found["parts"] = found.get("files") or {}, found.get("parts", 1)

    def check(block: int) -> None:
        numel = store.spec.layouts[block].in_parts(found["parts"]).numel // found["parts"]
        for path, _, _ in _overlaps(store, directory, block, found["parts"]):
            _check_file(path, files.get(path.name))
            _check_tensors(path, _shapes(store.states[block], master, numel))

    _side_by_side(check, range(len(store.states)))
    return found


def _side_by_side(work: Callable[[int], None], blocks: Iterable[int]) -> None:
    """Work on blocks; what goes wrong with the first of them is raised, and the rest is left."""
    threads = ThreadPoolExecutor(READERS, thread_name_prefix="resume")
    try:
        for done in [threads.submit(work, block) for block in blocks]:
            done.result()
    finally:
        threads.shutdown(cancel_futures=True)


def _read_all(store: Store, directory: Path, num_parts: int) -> None:
    """Read a state that fits: blocks in memory side by side, then those on disk in turn."""

    def load(block: int) -> None:
        for path, theirs, mine in _overlaps(store, directory, block, num_parts):
            store.fetch(block, changes=True)
            _load(store.states[block].part(mine), path, theirs)

    blocks = range(len(store.states))
    _side_by_side(load, (block for block in blocks if block not in store.spec.on_disks))
    for block in store.spec.on_disks:
        load(block)


def _overlaps(
    store: Store, directory: Path, block: int, num_parts: int
) -> Iterator[tuple[Path, slice, slice]]:
    """Files that have some of this rank's part of a block, what of each it is, and of the part."""
    layout, own = store.spec.layouts[block], store.part(block)
    for index in range(num_parts):
        theirs = Ranks(index=index, count=num_parts).part(layout.in_parts(num_parts).numel)
        mine = within(theirs, own)
        if mine.start < mine.stop:
            yield file_of(directory, block, index, num_parts), within(own, theirs), mine


def _load(state: BlockState, path: Path, part: slice) -> None:
    """Read these elements of a file into a part of a block."""
    places = tensors_of(state)
    found = blockfile.read(path, part, places)
    for name, place in places.items():
        if found[name].dtype == place.dtype and found[name] is not place:
            place.copy_(found[name])
    if state.extra is not None and found["extra"].dtype != state.extra.dtype:
        master = read_master(found["weight"], found["extra"]).to(state.weight.device)
        write_master(master, state.weight, state.extra)


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
            f"resume: {path} has {size} bytes, allowed {allowed} by {STATE}; copy the state whole"
        )
    if blockfile.sha256_of(path) != expected.get("sha256"):
        raise ValueError(
            f"resume: {path} has other bytes than {STATE} says; copy the state whole or take "
            "another"
        )


def _check_tensors(path: Path, allowed: dict[str, str]) -> None:
    """ValueError where the file has not the tensors that its block needs."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            got = {name: f"{s.get_dtype()} {s.get_shape()}" for name, s in slices.items()}
            got["block"] = (file.metadata() or {}).get("block", "none")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"resume: {path} is no block of a state ({type(error).__name__}); take another"
        ) from None
    allowed = allowed | {"block": path.stem}
    if got != allowed:
        raise ValueError(
            f"resume: {path} has {got}, allowed {allowed} for a block of this model; take another"
        )


def _shapes(state: BlockState, extra: torch.dtype | None, numel: int) -> dict[str, str]:
    """Dtype and shape of the tensors of a block's file; `extra`: of the master's own part."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int16: "I16"}
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(state).items()}
    if extra is not None:
        dtypes["extra"] = extra
    return {name: f"{names[dtype]} {[numel]}" for name, dtype in dtypes.items()}


def _warn_of_another_recipe(directory: Path, theirs: dict[str, Any], recipe: Recipe) -> None:
    theirs = asdict(Recipe()) | theirs  # an older state has not all fields
    other = [
        f"recipe.{name} {theirs.get(name)!r}, now {value!r}"
        for name, value in asdict(recipe).items()
        if theirs.get(name) != value
    ]
    if other:
        warnings.warn(
            f"resume: {directory} was trained with {'; '.join(other)}; this run goes on with its "
            "own",
            stacklevel=4,
        )


def _description(directory: Path) -> dict[str, Any]:
    """What state.json says; ValueError where it is not there, not what was saved or not
    committed."""
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / STATE).read_text())
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise ValueError(
            f"resume: {directory} is no saved state, allowed a directory that save() wrote; check "
            "the path"
        )
    if found.get("format") == FORMAT and not _is_committed(directory):
        raise ValueError(
            f"resume: {directory / COMMIT} is not that of {STATE}; copy the state whole or take "
            "another"
        )
    return found


def _is_committed(directory: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return (directory / COMMIT).read_text() == digest(directory / STATE)
    return False
