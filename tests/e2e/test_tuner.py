"""Searches through the command line, in a copy of the checkout for they write into
conf/system/tuned; the budget of all of them."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from baselines.registry import build
from baselines.system import Unsupported
from sweeps import auto, environment, identity, tuner
from sweeps.command import command_of
from sweeps.config import Cell, cell_from
from sweeps.identity import NEUTRAL
from sweeps.rowfile import read_rows
from sweeps.rows import Rows
from sweeps.session import UNFINISHED
from tests.e2e.test_sweeps_cli import ENVIRONMENT, ROOT, SMALL, started
from tests.made_rows import row
from tests.sweeps.test_config import composed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SEARCHES = sorted(path.stem for path in (auto.CONF / "tune").glob("*.yaml"))
TIMED = [item for item in SMALL if not item.startswith("measure=")]


def sweeper_of(override: str) -> dict[str, Any]:
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        sweeper = compose("config", [override], return_hydra_config=True).hydra.sweeper
    parts: dict[str, Any] = {
        key: OmegaConf.to_container(sweeper[key], resolve=True) for key in ("sampler", "params")
    }
    return parts | {key: sweeper[key] for key in ("n_trials", "direction", "n_jobs")}


def command(
    checkout: Path, *overrides: str, left_s: float = 1000.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """left_s: seconds left of a time limit of 1000."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(checkout), **env}
    arguments = [*started(left_s), *overrides]
    return subprocess.run(
        arguments,
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for room in ("analysis", "baselines", "conf", "engine", "sweeps"):
        ignored = shutil.ignore_patterns("__pycache__", "results", "tuned")
        shutil.copytree(ROOT / room, tmp_path / room, ignore=ignored)
    return tmp_path


@pytest.mark.skipif(
    importlib.util.find_spec(tuner.PLUGIN) is None, reason="the extra `tune` is not installed"
)
def test_a_search_writes_its_winner_and_trials_and_goes_on_where_it_stopped(checkout: Path) -> None:
    """Two trials, one of which its system refuses; then a third, with the rows of the first two
    there."""
    knobs = [
        "compile=false",
        "master=split,nonsense",
        "depth=2",
        "gradient_slabs=0",
        "loss_chunk=4096",
        "late_moments=true",
    ]
    knobs = [
        *(f"system.{knob}" for knob in knobs),
        "+system.num_micro_batches=1",
        "process.omp_num_threads=1",
    ]
    search = ["+tune=megatrain", *TIMED, *knobs, "logging=none", "output_dir=out"]
    done = command(checkout, *search, "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done
    assert "system.master: got 'nonsense'" in done.stdout
    more = command(checkout, *search, "hydra.sweeper.n_trials=3")
    assert more.returncode == 0, more
    rows = read_rows(checkout / "out" / "rows.jsonl")
    assert more.stdout.count("skipped") >= 2  # where it starts, and the trial before
    assert len({row.cell for row in rows}) == len(rows)
    name = f"megatrain_fast-{rows[0].model}-cpu-{len(os.sched_getaffinity(0))}cores"
    folder = checkout / "conf" / "system" / "tuned"
    trials = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert [trial["cell"] for trial in trials] == [row.cell for row in rows]
    best = max(rows, key=lambda row: row.tokens_per_s or 0)
    told = yaml.safe_load((folder / f"{name}.yaml").read_text())
    assert {
        key: best.config["system"][key] for key in told["system"] if key != "preset"
    }.items() <= told["system"].items()
    assert told["process"] == {"omp_num_threads": 1}
    shown = command(checkout, f"system=tuned/{name}", "--cfg", "job", "-p", "process")
    assert yaml.safe_load(shown.stdout.partition("\n")[2])["omp_num_threads"] == 1, shown
    shown = command(checkout, f"system=tuned/{name}", "--cfg", "job", "-p", "system")
    systems = yaml.safe_load(shown.stdout.partition("\n")[2]), best.config["system"]
    told_system, as_run = (
        {key: value for key, value in one.items() if value or key not in NEUTRAL} for one in systems
    )
    assert told_system == {**as_run, "preset": "tuned fast"}, shown
    (folder / f"{name}.yaml").unlink()
    wider = [item.replace("depth=2", "depth=3,4") for item in search]
    late = command(checkout, *wider, "hydra.sweeper.n_trials=5", "time_limit_s=1000", left_s=-1)
    assert late.returncode == UNFINISHED, late
    assert late.stdout.count("not begun: 0 s left of time_limit_s = 1000") == 1, late
    assert len(read_rows(checkout / "out" / "rows.jsonl")) == len(rows)
    assert yaml.safe_load((folder / f"{name}.yaml").read_text()) == told, "the winner so far"


def test_every_search_has_the_same_budget_and_starts_from_a_valid_cell() -> None:
    auto.register()
    budgets = []
    for name in SEARCHES:
        asked = command_of([f"+tune={name}", "model=tiny"])
        assert asked.tune == name
        (start,) = asked.cells or []
        sweeper = sweeper_of(f"+tune={name}")
        told = (sweeper["n_trials"], sweeper["sampler"], sweeper["direction"], sweeper["n_jobs"])
        budgets.append((told, start.measure))
        for key, values in sweeper["params"].items():
            group, known = key.lstrip("+").split(".")
            assert key.startswith("+") or known in start.config[group], key
            assert values.startswith("choice("), key
    assert len(SEARCHES) >= 7
    assert all(budget == budgets[0] for budget in budgets)


def refusal(cell: Cell) -> str | None:
    """What a system says against its options; None where it takes them, or cannot run here whatever
    they are."""
    try:
        build(cell.system, cell.spec())
    except Unsupported:
        return None
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SEARCHES)
def test_every_choice_of_a_search_is_one_that_its_system_takes(name: str) -> None:
    auto.register()
    (start,) = (
        command_of([f"+tune={name}", "shape.batch_size=4", "shape.num_micro_batches=1"]).cells or []
    )
    for key, values in sweeper_of(f"+tune={name}")["params"].items():
        for value in yaml.safe_load(values.replace("choice(", "[").replace(")", "]")):
            group, knob = key.lstrip("+").split(".")
            cell = cell_from({**start.config, group: {**start.config[group], knob: value}})
            assert refusal(cell) is None, f"{knob}={value}"


def test_searches_from_two_starts_or_for_two_models_share_a_folder_and_no_trial(
    tmp_path: Path,
) -> None:
    """What one of them found is not the other's to write, whatever its speed."""
    auto.register()
    starts = {}
    for start, model in (("zero3", "tiny"), ("zero3_twinflow", "tiny"), ("zero3", "qwen2.5-0.5b")):
        asked = command_of(
            ["+tune=zero3", f"system={start}", f"model={model}", f"output_dir={tmp_path}"]
        )
        assert asked.system == start
        (starts[start, model],) = asked.cells or []
        assert starts[start, model].experiment == f"tune_{start}"
    kind = identity.kind(environment.machine(starts["zero3", "tiny"].machine, None))
    for number, ((start, model), cell) in enumerate(starts.items(), 1):
        here = environment.machine(cell.machine, None)
        known = {"experiment": cell.experiment, "config": cell.config, "machine": here}
        known |= {"tokens_per_s": 100.0 * number, "model": model}
        Rows().append(cell.rows_path, row("zero3", [1.0], cell=f"{start} {model}", **known))
    for (start, model), cell in starts.items():
        assert [one.cell for one in tuner.trials(cell, Rows())] == [f"{start} {model}"]
        assert tuner.finish(cell, start, Rows(), tmp_path / "tuned") == 0
    assert {path.stem for path in (tmp_path / "tuned").glob("*.yaml")} == {
        f"{start}-{model}-{kind}" for start, model in starts
    }
    for (start, model), preset in zip(starts, ("tuned", "tuned twinflow", "tuned"), strict=True):
        told = yaml.safe_load((tmp_path / "tuned" / f"{start}-{model}-{kind}.yaml").read_text())
        assert (told["defaults"][0], told["system"]["preset"]) == (
            f"/system/{start}@system",
            preset,
        )


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, "0,1"), (2, "0,1,2"), (16, "0,4,8,16"), (64, "0,16,32,64")]
)
def test_threads_are_chosen_by_the_cores(
    cores: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.auto.os.sched_getaffinity", lambda process: set(range(cores)))
    assert auto.threads() == f"choice({expected})"


def test_bindings_are_those_that_numactl_takes_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def takes(arguments: tuple[str, ...]) -> None:
        if "--cpunodebind=1" in arguments:
            raise ValueError("not in this container")

    monkeypatch.setattr(environment, "NODES", tmp_path)
    monkeypatch.setattr(auto, "require_numactl", takes)
    for number, expected in enumerate(
        ("''", "'','--interleave=all','--cpunodebind=0 --preferred=0'")
    ):
        (tmp_path / f"node{number}").mkdir()
        auto.numa.cache_clear()
        assert auto.numa() == f"choice({expected})"
    auto.numa.cache_clear()


def test_a_search_without_its_packages_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"^tune: got 'zero3', allowed where hydra-optuna-sweeper is installed; run pip install .*'\.\[tune\]'$",
    ):
        command_of(["+tune=zero3"])


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"gpu": "NVIDIA H200", "num_cores": 16}, "h200-16cores"),
        ({"gpu": "NVIDIA GeForce RTX 3090", "num_cores": 8}, "geforce-rtx-3090-8cores"),
        ({"gpu": None, "num_cores": 2, "cpu": "EPYC"}, "cpu-2cores"),
    ],
)
def test_files_are_named_after_kinds_of_machine(machine: dict[str, object], expected: str) -> None:
    assert identity.kind(machine) == expected


def test_a_trial_is_cut_short_where_it_is_well_below_the_best(tmp_path: Path) -> None:
    start: Cell = composed("system=zero3", "measure=tune", f"output_dir={tmp_path}")
    assert tuner.pruned(start, Rows()) is start
    here = environment.machine(start.machine, None)
    alike = {"experiment": start.experiment, "machine": here}
    for cell, tokens_per_s, other in (
        ("a", 100.0, "seed=0"),
        ("b", 200.0, "seed=0"),
        ("c", 900.0, "seed=1"),
    ):
        config = composed("system=zero3", "measure=tune", other).config
        Rows().append(
            start.rows_path,
            row("zero3", [1.0], cell=cell, tokens_per_s=tokens_per_s, config=config, **alike),
        )
    cut = tuner.pruned(start, Rows())
    assert cut.measure.stop_below == cut.config["measure"]["stop_below"] == 0.9 * 200
    assert cut.hash == start.hash
