"""Initial weights, into the store: every parameter of the model, each once."""

from __future__ import annotations

from collections.abc import Iterable

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
