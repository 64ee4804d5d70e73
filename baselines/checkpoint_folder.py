"""A checkpoint of transformers as it lies in a folder: its config.json and the tensors of its
safetensors files.

Invariant: no more than one tensor is read at a time, and none to say what there is. What is wrong
with the folder is a ValueError of one line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baselines.system import ModelSpec

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Files of weights that only unpickling reads, which runs what is in them."""
BOOKKEEPING = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
)
"""Keys of config.json that say how it came about, not what the model is."""
SAMPLE = 4096
"""Elements of each of the three rows of a tensor that its digest looks at."""


class BadCheckpointError(ValueError):
    """A folder that no model can be started from; one line that names model.checkpoint."""

    def __init__(self, folder: Path, got: str, allowed: str, remedy: str) -> None:
        super().__init__(f"model.checkpoint: got {folder}, {got}, allowed {allowed}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, such as BF16."""

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU: a view of the mapped file, which the kernel can drop."""
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor

    def on_meta(self) -> torch.Tensor:
        """A tensor of the same shape without numbers."""
        return torch.empty(self.shape, device="meta")


def spec_of(folder: Path | str) -> ModelSpec:
    """The model of a checkpoint, called after its folder."""
    folder = Path(os.path.abspath(os.path.expanduser(folder)))
    config = config_in(folder)
    return ModelSpec(
        name=folder.name,
        model_type=config["model_type"],
        config={key: value for key, value in config.items() if key not in BOOKKEEPING},
        checkpoint=str(folder),
        checkpoint_digest=digest_of(folder),
    )


def config_in(folder: Path) -> dict[str, Any]:
    """What config.json says, BOOKKEEPING included; `model_type` is there."""
    path = Path(folder) / CONFIG
    if not os.path.isfile(path):  # which no name is too long for
        what = f"which has no {CONFIG}" if os.path.isdir(folder) else "which is no folder"
        raise BadCheckpointError(
            folder, what, "a folder that save_pretrained of transformers wrote", "check the path"
        )
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpointError(
            folder,
            f"whose {CONFIG} cannot be read ({_flat(error)})",
            "JSON",
            "copy the checkpoint again",
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise BadCheckpointError(
            folder,
            f"whose {CONFIG} has no model_type",
            "that of a model of transformers",
            "choose another checkpoint",
        )
    if found.get("quantization_config"):
        raise BadCheckpointError(
            folder,
            "which is quantised",
            "weights in float32, bfloat16 or float16",
            "have transformers dequantise it and save it again",
        )
    return found


def stored_in(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint by its name, from the headers of its files, which are
    checked against their lengths."""
    found: dict[str, Stored] = {}
    for path in _files(Path(folder)):
        try:
            found |= {stored.name: stored for stored in _tensors(path)}
        except (OSError, SafetensorError) as error:
            raise BadCheckpointError(
                folder,
                f"whose {path.name} cannot be read ({_flat(error)})",
                "whole safetensors files",
                "copy that file again",
            ) from None
    return found


def _tensors(path: Path) -> Iterator[Stored]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            yield Stored(name=name, path=path, shape=shape, dtype=part.get_dtype())


def _files(folder: Path) -> list[Path]:
    """The safetensors files, in order."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            listed = json.loads((folder / INDEX).read_text())["weight_map"].values()
            paths = [folder / name for name in sorted(set(listed))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BadCheckpointError(
                folder,
                f"whose {INDEX} has no weight_map",
                "a file for each tensor in it",
                "copy the checkpoint again",
            ) from None
        for path in paths:
            if not path.is_file():
                raise BadCheckpointError(
                    folder,
                    f"which has no {path.name}",
                    f"every file that {INDEX} names",
                    "copy that file too",
                )
        return paths
    if any(True for pattern in PICKLES for _ in folder.glob(pattern)):
        raise BadCheckpointError(
            folder,
            "whose weights are pickled",
            f"{WEIGHTS} or {INDEX}, for a pickle runs what is in it",
            "load it once with transformers and save it again, which writes safetensors",
        )
    raise BadCheckpointError(
        folder, "which has no weights", f"{WEIGHTS} or {INDEX} beside {CONFIG}", "copy it whole"
    )


@lru_cache
def digest_of(folder: Path) -> str:
    """Sixteen hex digits of names, shapes, dtypes and a sample of every tensor: its first, middle
    and last row.

    However the tensors are spread over files, it is the same. All bytes of a large checkpoint
    would take minutes, and training changes every tensor nearly everywhere.
    """
    digest = hashlib.sha256()
    for name, stored in sorted(stored_in(folder).items()):
        digest.update(json.dumps([name, stored.dtype, stored.shape]).encode())
        for piece in _sample(stored):
            digest.update(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(stored: Stored) -> Iterator[torch.Tensor]:
    """The beginnings of three rows of a tensor, or of one that has no rows."""
    if len(stored.shape) < 2 or 0 in stored.shape:
        yield stored.read().reshape(-1)[:SAMPLE]
        return
    inner = [slice(0, 1)] * (len(stored.shape) - 2)
    with safe_open(stored.path, framework="pt") as file:
        part = file.get_slice(stored.name)
        for row in (0, stored.shape[0] // 2, stored.shape[0] - 1):
            yield part[(slice(row, row + 1), *inner, slice(0, SAMPLE))]


def _flat(error: object) -> str:
    return " ".join(str(error).split())[:200]
