"""Rows of a JSONL file fed to W&B: after every cell, and again whenever the mirror is lost.

Invariant: reads the JSONL and nothing else, so a run in W&B says what the row says: the loss of every step, the
throughput of every window, the config, and the whole row as its summary.

    python -m sweeps.mirror outputs/quickstart/rows.jsonl [--cell HASH] [--mode offline|online] [--project NAME]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from sweeps.result import Row, read_rows

HISTORY = ("losses", "step_s", "config")
"""Fields of a row that are not its summary."""


def history(row: Row) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values): the loss of every step; at a window's last step also its seconds a step and tokens/s."""
    measure = row.config.get("measure", {})
    warmup, length = int(measure.get("warmup_steps", 0)), int(measure.get("steps_per_window", 1))
    tokens = row.tokens_per_s * fmean(row.step_s) if row.tokens_per_s and row.step_s else None  # label tokens of a step
    ends = {warmup + (number + 1) * length - 1: seconds for number, seconds in enumerate(row.step_s)}
    for step, loss in enumerate(row.losses):
        values = {"loss": loss}
        if step in ends:
            values |= {"step_s": ends[step]} | ({"tokens_per_s": tokens / ends[step]} if tokens else {})
        yield step, values


def summary(row: Row) -> dict[str, Any]:
    """Every other field of the row; W&B nests the mappings itself."""
    fields = {name: value for name, value in dataclasses.asdict(row).items() if name not in HISTORY}
    return fields | ({"final_loss": row.losses[-1]} if row.losses else {})


def mirror(row: Row, folder: Path, mode: str, project: str) -> str:
    """Write one run; the folder it is in."""
    import wandb

    settings = wandb.Settings(
        console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True
    )
    run = wandb.init(
        project=project,
        mode="online" if mode == "online" else "offline",
        dir=str(folder),
        group=row.experiment,
        name=f"{row.system}-{row.cell}",
        tags=[row.system, row.model, row.status],
        config={**row.config, "machine": row.machine, "versions": row.versions, "cell": row.cell},
        settings=settings,
    )
    for step, values in history(row):
        run.log(values, step=step)
    run.summary.update(summary(row))
    where = str(Path(run.dir).parent)
    run.finish(exit_code=0 if row.status == "ok" else 1)
    return where


def main() -> int:
    """Mirror every row, or the last one of `--cell`; prints a folder for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--cell")
    parser.add_argument("--mode", choices=("offline", "online"), default="offline")
    parser.add_argument("--project", default="megatrain-bench")
    arguments = parser.parse_args()
    os.environ["WANDB_SILENT"] = "true"
    try:
        rows = read_rows(arguments.rows)
    except (OSError, ValueError) as error:
        print(f"mirror: {error}", file=sys.stderr)
        return 2
    if arguments.cell:
        rows = [row for row in rows if row.cell == arguments.cell][-1:]
        if not rows:
            print(
                f"mirror: --cell: got {arguments.cell}, allowed a cell of {arguments.rows}; look at its `cell` field",
                file=sys.stderr,
            )
            return 2
    for row in rows:
        print(mirror(row, arguments.rows.resolve().parent, arguments.mode, arguments.project))
    return 0


if __name__ == "__main__":
    sys.exit(main())
