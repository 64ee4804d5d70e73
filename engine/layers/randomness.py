"""Whether a forward draws random numbers, which the engine refuses: a recomputation would draw
others.

Found by the state of the generators before and after, not by the names of settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.config import RefusedError

T = TypeVar("T")


def refuse_random(
    module: nn.Module,
    device: torch.device,
    run: Callable[[], T],
    *,
    again: Callable[[], object] | None = None,
) -> T:
    """What `run`, a forward of `module` on `device`, returns.

    again: the same forward without a compiler, by default `run`. Raises RefusedError where both
    move a generator of the CPU or the device. The second is run only where the first did, and
    without cuDNN's attention, which moves the device's generator even where it drops nothing.
    """
    before = _states(device)
    result = run()
    if _states(device) == before:
        return result
    before = _states(device)
    with torch.no_grad(), _no_cudnn_attention(device):
        (again or run)()
    if _states(device) != before:
        raise RefusedError(refusal(module))
    return result


def _states(device: torch.device) -> list[bytes]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


@contextlib.contextmanager
def _no_cudnn_attention(device: torch.device) -> Iterator[None]:
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(others) if device.type == "cuda" else contextlib.nullcontext():
        yield


def refusal(module: nn.Module) -> str:
    """What is said of a module whose forward draws random numbers."""
    found = dict(_settings(module))
    named = ", ".join(f"{name}={value}" for name, value in sorted(found.items()))
    return (
        f"model.config: the forward of {type(module).__name__} draws random numbers "
        f"{f'({named}) ' if named else ''}in training, allowed is a forward that draws none, for a "
        "recomputation would draw others; set dropout, layerdrop and jitter to 0 or choose another "
        "model"
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Settings above 0 that sound like it, of the module and of the model's configuration."""
    config = getattr(module, "config", None)
    places = [vars(part) for part in module.modules()]
    for place in [*places, {} if config is None else config.to_dict()]:
        for name, value in place.items():
            sounds = any(word in name for word in ("drop", "jitter", "noise"))
            if (sounds or name == "p") and isinstance(value, float) and value > 0:
                yield name, value
