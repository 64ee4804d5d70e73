"""One W&B run back from its file: what sweeps.upload holds against the row, and analysis.rows
loads.

Invariant: a run that lacks a part is a ValueError of one line that names the file, never a shorter
curve.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.mirror import unpacked
from sweeps.result import Row

AGAIN = (
    "make it again from the JSONL, which has every row: python -m sweeps.upload ROWS (where that "
    "is lost, move the run's folder away)"
)


class Tagged(NamedTuple):
    """A row and where it came from."""

    row: Row
    position: int
    """In its JSONL file."""
    file: str
    """What tells that file from others (sweeps.identity.file_id): rows of one file are compared."""
    source: str
    """For people."""


def read(file: Path) -> Tagged:
    """The row of one .wandb file. W&B's own command reads it: the format is no public interface."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    with tempfile.TemporaryDirectory() as folder:  # the command leaves a log in TMPDIR
        quiet = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TMPDIR": folder}
        done = subprocess.run(
            command, capture_output=True, env=quiet, stdin=subprocess.DEVNULL, check=False
        )
    config: dict[str, Any] = {}
    steps = []
    try:
        for line in done.stdout.splitlines():
            record = json.loads(line)
            if record["type"] == "run":
                config |= record["run"].get("config", {}).get("update", {})
            elif record["type"] == "history":
                steps.append(record["history"]["item"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file}: got what W&B did not write, it was damaged; {AGAIN}") from None
    if not config and not steps:
        raise ValueError(f"{file}: got nothing readable, its writer was killed; {AGAIN}")
    return tagged(config, steps, str(file))


def tagged(config: Mapping[str, Any], steps: Iterable[Mapping[str, Any]], where: str) -> Tagged:
    """The row of a run's config and history. ValueError, one line."""
    if "row" not in config:
        allowed = "runs that this version of sweeps.upload wrote"
        raise ValueError(f"{where}: got a run without a row, allowed {allowed}; {AGAIN}")
    try:
        row = unpacked(config["row"], steps, where)
        return Tagged(row, int(config["position"]), str(config["file"]), where)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        detail = " ".join(str(error).split())
        allowed = "what sweeps.upload wrote"
        raise ValueError(
            f"{where}: got no row of this bench ({detail}), allowed {allowed}; {AGAIN}"
        ) from None
