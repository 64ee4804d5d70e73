"""Mirrors the log of a run to W&B while it is written, in a process of its own.

Invariant: it only mirrors. Its noise, its hangs and its errors cost the run nothing; one line on
stderr says when it would not. Every start of a run has the same id: online it goes on where W&B is,
offline it writes the whole log again, and the run folders of earlier starts go.

    python -m sweeps.follow LOG ID MODE PROJECT < /dev/null         # a log that is finished
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.config import Cell

POLL_S = 1.0
WAIT_S = 120.0
"""Seconds that W&B may take at the end of a run."""


class Follower:
    """The process beside a run, from the run's first step to its last."""

    def __init__(self, cell: Cell, run_id: str) -> None:
        self._logging, self._folder, self._id = cell.logging, cell.output_dir, run_id
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object

    def __enter__(self) -> Follower:
        if self._logging.wandb != "disabled":
            where = [str(self._folder / "log.jsonl"), self._id]
            how = [self._logging.wandb, self._logging.project]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sweeps.follow", *where, *how],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,  # a pipe that nobody empties would be full one day
                start_new_session=True,  # a Ctrl-C is for the run alone
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        try:  # its standard input ends, and so does it
            self._process.communicate(timeout=WAIT_S)
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            why = (said.splitlines() or ["no output"])[-1][:200]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            why = "it took too long"
        if self._process.returncode:
            print(f"wandb: the log was not mirrored ({why}); log.jsonl has it", file=sys.stderr)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that is being written, until standard input ends and all were read."""
    with path.open("rb") as file:
        over, rest = False, b""
        while True:
            *whole, rest = (rest + file.read()).split(b"\n")
            yield from map(json.loads, whole)
            if over:
                return
            ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
            over = bool(ready) and not os.read(sys.stdin.fileno(), 1)


def main() -> int:
    """Mirror; 0."""
    import wandb

    path = Path(sys.argv[1])
    run_id, mode, project = sys.argv[2:5]
    os.environ["WANDB_SILENT"] = "true"
    config = json.loads((path.parent / "run.json").read_text())["config"]
    before = {*path.parent.glob(f"wandb/offline-run-*-{run_id}")}
    run: Any = wandb.init(
        project=project,
        mode="offline" if mode == "offline" else "online",
        id=run_id,
        name=path.parent.name,
        dir=str(path.parent),
        resume="allow" if mode == "online" else None,
        config=config,
    )
    there = run.step
    for line in lines(path):
        step = line.pop("step")
        if step >= there:
            run.log(line, step=step)
    run.finish()
    for folder in before:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
