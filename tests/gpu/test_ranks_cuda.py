"""Several GPUs: every system that trains on them, as cells under the launcher, beside itself on one.

python -m pytest tests/gpu/test_ranks_cuda.py -m gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baselines.registry import RANKED
from sweeps import auto
from sweeps.command import command_of
from sweeps.result import Row
from sweeps.rows import Rows
from sweeps.study import run_cell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # the first one builds DeepSpeed's operators
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SYSTEMS = [*RANKED, "zero3_optimizer", "zero3_twinflow", "fsdp2_grad_op"]
"""Files of conf/system."""
SMALL = [
    "model=tiny",
    "shape.batch_size=8",
    "shape.seq_len=128",
    "measure=brief",
    "logging=none",
    "measure.heldout_tokens=512",
]


def rows_of(folder: Path, *overrides: str) -> list[Row]:
    """The rows of one cell on one GPU and on two."""
    auto.register()
    told = [*SMALL, *overrides, f"output_dir={folder}"]
    cells = [command_of([*told, f"process.num_gpus={num}"]).cells[0] for num in (1, 2)]
    return [run_cell(cell, "", Rows()) for cell in cells]


@pytest.mark.parametrize("name", SYSTEMS)
def test_two_gpus_train_as_one_does(name: str, tmp_path: Path) -> None:
    settings = ["system.sub_group_size=1000000"] if name == "zero3_twinflow" else []
    one, two = rows_of(tmp_path, f"system={name}", *settings)
    assert [row.status for row in (one, two)] == ["ok", "ok"], (one.reason, two.reason)
    assert two.losses == pytest.approx(one.losses, abs=2e-3)
    assert two.gradient_norms == pytest.approx(one.gradient_norms, rel=2e-2)
    assert two.heldout_loss == pytest.approx(one.heldout_loss, abs=2e-2)
    assert two.peak_device_bytes is not None
    assert two.peak_device_bytes < (two.all_device_bytes or 0) <= 2 * two.peak_device_bytes
    assert two.peak_device_bytes <= sum(two.plan["device"].values())


def test_accumulation_over_two_gpus(tmp_path: Path) -> None:
    one, two = rows_of(tmp_path, "system=fsdp2", "shape.num_micro_batches=2", "mode=compiled")
    assert [row.status for row in (one, two)] == ["ok", "ok"], (one.reason, two.reason)
    assert two.losses == pytest.approx(one.losses, abs=2e-3)


def test_ranks_without_room_are_refused_as_one_is(tmp_path: Path) -> None:
    one, two = rows_of(tmp_path, "system=in_memory", "machine.device_bytes=20000000")
    assert [row.status for row in (one, two)] == ["wont_fit", "wont_fit"]
