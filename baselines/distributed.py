"""One process group of one process, shared by the systems that insist on having one.

Invariant: the group that `acquire` started is destroyed by the last `release`; one started by
others is left alone. It needs no port, and nothing of it listens where another machine could
connect.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch.distributed as dist

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

_users = 0
_ours = False
_before: dict[str, str | None] = {}
"""What was there before in their place."""


def acquire(backend: str) -> None:
    """Join the running process group, or start one of this process alone (`backend` as torch names
    it).

    Its store is this process's own memory: torch's TCPStore listens on every interface. Gloo and
    NCCL listen too, on the interface that they are told.
    """
    global _users, _ours
    if not dist.is_initialized():
        _before.update({name: os.environ.get(name) for name in ALONE})
        os.environ.update(ALONE)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
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
