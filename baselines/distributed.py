"""The process group: of one process, for the systems that insist on having one, or of the ranks
that a launcher started; and all that a rank asks of the others.

Invariant: the group that `acquire` started is destroyed by the last `release`; one started by
others is left alone. It needs no port, and nothing of it listens where another machine could
connect. Alone, what is asked of the others is answered without them.
"""

from __future__ import annotations

import datetime
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from engine import Batch

LOOPBACK = "lo"
"""The interface that no other machine reaches."""

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
"""What libraries read of a group of one process."""

STORE = "MEGATRAIN_STORE"
"""Environment variable that names the file through which the ranks find each other. A launcher that
starts several sets it beside torch's own RANK and WORLD_SIZE."""

_users = 0
_ours = False
_before: dict[str, str | None] = {}
"""What was there before in their place."""


def acquire(backend: str, timeout_s: float | None = None) -> None:
    """Join the running process group, or start that of the launched ranks, or one of this process
    alone (`backend` as torch names it). timeout_s: of one collective; None is torch's own.

    Its store is a file, or this process's own memory: torch's TCPStore listens on every interface.
    Gloo and NCCL listen too, on the interface that they are told.
    """
    global _users, _ours
    if not dist.is_initialized():
        given = {} if STORE in os.environ else ALONE
        _before.update({name: os.environ.get(name) for name in given})
        os.environ.update(given)
        rank, num = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        path = os.environ.get(STORE)
        store = dist.HashStore() if path is None else dist.FileStore(path, num)  # type: ignore[attr-defined]
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=timeout)
        _users, _ours = 0, True
    # DeepSpeed and FSDP2 call collectives that torch 2.13 renamed: a warning a call, inside the
    # measured step.
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning
    )
    _users += 1


def release() -> None:
    """Leave the group; the last one to leave destroys it, and DeepSpeed's memory of it."""
    global _users, _ours
    _users = max(0, _users - 1)
    if _users or not _ours:
        return
    _ours = False
    deepspeed_comm: Any = sys.modules.get("deepspeed.comm.comm")
    group = getattr(deepspeed_comm, "cdb", None)
    if group is not None and group.is_initialized():
        # DeepSpeed keeps the group in module globals; a second engine in this process would use the
        # dead one.
        deepspeed_comm.destroy_process_group()
        deepspeed_comm.cdb = None
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in _before.items():  # others in this process would take themselves for a rank
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def rank() -> int:
    """The number of this process in its group, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Processes in the group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def part_of(batch: Batch) -> Batch:
    """This rank's rows of every micro-batch: those of rank r follow those of rank r - 1."""
    num = num_ranks()
    if num == 1:
        return batch
    rows = batch.tokens.shape[1] // num
    assert rows * num == batch.tokens.shape[1], "the config is checked"
    return batch.rows(slice(rank() * rows, (rank() + 1) * rows))


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, the same on each; in place."""
    if num_ranks() > 1:
        dist.all_reduce(value)
    return value


def norm_over_ranks(norm: torch.Tensor) -> torch.Tensor:
    """2-norm, 0-dim fp32, of what is spread over the ranks, from the norm of each one's share."""
    if num_ranks() == 1:
        return norm
    return summed(norm.double().square()).sqrt().float()


def slowest(seconds: float) -> float:
    """The most seconds that a rank took, the same on each; it returns when all have asked."""
    if num_ranks() == 1:
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def gathered(value: int) -> list[int]:
    """The number of every rank, by rank."""
    found = torch.zeros(num_ranks(), dtype=torch.int64)
    found[rank()] = value
    return [int(one) for one in summed(found)]


def num_collectives() -> int:
    """How many collectives this rank has begun: fewer than the others' where they wait for it."""
    groups: Any = list(dist.distributed_c10d._world.pg_map)
    backends = [group._get_backend(kind) for group in groups for kind in group._device_types]
    return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
