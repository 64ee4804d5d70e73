"""Save and resume. Invariant: a checkpoint directory appears whole or not at all, and resuming is bit-identical.

One file a block with its weight, remainder or master, and moments, and state.json with what must match.
"""

from __future__ import annotations

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
    try:
        for block, state in enumerate(store.states):
            tensors = {name: getattr(state, name) for name in ("weight", "extra", "exp_avg", "exp_avg_sq")}
            # copy: a view would be saved with the whole arena behind it
            torch.save({n: t.to("cpu", copy=True) for n, t in tensors.items() if t is not None}, scratch / f"block-{block:04}.pt")
        (scratch / "state.json").write_text(json.dumps(describe(store) | {"step": step}))
        os.rename(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def resume(store: HostStore, directory: Path) -> int:
    """Load `directory` into the store; the optimizer steps taken so far. ValueError where it does not fit."""
    directory = Path(directory)
    description = directory / "state.json"
    if not description.is_file():
        raise ValueError(f"resume: {directory} is no checkpoint, allowed a directory that save() wrote; check the path")
    found = json.loads(description.read_text())
    step = int(found.pop("step"))
    for key, expected in describe(store).items():
        if found.get(key) != expected:
            got = "other parameters" if key == "blocks" else repr(found.get(key))
            raise ValueError(f"resume: {directory} has {key} {got}, allowed what this run has; use the checkpoint's own config")
    for block, state in enumerate(store.states):
        tensors = torch.load(directory / f"block-{block:04}.pt", weights_only=True)
        for name, tensor in tensors.items():
            getattr(state, name).copy_(tensor)
    return step
