"""Uploads rows of JSONL files to W&B: the bench does so after every cell, this command where runs
were lost.

Invariant: it reads the JSONL and nothing else, and a run holds its whole row, so `analysis.rows`
makes the same frame of both. A run's id follows from the row's cell and start: a run that exists is
skipped offline and overwritten online, never doubled. An offline run counts as uploaded once its
file was read back and found to hold the row, and as long as that file does not change.

    python -m sweeps.upload outputs/quickstart               # offline runs, beside the rows
    python -m sweeps.upload outputs/quickstart/rows.jsonl mode=online project=NAME cell=HASH
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps import runfile
from sweeps.command_line import asks_help
from sweeps.identity import digest, file_id
from sweeps.mirror import history, packed
from sweeps.result import HISTORY, Row
from sweeps.rowfile import read_rows

DEFAULTS = {"project": "megatrain-bench", "mode": "offline", "cell": ""}
MODES = ("offline", "online")
WHOLE = "uploaded"
"""File in the folder of an offline run, written once the run was read back and found to hold its
row; it has the project and the run file's digest."""


def run_id(row: Row) -> str:
    """Twelve hex digits that differ for every attempt at every cell, and for the same row in
    another study."""
    taken = (
        [row.experiment] if row.config.get("experiment", row.experiment) != row.experiment else []
    )
    return digest([row.cell, row.started_at, row.machine, *taken])


def offline_run(row: Row, folder: Path, project: str) -> Path | None:
    """The folder of the row's offline run below `folder`; None where none was uploaded to that
    project or its file has changed since."""
    for marker in sorted(folder.glob(f"wandb/offline-run-*-{run_id(row)}/{WHOLE}")):
        log = _log(marker.parent, row)
        if log.exists() and marker.read_text() == _sealed(log, project):
            return marker.parent
    return None


def _log(run: Path, row: Row) -> Path:
    """The file in the folder of a run that W&B keeps the row in."""
    return run / f"run-{run_id(row)}.wandb"


def _sealed(log: Path, project: str) -> str:
    return f"{project}\n{hashlib.sha256(log.read_bytes()).hexdigest()}\n"


def confirm(row: Row, log: Path, file: Path, position: int, project: str) -> None:
    """Mark a run as uploaded, once its file was read back.

    ValueError, one line, where the file is not the row: W&B reports no full disk.
    """
    try:
        found = runfile.read(log)
        whole = (found.row.to_json(), found.position, found.file) == (
            row.to_json(),
            position,
            file_id(file),
        )
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(
            f"{log}: got less than the row, which W&B could not write; make room on its disk and "
            "upload again"
        )
    new = log.with_name(f"{WHOLE}.new")
    with new.open("w") as marker:
        marker.write(_sealed(log, project))
        marker.flush()
        os.fsync(marker.fileno())
    new.replace(log.with_name(WHOLE))


def config_of(row: Row, file: Path, position: int) -> dict[str, Any]:
    """The run's config: the cell's, for W&B's tables, and the row and its place in the file."""
    shown = {**row.config, "machine": row.machine, "versions": row.versions, "cell": row.cell}
    return shown | {"file": file_id(file), "position": position, "row": packed(row)}


def upload(row: Row, file: Path, position: int, mode: str, project: str) -> Path:
    """Write one run into the folder wandb beside `file`, and return the run's own folder.

    position: the row's place in `file`.
    """
    import wandb

    identity, folder = run_id(row), file.resolve().parent
    if mode == "offline" and (done := offline_run(row, folder, project)):
        return done
    settings = wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
    )
    run = wandb.init(
        project=project,
        id=identity,
        mode="online" if mode == "online" else "offline",
        dir=str(folder),
        group=row.experiment,
        name=f"{row.system}-{row.cell}",
        tags=[row.system, row.model, row.status],
        config=config_of(row, file, position),
        settings=settings,
    )
    for step, values in history(row):
        run.log(values, step=step)
    run.summary.update(summary(row))
    where = Path(run.dir).parent
    run.finish(exit_code=0 if row.status == "ok" else 1)
    if mode == "offline":
        confirm(row, _log(where, row), file, position, project)
    return where


def summary(row: Row) -> dict[str, Any]:
    """The row's fields that W&B's tables show beside config and history; W&B flattens mappings
    itself."""
    fields = {
        name: value
        for name, value in dataclasses.asdict(row).items()
        if name not in (*HISTORY, "config")
    }
    return fields | ({"final_loss": row.losses[-1]} if row.losses else {})


def parse(arguments: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """The path, which comes first, and the options; ValueError, one line."""
    if not arguments or (wrong := [item for item in arguments[1:] if "=" not in item]):
        got = repr(wrong[0]) if arguments else "nothing"
        raise ValueError(
            f"command line: got {got}, allowed a file or folder, then project=, mode= or cell=; "
            "correct it"
        )
    options = DEFAULTS | dict(item.split("=", 1) for item in arguments[1:])
    for name in options.keys() - DEFAULTS.keys():
        raise ValueError(
            f"{name}: got {options[name]!r}, an unknown option, allowed {', '.join(DEFAULTS)}; "
            "correct the name"
        )
    if options["mode"] not in MODES:
        raise ValueError(
            f"mode: got {options['mode']!r}, allowed {', '.join(MODES)}; choose one of these"
        )
    return Path(arguments[0]), options


def rows_in(path: Path, cell: str) -> list[tuple[Path, int, Row]]:
    """(file, position in it, row) of all rows of a file or folder, or of the last row of `cell`.
    ValueError, one line."""
    if not path.exists():
        raise ValueError(
            f"{path}: got no such file or folder, allowed a *.jsonl that sweeps.run wrote or a "
            "folder of them; correct it"
        )
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    found = [
        (file, position, row) for file in files for position, row in enumerate(read_rows(file))
    ]
    if not found:
        raise ValueError(
            f"{path}: got no rows, allowed a *.jsonl that sweeps.run wrote or a folder of them; "
            "run a bench first"
        )
    if cell and not any(row.cell == cell for _, _, row in found):
        raise ValueError(f"cell: got {cell}, allowed a cell of {path}; look at its `cell` field")
    return [item for item in found if item[2].cell == cell][-1:] if cell else found


def main(arguments: Sequence[str] | None = None) -> int:
    """Upload, and print the folder of each run. Exit code 2, after one line, where the command
    line, the rows or W&B are at fault; 1 where the reader of the output has gone."""
    if asks_help(sys.argv[1:] if arguments is None else arguments):
        print(__doc__)
        return 0
    os.environ["WANDB_SILENT"] = "true"
    logging.raiseExceptions = False  # a full disk is said once, below
    try:
        path, options = parse(sys.argv[1:] if arguments is None else arguments)
        items = rows_in(path, options["cell"])
    except (OSError, ValueError) as error:
        print(f"upload: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for file, position, row in items:
        try:
            folder = _uploaded(row, file, position, options)
        except ValueError as error:
            print(f"upload: {error}", file=sys.stderr)
            return 2
        try:
            print(folder, flush=True)
        except BrokenPipeError:  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    return 0


def _uploaded(row: Row, file: Path, position: int, options: Mapping[str, str]) -> Path:
    """The folder of the row's run, uploaded as `options` say; ValueError, one line, where W&B or
    its disk failed."""
    from wandb import Error

    try:
        return upload(row, file, position, options["mode"], options["project"])
    except Error as error:
        raise ValueError(
            f"mode={options['mode']}: W&B said {' '.join(str(error).split())}; upload offline and "
            "`wandb sync` later"
        ) from None
    except OSError as error:
        where = error.filename or file.resolve().parent / "wandb"
        raise ValueError(
            f"{where}: got {error.strerror}, allowed a disk with room; upload again"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
