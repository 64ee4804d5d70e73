"""A command's state is its own, and its sweep is the one that Hydra would make."""

import sys
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from sweeps import auto, command, run
from sweeps.config import Cell
from sweeps.errors import parse
from sweeps.rows import Rows
from sweeps.session import UNFINISHED
from tests.e2e.test_sweeps_cli import SMALL
from tests.made_rows import row


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What main sets of the process is undone."""
    for name, value in (("HYDRA_FULL_ERROR", "0"), ("MEGATRAIN_FULL_ERROR", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)


def ended(arguments: list[str]) -> list[Cell]:
    """The cells of a command line, each with a row that stands and has no number."""
    auto.register()
    cells = command.command_of(arguments).cells
    for cell in cells:
        fields = {"cell": cell.hash, "machine": {}, "config": dict(cell.config)}
        Rows().append(cell.rows_path, row("in_memory", status="nonfinite", **fields))
    return cells


@pytest.mark.usefixtures("as_it_was")
def test_a_command_leaves_nothing_to_the_next_one_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["system=in_memory", *SMALL, "logging=none", f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["run", *arguments, "time_limit_s=0.001"])
    assert run.main() == UNFINISHED
    (cell,) = ended(arguments)
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    assert run.main() == 1, "it has no number, and nothing is left to do"
    assert f"[1/1] in_memory: skipped, {cell.hash} is already nonfinite" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("by", [[], ["hydra/launcher=basic"]], ids=["ours", "hydra"])
def test_hydra_runs_the_same_cells_in_the_same_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: list[str],
) -> None:
    axes = ["--multirun", "seed=1,2", "measure.repeat=1,2", "system=in_memory", *by]
    arguments = [*axes, *SMALL, "logging=none", f"output_dir={tmp_path}"]
    cells = ended(arguments)
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    assert run.main() == 1
    said = [
        line.partition(" in_memory:")[0]
        for line in capsys.readouterr().out.splitlines()
        if "skipped" in line
    ]
    rounds = [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert [(cell.seed, cell.measure.repeat) for cell in cells] == rounds
    names = [f"measure.repeat={repeat} seed={seed}" for seed, repeat in rounds]
    assert said == [f"[{number}/4] {name}," for number, name in enumerate(names, 1)]
    assert (tmp_path / ".hydra" / "multirun.yaml").exists() is bool(by)


@pytest.mark.parametrize(
    "overrides",
    [
        ["system=zero3,fsdp2", "seed=range(0,3)", "shape.batch_size=2"],
        ["system=glob(in_memory*)", "~measure", "+measure=brief,quick", "model.name='a b','c'"],
        [
            "seed=1,2",
            "system=zero3",
            "seed=choice(3,4)",
            "+system.numactl=\"'--interleave=all',''\"",
        ],
    ],
)
def test_a_sweep_is_the_one_of_hydra_s_own_sweeper(overrides: list[str]) -> None:
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        (theirs,) = BasicSweeper.split_arguments(parse(overrides), None)
        assert [list(job) for job in command._jobs(parse(overrides))] == theirs


@pytest.mark.parametrize(
    ("more", "by_hydra"),
    [
        ([], False),
        (["--multirun", "seed=1,2"], False),
        (["--multirun", "hydra.sweeper.max_batch_size=1", "seed=1,2"], False),
        (["hydra.mode=MULTIRUN"], False),
        (["hydra.job.chdir=true"], True),
        (["--multirun", "+hydra.job.env_set.KEY=value"], True),
        (["--multirun", "hydra/sweeper=basic"], True),
        (["--multirun", "hydra.launcher._target_=hydra_plugins.a.OtherLauncher"], True),
        (["--cfg", "job"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_only_hydra_does_is_left_to_it(more: list[str], by_hydra: bool) -> None:
    auto.register()
    assert command.command_of(["model=tiny", *more]).by_hydra is by_hydra
