"""Which cores a rank is kept to."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from engine import Ranks, cores
from engine.cores import cores_of, keep_to, on_cores, shared
from tests.engine.test_ranks import engine_of
from tests.threads import on_ranks

NODES = {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}


@pytest.mark.parametrize(
    ("nodes", "allowed", "expected"),
    [
        ([0, 1], range(16), [NODES[0], NODES[1]]),
        ([0, 0, 1, 1], range(16), [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]),
        ([0, 1], range(12), [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]),
        ([0, None], range(4), [[0, 1], [2, 3]]),
        ([None, None, None], range(2), [[0], [0], [1]]),
        ([0, 1], range(4), [[0, 1], [2, 3]]),  # no core of the second's node is allowed
    ],
    ids=str,
)
def test_cores_are_shared_by_the_ranks_of_a_node(nodes, allowed, expected):
    found = [shared(index, nodes, list(allowed), NODES.__getitem__) for index in range(len(nodes))]
    assert found == expected


def test_the_kernel_says_where_a_gpu_is(tmp_path, monkeypatch):
    """A tree like that of /sys."""
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "SYS", tmp_path)
    for index, node in enumerate((1, 0)):
        folder = tmp_path / f"bus/pci/devices/0000:{16 + index:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        place = tmp_path / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        half = len(allowed) // 2
        mine = allowed[half:] if node else allowed[:half]
        (place / "cpulist").write_text(",".join(f"{core}-{core}" for core in mine) + "\n")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=16 + index, pci_device_id=0),
    )
    device = torch.device("cuda")
    found = [cores_of(Ranks(index=index, count=2), device) for index in range(2)]
    assert found == [allowed[len(allowed) // 2 :], allowed[: len(allowed) // 2]]
    (tmp_path / "bus/pci/devices/0000:10:00.0/numa_node").write_text("-1\n")
    assert cores_of(Ranks(index=0, count=2), device) == allowed[: len(allowed) // 2]


def test_work_is_kept_to_the_cores_and_its_caller_is_not():
    before = os.sched_getaffinity(0)
    first = min(before)
    assert on_cores([first], lambda: os.sched_getaffinity(0)) == {first}
    keep_to([])
    assert os.sched_getaffinity(0) == before


def test_ranks_share_the_cores_of_their_process():
    case = (torch.float32, 0.5, 1, False)
    found = on_ranks(2, lambda ranks: engine_of(case, ranks).cores)
    allowed = sorted(os.sched_getaffinity(0))
    assert sorted(found[0] + found[1]) == allowed if len(allowed) > 1 else allowed * 2
    assert engine_of(case).cores == []
