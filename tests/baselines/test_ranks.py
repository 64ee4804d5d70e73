"""Several ranks: every system that can train on them computes what it computes alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.registry import RANKED, REGISTRY, build, require_ranked
from tests.baselines.ranked import CASES, OPTIONS, trained
from tests.baselines.test_baseline_parity import TOLERANCE, make_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks saw, started by torch's own launcher."""
    folder = tmp_path_factory.mktemp("ranks")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "tests.baselines.ranked", str(folder)]
    known = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / "seen.pt")
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_train_as_one_does(name: str, case: str, seen: dict[str, Any]) -> None:
    """Losses, norms, parameters and evaluations, though one rank has fewer label tokens."""
    system, options = OPTIONS[name]
    spec = make_spec(*CASES[case], **options)
    alone, ranks = trained(system, spec), seen["trained"][f"{name} {case}"]
    assert alone["losses"][-1] < alone["losses"][0]
    tolerance = TOLERANCE[spec.dtype]
    assert ranks["losses"] == pytest.approx(alone["losses"], abs=tolerance)
    assert ranks["evaluated"] == pytest.approx(alone["evaluated"], abs=tolerance)
    assert ranks["norms"] == pytest.approx(
        alone["norms"], rel=1e-4 if spec.dtype == torch.float32 else 2e-2
    )
    assert ranks["parameters"].keys() == alone["parameters"].keys()
    for key, value in alone["parameters"].items():
        assert ranks["parameters"][key].shape == value.shape
        drift = (ranks["parameters"][key] - value).abs().max().item()
        assert drift < (1e-3 if spec.dtype == torch.float32 else 1e-2), (key, drift)


def test_several_ranks_write_no_checkpoint_and_say_so(seen: dict[str, Any]) -> None:
    said = "save: the state is spread over 2 ranks, which write no checkpoint here; train with one"
    assert seen["refused"] == {"fsdp2": said, "zero3": said}


@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in RANKED])
def test_a_system_of_one_process_refuses_several(name: str) -> None:
    said = (
        f"process.num_gpus: got 2, allowed 1 with system {name}, which trains in one process; "
        f"leave it out or choose among {', '.join(RANKED)}"
    )
    with pytest.raises(ValueError, match=f"^{said}$"):
        require_ranked(name, "process.num_gpus", 2)
    require_ranked(name, "process.num_gpus", 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_plan_is_one_rank_s(name: str) -> None:
    """Half the state, and as much of the weights and activations in use."""
    system, options = OPTIONS[name]
    spec = make_spec(torch.bfloat16, **options)
    alone = build(system, spec).plan()
    ranks = build(system, dataclasses.replace(spec, num_ranks=2)).plan()
    both = [{**one.device, **one.host} for one in (alone, ranks)]
    pages = 10 * 4096 if name == "megatrain" else 0  # parts of a block are whole pages
    for kind in ("master", "moments"):
        assert both[1][kind] == pytest.approx(both[0][kind] / 2, rel=1e-3, abs=pages)
    assert ranks.device["checkpoints"] * 2 == alone.device["checkpoints"]
    if system != "in_memory":  # there the module is made on the host first
        assert ranks.host_bytes < 0.75 * alone.host_bytes
