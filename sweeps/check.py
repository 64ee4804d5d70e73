"""Every system of a sweep built once before the first cell runs, for what only a system can refuse: its options, its model;
and its plan held against the machine, so that a cell without room costs no process of its own.

Invariant: in a process of its own, so the parent imports no measured library; nothing is allocated. A ValueError ends the
sweep, a plan that does not fit is the cell's outcome; whatever else a system raises here is left for its cell.

    python -m sweeps.check --events-fd FD < {"cells": [config, ...]}     (started by `refuse`)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baselines.system import build
from sweeps import environment
from sweeps.cell import Emitter, fits, plan_event
from sweeps.config import Cell, cell_from
from sweeps.isolate import Outcome, guarded, run_isolated
from sweeps.memory import NoDevice
from sweeps.result import configuration

TIMEOUT_S = 120.0


def refuse(cells: Sequence[Cell]) -> dict[str, Outcome]:
    """What becomes of those of `cells` that have no room, by hash. ValueError, one line, for the first that its system refuses."""
    alike: dict[str, list[Cell]] = {}  # repeats are asked about once
    for cell in cells:
        alike.setdefault(configuration(cell.config), []).append(cell)
    firsts = {repeats[0].hash: repeats for repeats in alike.values()}
    told = run_isolated(
        "sweeps.check",
        {"cells": [repeats[0].config for repeats in firsts.values()]},
        log=Path(os.devnull),
        timeout_s=TIMEOUT_S,
        device=NoDevice(),
        on_event=lambda event: None,
    )
    refused = [event for event in told.events if event["event"] == "no_room"]
    return {
        cell.hash: Outcome(status="wont_fit", reason=event["reason"], events=[{"event": "plan", **event["plan"]}])
        for event in refused
        for cell in firsts[event["cell"]]
    }


def _build(cell: Cell, emit: Callable[..., None]) -> None:
    try:
        build(cell.system, dataclasses.replace(cell.spec(), device=torch.device("cpu")))
        told = no_room(cell)
    except ValueError as error:
        emit("invalid", reason=" ".join(str(error).split()))
        return
    if told is not None:
        emit("no_room", cell=cell.hash, plan=told[0], reason=told[1])


def no_room(cell: Cell) -> tuple[dict[str, Any], str] | None:
    """(plan event, reason) of a cell whose plan is larger than the machine; None where it fits or only its cell can say.

    The engine on a GPU is left to its cell, which can probe the rates that placements and predictions need.
    """
    if cell.system == "megatrain" and cell.machine.device != "cpu":
        return None
    plan, told = plan_event(build(cell.system, cell.spec()), cell)
    reason = fits(plan, cell.model.name, cell.machine.device, environment.machine(cell.machine, None))
    return None if reason is None else (told, reason)


def main() -> int:
    """Always 0: what is wrong leaves on the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events-fd", type=int, required=True)
    emit = Emitter(parser.parse_args().events_fd)

    def ignore(event: str, **fields: Any) -> None:
        """Not a ValueError: the cell will say it in its row."""

    for config in json.load(sys.stdin)["cells"]:
        guarded(partial(_build, cell_from(config), emit), ignore)
    return 0


if __name__ == "__main__":
    sys.exit(main())
