"""The systems by name, and the one way to build any of them.

Invariant: a system's module is imported when that system is built, so a missing dependency costs
that system alone. A system of your own needs no line here: its YAML says `implementation:
MODULE:CLASS` (docs/adding.md).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from baselines.footprint import choose_kept_layers
from baselines.model import refuse_random
from baselines.system import SystemSpec, TrainingSystem

REGISTRY: dict[str, str] = {
    "in_memory": "baselines.in_memory:build",
    "megatrain": "baselines.megatrain:build",
    "zero3": "baselines.deepspeed.stage3:Zero3",
    "zero2": "baselines.deepspeed.stage2:Zero2",
    "superoffload": "baselines.deepspeed.superoffload:SuperOffload",
    "zenflow": "baselines.deepspeed.zenflow:ZenFlow",
    "zero_infinity": "baselines.deepspeed.infinity:ZeroInfinity",
    "fsdp2": "baselines.fsdp2:Fsdp2",
    "torchao_offload": "baselines.torchao_offload:TorchaoOffload",
    "roundpipe": "baselines.roundpipe:RoundPipe",
    "slideformer": "baselines.slideformer:SlideFormer",
    "lora": "baselines.lora:Lora",
    "qlora": "baselines.lora:QLora",
    "published_megatrain": "baselines.published_megatrain:PublishedMegaTrain",
}

RANKED = ("in_memory", "megatrain", "zero3", "zero2", "fsdp2")
"""Systems that train on several ranks."""

MODULE_CLASS = re.compile(r"\w+(\.\w+)*:\w+")


def build(name: str, spec: SystemSpec) -> TrainingSystem:
    """The system called `name`, its number of kept layers chosen where that was left open.

    ValueError for an unknown system and for options that are not allowed, Unsupported where it
    cannot run.
    """
    require_known(name, spec.implementation)
    system = _imported(spec.implementation or REGISTRY[name])(spec)
    refuse_random(spec.model)
    choose_kept_layers(system)
    return system


def require_known(name: str, implementation: Any) -> None:
    """ValueError unless either `name` is registered or `implementation` is a MODULE:CLASS."""
    got = f"system.implementation: got {implementation!r}"
    if implementation is None:
        if name not in REGISTRY:
            raise ValueError(
                f"system: got {name!r}, allowed {', '.join(REGISTRY)}; choose one of these or give "
                "system.implementation=MODULE:CLASS"
            )
    elif name in REGISTRY:
        raise ValueError(
            f"{got} for {name}, allowed null for a built-in system; give yours another system.name"
        )
    elif not isinstance(implementation, str) or not MODULE_CLASS.fullmatch(implementation):
        raise ValueError(f"{got}, allowed MODULE:CLASS such as baselines.fsdp2:Fsdp2; correct it")


def require_ranked(name: str, path: str, num_ranks: int) -> None:
    """ValueError, one line, for several ranks of a system that trains on one; `path` is where the
    config says how many."""
    if num_ranks > 1 and name not in RANKED:
        raise ValueError(
            f"{path}: got {num_ranks}, allowed 1 with system {name}, which trains in one process; "
            f"leave it out or choose among {', '.join(RANKED)}"
        )


def _imported(implementation: str) -> Callable[[SystemSpec], TrainingSystem]:
    """The class that `implementation` names; ValueError, in one line, where there is none."""
    module, _, name = implementation.partition(":")
    got = f"system.implementation: got {implementation!r}"
    allowed = "allowed MODULE:CLASS that can be imported here"
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(
            f"{got} ({' '.join(str(error).split())}), {allowed}; correct it or install what it "
            "needs"
        ) from error
    if not callable(found):
        raise ValueError(f"{got}, which {module} does not have, {allowed}; correct it")
    system: Callable[[SystemSpec], TrainingSystem] = found
    return system
