"""Every cell of a sweep looked at before the first one runs: its model is tried without memory; its system is built, to hear what
it says to its options and its model; its plan is held against the machine, so that a cell without room costs no process of its own;
its step is predicted.

Invariant: in a process of its own, so the parent imports no measured library; nothing stays allocated. A ValueError ends the
sweep, a plan that does not fit is the cell's outcome; whatever else a system raises here is left for its cell.

    python -m sweeps.check --events-fd FD < {"cells": [config, ...]}     (started by `survey`)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baselines.model_check import require_runnable
from baselines.registry import build
from baselines.system import ModelSpec
from sweeps import environment
from sweeps.cell import Emitter, outlook
from sweeps.config import Cell, cell_from
from sweeps.identity import configuration
from sweeps.isolate import Outcome, guarded, run_isolated
from sweeps.memory import NoDevice

SURVEY_S = 120.0
PREDICTION_S = 30.0
"""No prediction begins later than that; a step without one is of unknown length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of cells before they run, by hash."""

    refused: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    """What becomes of those without room."""
    step_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds a step of those that the cost model knows, the engine in bf16 on a GPU; 0 without room."""


def survey(cells: Sequence[Cell], timeout_s: float = SURVEY_S) -> Survey:
    """Look at `cells`, as far as the time goes. ValueError, one line, for the first that its system refuses."""
    alike: dict[str, list[Cell]] = {}  # repeats are asked about once
    for cell in cells:
        alike.setdefault(configuration(cell.config), []).append(cell)
    firsts = {repeats[0].hash: repeats for repeats in alike.values()}
    told = run_isolated(
        "sweeps.check",
        {"cells": [repeats[0].config for repeats in firsts.values()]},
        log=Path(os.devnull),
        timeout_s=timeout_s,
        device=NoDevice(),
        on_event=lambda event: None,
        env=environment.cell_variables(),
    )
    found = Survey()
    for event in (event for event in told.events if event["event"] == "seen"):
        for cell in firsts.get(event["cell"], []):
            if event["refusal"]:
                found.refused[cell.hash] = Outcome(status="wont_fit", reason=event["refusal"], events=event["told"])
                found.step_s[cell.hash] = 0.0
            elif event["step_s"]:
                found.step_s[cell.hash] = event["step_s"]
    return found


def require_models(models: Sequence[ModelSpec], emit: Callable[..., None]) -> None:
    """Say which of the models cannot be built or run; each is asked about once, however many cells have it."""
    asked: list[ModelSpec] = []
    for model in models:
        if model in asked:
            continue
        asked.append(model)
        try:
            require_runnable(model)
        except ValueError as error:
            emit("invalid", reason=" ".join(str(error).split()))
            return


def look(cell: Cell, rates: dict[Any, Any], emit: Callable[..., None], *, predict: bool = True) -> None:
    """Say what is known of one cell. rates: probed so far, by what they depend on; `predict`=False leaves the engine on a
    GPU, whose placement needs them, to its cell."""
    try:
        spec = cell.spec()
        system = build(cell.system, dataclasses.replace(spec, device=torch.device("cpu")))
        if cell.machine.device == "cpu":
            pass
        elif cell.system != "megatrain":
            system = build(cell.system, spec)
        elif predict and cell.dtype == "bfloat16":
            from baselines import megatrain

            probed = cell.options.get("pinned"), cell.options.get("torch_adamw")
            system = megatrain.build(spec, rates=rates.get(probed))
            rates[probed] = system.rates
        else:
            return
        told, refusal = outlook(system, cell)
    except ValueError as error:
        emit("invalid", reason=" ".join(str(error).split()))
        return
    step_s = told[-1]["prediction"]["step_s"] if told[-1]["event"] == "predicted" else None
    emit("seen", cell=cell.hash, told=told if refusal else [], refusal=refusal, step_s=step_s)


def main() -> int:
    """Always 0: what is wrong leaves on the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events-fd", type=int, required=True)
    emit, rates, started = Emitter(parser.parse_args().events_fd), dict[Any, Any](), time.monotonic()

    def ignore(event: str, **fields: Any) -> None:
        """Not a ValueError: the cell will say it in its row."""

    cells = [cell_from(config) for config in json.load(sys.stdin)["cells"]]
    guarded(partial(require_models, [cell.model for cell in cells], emit), ignore)
    for cell in cells:
        predict = time.monotonic() - started < PREDICTION_S
        guarded(partial(look, cell, rates, emit, predict=predict), ignore)
    return 0


if __name__ == "__main__":
    sys.exit(main())
