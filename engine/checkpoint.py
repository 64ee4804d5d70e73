"""Save and resume. Invariant: a checkpoint directory appears whole or not at all, and resuming is bit-identical.

One file a block with its weight, remainder or master, and moments, and state.json with what must match.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine.host import HostStore

FORMAT = 1


def describe(store: HostStore) -> dict[str, Any]:
    """What a checkpoint and the store it is loaded into must have in common."""
    spec = store.spec
    return {
        "format": FORMAT,
        "dtype": str(spec.dtype),
        "master": spec.master,
        "blocks": [[[f.name, list(f.shape)] for f in layout.fields] for layout in spec.layouts],
    }


def save(store: HostStore, directory: Path, step: int) -> None:
    """Write `directory`; ValueError where it exists. step: optimizer steps taken so far."""
    directory = Path(directory)
    if directory.exists():
        raise ValueError(f"save: {directory} exists, allowed a new directory; choose another name or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    whole = scratch / "whole"  # mkdtemp's own mode is 0700 whatever the umask
    try:
        whole.mkdir()
        for block, state in enumerate(store.states):
            tensors = {name: getattr(state, name) for name in ("weight", "extra", "exp_avg", "exp_avg_sq")}
            # copy: a view would be saved with the whole arena behind it
            torch.save({n: t.to("cpu", copy=True) for n, t in tensors.items() if t is not None}, _file(whole, block))
        (whole / "state.json").write_text(json.dumps(describe(store) | {"step": step}))
        os.rename(whole, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def resume(store: HostStore, directory: Path) -> int:
    """Load `directory` into the store; the optimizer steps taken so far. ValueError where it does not fit."""
    directory = Path(directory)
    found, wanted = _description(directory), describe(store)
    if store.spec.dtype == torch.float32:  # the weight is the master, whatever system.master says
        del wanted["master"]
    for key, expected in wanted.items():
        if found.get(key) != expected:
            got = "other parameters" if key == "blocks" else repr(found.get(key))
            raise ValueError(f"resume: {directory} has {key} {got}, allowed what this run has; use the checkpoint's own config")
    for block in range(len(store.states)):  # all, before the first is loaded over what the store has
        if not _file(directory, block).is_file():
            raise ValueError(f"resume: {directory} has no {_file(directory, block).name}, allowed one a block; copy it whole")
    for block, state in enumerate(store.states):
        tensors = torch.load(_file(directory, block), weights_only=True)
        for name, tensor in tensors.items():
            getattr(state, name).copy_(tensor)
    step: int = found["step"]
    return step


def _file(directory: Path, block: int) -> Path:
    return directory / f"block-{block:04}.pt"


def _description(directory: Path) -> dict[str, Any]:
    """What state.json says; ValueError where it is not there or not what `save` wrote."""
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / "state.json").read_text())
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise ValueError(f"resume: {directory} is no checkpoint, allowed a directory that save() wrote; check the path")
    return found
