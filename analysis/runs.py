"""Rows back from W&B: from offline runs on disk, and from a project online.

Invariant: both ways only fetch (packed row, history) pairs, of which `sweeps.result.unpacked`
makes the row of the JSONL that was uploaded. A run that lacks a part is an error, never a shorter
curve.
"""

import os
import re
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from sweeps import runfile
from sweeps.runfile import Tagged, tagged

ONLINE = re.compile(
    r"wandb:(?P<entity>[^/@#]+)/(?P<project>[^/@#]+)(@(?P<group>[^#]+))?(#(?P<tag>.+))?"
)
"""wandb:entity/project, then @group and #tag where only those runs are meant."""
END_S = 5.0
"""What W&B's service gets to end by itself after the program that asked it."""


def offline(files: Iterable[Path]) -> list[Tagged]:
    """The rows of runs on disk, synced or not; of several runs with one id the last that is whole.

    Raises ValueError, one line, which names the first that is not, and how many more there are.
    """
    listed = list(files)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        read = dict(zip(listed, pool.map(_read, listed), strict=True))
    rows = {file.stem: found for file, found in read.items() if isinstance(found, Tagged)}
    errors = {file.stem: found for file, found in read.items() if isinstance(found, ValueError)}
    bad = [error for stem, error in errors.items() if stem not in rows]
    if bad:
        raise ValueError(f"{bad[0]}{f'; so are {len(bad) - 1} more' if bad[1:] else ''}")
    return list(rows.values())


def _read(file: Path) -> Tagged | ValueError:
    try:
        return runfile.read(file)
    except ValueError as error:  # one of several runs with this id may be whole
        return error


def online(source: str) -> list[Tagged]:
    """The rows of a project, by its whole history, never the sampled one. ValueError, one line."""
    match = ONLINE.fullmatch(source)
    if match is None:
        allowed = "allowed wandb:entity/project[@group][#tag]; see its address in W&B"
        raise ValueError(f"{source}: got no project, {allowed}")
    path = f"{match['entity']}/{match['project']}"
    wanted = {"group": match["group"], "tags": match["tag"]}
    filters = {name: value for name, value in wanted.items() if value}
    from wandb import Api, Error

    threading.Thread(target=_end_service, name="end-wandb", daemon=True).start()
    try:
        found = Api().runs(path, filters=filters)
        rows = [tagged(run.config, run.scan_history(), f"wandb:{path}/{run.id}") for run in found]
    except (Error, ValueError, OSError) as error:
        told = " ".join(str(error).split())
        if told.startswith("wandb:"):
            raise ValueError(told) from None
        remedy = "check name, `wandb login` and network, or load the JSONL or offline runs instead"
        raise ValueError(f"{source}: W&B said {told!r}; {remedy}") from None
    if not rows:
        allowed = "allowed those that sweeps.upload has fed; check @group and #tag"
        raise ValueError(f"{source}: got no such runs, {allowed}")
    return rows


def _end_service() -> None:
    """Let this program end: the service of W&B 0.31 may wait for ever after a request it gave up.

    Where a run of the program's own is open, the service has that to end, and is left alone.
    """
    import wandb

    threading.main_thread().join()
    time.sleep(END_S)
    for child in psutil.Process().children() if wandb.run is None else ():
        if child.name().startswith("wandb-core"):
            child.kill()
