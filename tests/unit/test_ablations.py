"""Every study composes into distinct cells; the ladder starts at the published algorithm and ends at fast, a switch at a time."""

import itertools
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sweeps import auto, run
from sweeps.config import Cell

NAMES = sorted(path.stem for path in (auto.CONF / "ablation").glob("*.yaml"))
CELLS = {"double_buffering": 12, "ladder": 8, "placement": 8}
"""Studies whose size is part of what they are."""


def cells_of(*overrides: str) -> list[Cell]:
    auto.register()
    cells = run.planned_cells([*overrides, "model=tiny"])
    assert cells is not None
    return cells


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_distinct_cells_of_the_engine(name: str) -> None:
    cells = cells_of(f"+ablation={name}")
    assert len({cell.hash for cell in cells}) == len(cells) == CELLS.get(name, len(cells)) > 1
    assert {(cell.experiment, cell.system) for cell in cells} == {(name, "megatrain")}


def test_an_axis_of_a_study_can_be_cut_down_on_the_command_line() -> None:
    cells = cells_of("+ablation=double_buffering", "system.depth=1,2", "system.streams=3")
    assert [(cell.options["depth"], cell.options["streams"]) for cell in cells] == [(1, 3), (2, 3)]


def test_the_ladder_goes_from_paper_to_fast_one_switch_at_a_time() -> None:
    rungs = [dict(cell.options) for cell in cells_of("+ablation=ladder")]
    labels = [rung.pop("preset") for rung in rungs]
    assert labels == sorted(path.stem for path in (auto.CONF / "rung").glob("*.yaml"))
    ends = [dict(cells_of(f"system={name}")[0].options) for name in ("megatrain_paper", "megatrain_fast")]
    assert [{**end, "preset": ""} for end in ends] == [{**rungs[0], "preset": ""}, {**rungs[-1], "preset": ""}]
    changed = [{name for name in rung if rung[name] != before[name]} for before, rung in itertools.pairwise(rungs)]
    assert changed == [
        {"gradient_slabs"},
        {"optimizer_overlap"},
        {"late_moments"},
        {"checkpoint_interval"},
        {"compile"},
        {"device_optimizer"},
        {"keep_activations", "offload_activations"},
    ]


@pytest.mark.parametrize("path", sorted((auto.CONF / "rung").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_rung_stands_alone(path: Path) -> None:
    auto.register()
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        config = compose("config", ["system=megatrain_paper", f"+rung={path.stem}"])
    assert config.system.preset == path.stem
