"""megatrain: the engine itself, built from a `SystemSpec`.

Invariant: nothing but translation happens here; the class that trains is `engine.MegaTrain`, with
the AdamW that it is known by or with the one that was asked for.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from baselines.model import build_skeleton
from baselines.system import SystemSpec, Unsupported
from engine import EngineConfig, Group, KernelError, Machine, MegaTrain, Rates, native

LABEL = "preset"
"""The option that only names the others, for rows and figures."""


def build(
    spec: SystemSpec, machine: Machine | None = None, rates: Rates | None = None
) -> MegaTrain:
    """The engine for `spec`; ValueError for an option it does not have, Unsupported where its AdamW
    cannot be built here.

    Allocates nothing that grows with the model. machine: one that is not here, to plan for; None is
    the machine at hand with the memory that `spec` has. rates: what that was found to do in a
    second; None has it probed.
    """
    allowed = [field.name for field in dataclasses.fields(EngineConfig)]
    options = {key: value for key, value in spec.options.items() if key != LABEL}
    drives = (options.pop("nvme_path", None) or "").split(os.pathsep)
    for key, value in options.items():
        if key not in allowed:
            raise ValueError(
                f"system.{key}: got {value!r}, allowed {', '.join(allowed)}; remove it or choose "
                "one of these"
            )
    config = EngineConfig(**options)
    if machine is None and not config.torch_adamw:
        _require_kernel()
    return MegaTrain(
        build_skeleton(spec.model, spec.dtype),
        recipe=spec.recipe,
        micro_batch_size=spec.shape.micro_batch_size,
        seq_len=spec.shape.seq_len,
        num_micro_batches=spec.shape.num_micro_batches,
        dtype=spec.dtype,
        device=spec.device,
        config=config,
        machine=machine
        or Machine(rates=rates, host_memory=spec.host_memory, device_memory=spec.device_memory),
        packed=spec.packed,
        folders=[Path(drive).expanduser() for drive in drives if drive],
        ranks=Group(spec.num_ranks) if spec.num_ranks > 1 else None,
    )


def _require_kernel() -> None:
    """Unsupported without the engine's AdamW: torch's would be measured as the engine's."""
    try:
        native()
    except KernelError as error:
        raise Unsupported(str(error)) from error
