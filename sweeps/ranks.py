"""The ranks of one cell: processes that train together, started and watched by torch's elastic
launcher, each of them `sweeps.cell`.

Invariant: rank 0 alone speaks for the cell, the others of their failures alone; a rank that raises
has said so before any other can notice, one that is killed is named by the launcher, and where time
runs out every rank has said how far it was. What the ranks write to find each other lies in one
folder of the study's, which goes with the cell.

    python -m sweeps.ranks --events-fd FD < config.json     (started by sweeps.study)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

from sweeps.events import Emitter
from sweeps.isolate import report

DEADLINE = "MEGATRAIN_DEADLINE"
"""Environment variable: when the cell's time is up, on time.monotonic's clock."""
MODULE = "MEGATRAIN_RANK"
"""Environment variable: the module that each rank runs."""
LAST_WORDS_S = 2.0
"""Seconds before that, a tenth of the cell's time at most, when the ranks say how far they are."""
PATIENCE_S = 5
"""Seconds that the other ranks have to end when one has failed."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The ranks of a cell are on one machine."""
FAILURES = ("failed", "invalid")
"""What every rank may say."""


@contextlib.contextmanager
def started(
    num_ranks: int, timeout_s: float, module: str = "sweeps.cell"
) -> Iterator[tuple[str, dict[str, str]]]:
    """The module that a cell's process runs, and its environment beside the usual one; while it
    lasts the ranks have a folder. module: what each rank runs."""
    if num_ranks == 1:
        yield module, {}
        return
    with tempfile.TemporaryDirectory(prefix="megatrain-ranks-", ignore_cleanup_errors=True) as path:
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        deadline = time.monotonic() + timeout_s
        ours = {"TMPDIR": path, MODULE: module, DEADLINE: str(deadline), **LOOPBACK}
        known = os.environ.get("OMP_NUM_THREADS", str(threads))  # or each would take all cores
        yield "sweeps.ranks", {**ours, "OMP_NUM_THREADS": known}


def launch(num_ranks: int, command: Sequence[str]) -> dict[int, int]:
    """Run `python command` on so many ranks until all have ended, or one has failed and with it
    all: the exit codes of those that failed by themselves, by rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from baselines.distributed import STORE

    folder = Path(tempfile.mkdtemp())
    # Files in place of torch's TCPStore, which listens on every interface.
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", STORE: str(folder / "store")}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    # torch 2.11 has no such setting, and waits for half a minute.
    patience: dict[str, Any] = dict.fromkeys({"shutdown_timeout"} & known, PATIENCE_S)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="cell",
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="localhost",
        max_restarts=0,
        **patience,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return _ended(error.failures)
    return {}


def _ended(failures: Mapping[int, Any]) -> dict[int, int]:
    """Exit codes of the ranks that failed when the first one did. Those that fail seconds later, or
    by the launcher's SIGTERM, do because of it."""
    first = min(failure.timestamp for failure in failures.values())
    found = {
        number: int(failure.exitcode)
        for number, failure in failures.items()
        if failure.timestamp <= first + 1
    }
    return {number: code for number, code in found.items() if code != -SIGTERM} or found


def is_rank() -> bool:
    """Whether this process is a rank of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and DEADLINE in os.environ


def rank() -> int:
    """The number of this rank, as the launcher gave it; 0 alone."""
    return int(os.environ["RANK"]) if is_rank() else 0


def heard(emit: Callable[..., None]) -> Callable[..., None]:
    """What this process says of the cell: rank 0 all, the others their failures alone."""
    if not rank():
        return emit

    def failures(event: str, **fields: Any) -> None:
        if event in FAILURES:
            emit(event, **fields)

    return failures


def naming(emit: Callable[..., None]) -> Callable[..., None]:
    """The same emit, whose failures say which rank it was."""
    if not is_rank():
        return emit

    def named(event: str, **fields: Any) -> None:
        if event == "failed":
            fields |= {"reason": f"rank {rank()}: {fields['reason']}", "rank": rank()}
        emit(event, **fields)

    return named


@contextlib.contextmanager
def joined(device: str, timeout_s: float, emit: Callable[..., None]) -> Iterator[None]:
    """The group of the cell's ranks, while it lasts; nothing alone. timeout_s: of one collective.

    What a rank raises ends its process at once, and it is not to close anything before: that would
    wait for the others, which then fail too, and what they say comes later.
    """
    if not is_rank():
        yield
        return
    import torch

    from baselines import distributed

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.acquire(backend, timeout_s=timeout_s)
    timer = _speak_before(float(os.environ[DEADLINE]), emit)
    try:
        yield
    except Exception as error:
        report(error, naming(emit))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    timer.cancel()
    distributed.release()


def _speak_before(deadline: float, emit: Callable[..., None]) -> threading.Timer:
    """Shortly before the deadline, say how many collectives this rank has begun: one that hangs has
    begun fewer than those that wait for it, or says nothing at all."""
    from baselines import distributed

    def speak() -> None:
        with contextlib.suppress(Exception):  # the group is being left
            number, num = distributed.rank(), distributed.num_ranks()
            emit("rank_at", rank=number, of=num, collectives=distributed.num_collectives())

    left_s = deadline - time.monotonic()
    timer = threading.Timer(left_s - min(LAST_WORDS_S, left_s / 10), speak)
    timer.daemon = True
    timer.start()
    return timer


def main() -> int:
    """Exit code 0 when every rank ended well; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events-fd", type=int, required=True)
    descriptor = parser.parse_args().events_fd
    with open("/proc/self/fd/0") as config:
        process = json.load(config)["process"]
    # The launcher gives its workers no open files: they open the pipe by its name.
    events = f"/proc/{os.getpid()}/fd/{descriptor}"
    num = max(process["num_gpus"], process["num_cpu_ranks"])
    failed = launch(num, ["-m", os.environ[MODULE], "--events-fd", events])
    for number, exit_code in failed.items():
        Emitter(descriptor)("rank_ended", rank=number, exit_code=exit_code)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
