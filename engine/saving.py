"""Directories that appear whole or not at all, and weights loaded into a store, for all rooms."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from engine.layers.decoder import Decoder
from engine.store import Store


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
        sync(directory.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Return when a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
