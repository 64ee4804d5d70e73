"""Every system of a sweep built once before the first cell runs, for what only a system can refuse: its options, its model.

Invariant: in a process of its own and on the CPU, so the parent imports no measured library; nothing is allocated. Only a
ValueError counts: whatever else a system raises here is left for its cell, where it becomes a row.

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
from sweeps.cell import Emitter
from sweeps.config import Cell, cell_from
from sweeps.isolate import guarded, run_isolated
from sweeps.memory import NoDevice

TIMEOUT_S = 120.0


def refuse(cells: Sequence[Cell]) -> None:
    """ValueError, one line, for the first of `cells` whose system would not take its options or its model."""
    run_isolated(
        "sweeps.check",
        {"cells": [cell.config for cell in cells]},
        log=Path(os.devnull),
        timeout_s=TIMEOUT_S,
        device=NoDevice(),
        on_event=lambda event: None,
    )


def _build(cell: Cell, emit: Callable[..., None]) -> None:
    try:
        build(cell.system, dataclasses.replace(cell.spec(), device=torch.device("cpu")))
    except ValueError as error:
        emit("invalid", reason=" ".join(str(error).split()))


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
