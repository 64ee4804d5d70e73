"""A model that does not fit into host memory trains with its optimizer state on disk, to the same
losses, and stays below the limit as seen from outside."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.planner.planner import CPU_OVERHEAD
from sweeps import auto, outlook, plan
from sweeps.command import command_of
from sweeps.config import Cell
from sweeps.identity import in_force
from sweeps.result import Row
from sweeps.rows import Rows
from sweeps.study import run_cell
from tests.engine.test_ranks import planner_of
from tests.models import H200
from tests.sweeps.test_config import composed

DEEP = [
    "model=tiny",
    "model.config.num_hidden_layers=24",
    "model.config.hidden_size=480",
    "model.config.intermediate_size=1536",
    "shape=quick",
    "shape.seq_len=4",
    "measure=brief",
    "logging=none",
    "machine.device=cpu",
]
"""66M parameters in layers that are small beside all of them."""


def cell_of(folder: Path, *overrides: str) -> Cell:
    auto.register()
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    given = [*DEEP, f"output_dir={folder}", f"machine.nvme_path={drive}", *overrides]
    (one,) = command_of(given).cells or []
    return one


def ran(folder: Path, *overrides: str) -> Row:
    return run_cell(cell_of(folder, *overrides), "", Rows())


@pytest.mark.slow
def test_a_model_trains_whose_state_host_memory_does_not_hold(tmp_path: Path) -> None:
    free = ran(tmp_path, "system=megatrain")
    assert free.status == "ok", free.reason
    assert free.peak_host_bytes is not None
    assert free.host_split is not None
    assert free.host_split["other"] < 1.1 * CPU_OVERHEAD
    rest = 10 * (free.num_params or 0)
    limit = free.peak_host_bytes - rest // 4
    room = f"machine.host_bytes={limit}"
    tight = ran(tmp_path, "system=megatrain", "system.disk_blocks=26", room)
    assert tight.status == "ok", tight.reason
    assert tight.losses == free.losses
    assert tight.peak_host_bytes is not None
    assert tight.peak_host_bytes < limit
    assert tight.plan["disk"]["optimizer"] > rest
    assert tight.plan["placement"]["disk_blocks"] == 26
    counters = tight.window_counters[0]
    steps = len(tight.step_s) * 3  # of a window
    assert counters["disk_written_bytes"] % tight.plan["disk"]["optimizer"] == 0
    assert 0 < counters["disk_written_bytes"] <= steps * tight.plan["disk"]["optimizer"]
    assert list((tmp_path / "drive").iterdir()) == []
    chosen = ran(tmp_path, "system=megatrain", "system.disk_blocks=-1", room)
    assert chosen.status == "ok", chosen.reason
    assert chosen.losses == free.losses
    assert chosen.peak_host_bytes is not None
    assert chosen.peak_host_bytes < limit
    assert 0 < chosen.plan["placement"]["disk_blocks"] < 26


def test_what_is_planned_for_a_limit_keeps_to_it(tmp_path: Path) -> None:
    """Refused where all must be in memory, and planned with as little on disk as there must be."""
    deep = ["system=megatrain", "model.config.num_hidden_layers=96"]
    all_here = cell_of(tmp_path, *deep)
    plain = outlook.outlook_of(outlook.built(all_here), all_here).plan
    needed = sum(plain["host"].values()) + sum(plain["device"].values())
    room = f"machine.host_bytes={needed * 3 // 4}"
    told = {}
    for number in (0, -1):
        one = cell_of(tmp_path, *deep, f"system.disk_blocks={number}", room)
        told[number] = outlook.outlook_of(outlook.built(one), one)
    assert (told[0].refusal or "").startswith("model: got tiny, which needs")
    assert told[-1].refusal is None
    assert 0 < told[-1].plan["placement"]["disk_blocks"] < 98
    assert told[-1].plan["disk"]["optimizer"] > 0
    used = sum(sum(told[-1].plan[kind].values()) for kind in ("host", "device"))
    assert used + CPU_OVERHEAD <= needed * 3 // 4, "and the process itself has room"


def test_without_a_folder_the_cell_is_refused_in_a_line() -> None:
    said = "^machine.nvme_path: got nothing, allowed a folder on a local disk with system.disk_b"
    with pytest.raises(ValueError, match=said):
        outlook.built(composed("system=megatrain", "system.disk_blocks=2"))


def test_no_state_on_disk_is_the_cell_that_it_was(tmp_path: Path) -> None:
    plain = composed("system=megatrain")
    config = {**plain.config, "system": dict(plain.config["system"])}
    del config["system"]["disk_blocks"]
    assert dataclasses.replace(plain, config=config).hash == plain.hash
    assert composed("system=megatrain", "system.disk_blocks=1").hash != plain.hash
    for one in (plain.config, config):  # and a table says 0, of rows of any age
        assert in_force(one)["system"]["disk_blocks"] == 0
    assert "disk_blocks" not in in_force(composed("system=zero3").config)["system"]


def test_a_prediction_knows_the_drives() -> None:
    rates = dataclasses.replace(H200, disk_read_bytes=1e8, disk_write_bytes=5e7)
    folders = [Path("/tmp")]
    steps = []
    for number in (0, 3, 5):
        planner, blocks = planner_of(1, rates=rates, disk_blocks=number, folders=folders)
        steps.append(planner.predict(blocks).step_s)
        written = 10 * sum(planner.work.layouts[block].numel for block in blocks.on_disks)
        assert len(blocks.on_disks) == number
        assert steps[-1] >= 0.999 * written / 5e7
    assert steps == sorted(steps)
    planner, blocks = planner_of(1, rates=H200, disk_blocks=3, folders=folders)
    with pytest.raises(ValueError, match=r"^rates.disk_read_bytes: got 0, or rates.disk_write_b"):
        planner.predict(blocks)


def test_the_largest_model_is_told_for_machines_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of layers of one width, and more of them with state on disk."""
    monkeypatch.setattr(plan, "WIDTHS", ("qwen2.5-7b",))
    shape = ["shape.batch_size=32", "shape.seq_len=1024", "shape.num_micro_batches=32"]
    monkeypatch.setattr("sys.argv", ["plan", "--largest", *shape])
    assert plan.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["24", "80", "141", "141"]
    sizes = [list(map(float, re.findall(r"([\d.]+)B \(", line))) for line in lines[1:5]]
    assert all(memory < disk for memory, disk in sizes)
    assert sizes[0][0] * 14e9 < 64e9 + 24e9, "bytes that there are"
    ((number, away),) = re.findall(r"\((\d+) layers of [^)]*\), (\d+) GB", lines[1])
    rates = ["+rates=h200_16cores", "+rates.disk_read_bytes=1e9", "+rates.disk_write_bytes=1e9"]
    asked = [*shape, *rates, "model=qwen2.5-7b", "system=megatrain", "machine.nvme_path=/tmp"]
    asked += ["machine.device_bytes=24000000000", "machine.host_bytes=64000000000"]
    asked += ["system.checkpoint_interval=-1", "system.device_optimizer=-1"]
    asked += ["system.disk_blocks=-1", "system.late_moments=false"]
    for more in (0, 1):
        layers = f"model.config.num_hidden_layers={int(number) + more}"
        told = plan.report(*plan.compose_plan([*asked, layers]))
        assert ("barely" in told[-1]) is bool(more), "the very last that keeps a tenth free"
        if not more:
            (on_disk,) = (
                line for line in told if line.startswith("  optimizer") and "every" in line
            )
            assert round(float(on_disk.split()[1])) == int(away)
