"""Which cores the optimizer of one of several ranks is kept to, and which touch its memory first,
so that both are beside its device.

Invariant: no two ranks share a core where there are enough; where the NUMA node of some device is
not known, or has too few cores, each rank has an equal share of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.ranks import Ranks

T = TypeVar("T")
SYS = Path("/sys")


def cores_of(ranks: Ranks, device: torch.device) -> list[int]:
    """The cores of this rank, of those that the process may use. Rank r computes on GPU r."""
    allowed = sorted(os.sched_getaffinity(0))
    everyone = range(ranks.count)
    nodes = [_node(index) if device.type == "cuda" else None for index in everyone]
    return shared(ranks.index, nodes, allowed, _cores_of_node)


def shared(
    index: int,
    nodes: Sequence[int | None],
    allowed: Sequence[int],
    cores_of_node: Callable[[int], Sequence[int]],
) -> list[int]:
    """An equal part of the allowed cores of this rank's node for each rank there. nodes: of every
    rank's device, None where unknown."""
    known = [node for node in nodes if node is not None]
    local = {node: sorted(set(allowed) & set(cores_of_node(node))) for node in set(known)}
    if len(known) == len(nodes) and all(len(local[n]) >= nodes.count(n) for n in known):
        beside = [rank for rank, node in enumerate(nodes) if node == nodes[index]]
        return _part(local[known[index]], beside.index(index), len(beside))
    return _part(allowed, index, len(nodes))


def _part(cores: Sequence[int], place: int, count: int) -> list[int]:
    found = list(cores[place * len(cores) // count : (place + 1) * len(cores) // count])
    return found or [cores[place % len(cores)]]


def on_cores(cores: Sequence[int], work: Callable[[], T]) -> T:
    """What `work` returns in a thread that is kept to these cores, as are those that it starts."""
    with ThreadPoolExecutor(1, initializer=keep_to, initargs=(cores,)) as thread:
        return thread.submit(work).result()


def keep_to(cores: Sequence[int]) -> None:
    """Keep this thread, and those that it starts, to these cores; all where none are given."""
    if cores:
        os.sched_setaffinity(0, cores)


def _node(index: int) -> int | None:
    """The NUMA node of a GPU, where the kernel knows it."""
    known: Any = torch.cuda.get_device_properties(index)
    address = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    try:
        node = int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _cores_of_node(node: int) -> list[int]:
    """From the kernel's list, such as 0-15,32-47."""
    text = (SYS / f"devices/system/node/node{node}/cpulist").read_text().strip()
    spans = [part.split("-") for part in text.split(",") if part]
    return [core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)]
