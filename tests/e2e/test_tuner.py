"""Searches through the command line, in a copy of the checkout for they write into conf/system/tuned; the budget of all of them."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sweeps import auto, environment, run, tuner
from sweeps.config import Cell
from sweeps.result import read_rows
from tests.e2e.test_sweeps_cli import ENVIRONMENT, ROOT, SMALL
from tests.unit.test_sweeps_config import composed

pytestmark = pytest.mark.timeout(600)
SEARCHES = sorted(path.stem for path in (auto.CONF / "tune").glob("*.yaml"))
TIMED = [item for item in SMALL if not item.startswith("measure=")]


def command(checkout: Path, *overrides: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(checkout), **env}
    arguments = [sys.executable, "-m", "sweeps.run", *overrides]
    return subprocess.run(arguments, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for room in ("analysis", "baselines", "conf", "engine", "sweeps"):
        ignored = shutil.ignore_patterns("__pycache__", "results", "tuned")
        shutil.copytree(ROOT / room, tmp_path / room, ignore=ignored)
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec(tuner.PLUGIN) is None, reason="the extra `tune` is not installed")
def test_a_search_writes_its_winner_and_trials_and_goes_on_where_it_stopped(checkout: Path) -> None:
    """Two trials, one of which its system refuses; then a third, with the rows of the first two there."""
    knobs = ["system.compile=false", "system.master=split,nonsense", "system.depth=2", "system.gradient_slabs=0"]
    search = ["+tune=megatrain", *TIMED, *knobs, "logging=none", "output_dir=out"]
    done = command(checkout, *search, "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done
    assert "system.master: got 'nonsense'" in done.stdout
    more = command(checkout, *search, "hydra.sweeper.n_trials=3")
    assert more.returncode == 0, more
    rows = read_rows(checkout / "out" / "rows.jsonl")
    assert more.stdout.count("skipped") >= 2  # where it starts, and the trial before
    assert len({row.cell for row in rows}) == len(rows)
    name = f"megatrain-cpu-{len(os.sched_getaffinity(0))}cores"
    folder = checkout / "conf" / "system" / "tuned"
    trials = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert [trial["cell"] for trial in trials] == [row.cell for row in rows]
    best = max(rows, key=lambda row: row.tokens_per_s or 0)
    told = yaml.safe_load((folder / f"{name}.yaml").read_text())
    assert {key: best.config["system"][key] for key in told if key not in ("defaults", "preset")}.items() <= told.items()
    shown = command(checkout, f"system=tuned/{name}", "--cfg", "job", "-p", "system")
    composed_system = yaml.safe_load(shown.stdout.partition("\n")[2])
    assert composed_system == {**best.config["system"], "preset": "tuned"}, shown


def test_every_search_has_the_same_budget_and_starts_from_a_valid_cell() -> None:
    auto.register()
    budgets = []
    for name in SEARCHES:
        asked = run.command_of([f"+tune={name}", "model=tiny"])
        assert asked.tune == name
        (start,) = asked.cells or []
        sweeper = yaml.safe_load((auto.CONF / "tune" / f"{name}.yaml").read_text())["hydra"]["sweeper"]
        told = (sweeper["n_trials"], sweeper["sampler"], sweeper["direction"], sweeper["n_jobs"])
        budgets.append((told, start.measure))
        for key, values in sweeper["params"].items():
            known = key.lstrip("+").removeprefix("system.")
            assert key.startswith("+") or known in start.options, key
            assert values.startswith("choice("), key
    assert len(SEARCHES) >= 3
    assert all(budget == budgets[0] for budget in budgets)


def test_a_search_without_its_packages_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^tune: got 'zero3', allowed where hydra-optuna-sweeper is installed; run pip install .*'\.\[tune\]'$"
    ):
        run.command_of(["+tune=zero3"])


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"gpu": "NVIDIA H200", "num_cores": 16}, "h200-16cores"),
        ({"gpu": "NVIDIA GeForce RTX 3090", "num_cores": 8}, "geforce-rtx-3090-8cores"),
        ({"gpu": None, "num_cores": 2, "cpu": "EPYC"}, "cpu-2cores"),
    ],
)
def test_files_are_named_after_kinds_of_machine(machine: dict[str, object], expected: str) -> None:
    assert environment.kind(machine) == expected


def test_a_trial_is_cut_short_where_it_is_well_below_the_best(tmp_path: Path) -> None:
    start: Cell = composed("system=zero3", "measure=tune", f"output_dir={tmp_path}")
    assert tuner.pruned(start) is start
    from sweeps.sinks import JsonlSink
    from tests.unit.test_analysis_load import row

    here = environment.machine(start.machine, None)
    for cell, tokens_per_s, other in (("a", 100.0, "seed=0"), ("b", 200.0, "seed=0"), ("c", 900.0, "seed=1")):
        config = composed("system=zero3", "measure=tune", other).config
        JsonlSink(start.rows_path).row(row("zero3", [1.0], cell=cell, tokens_per_s=tokens_per_s, config=config, machine=here))
    cut = tuner.pruned(start)
    assert cut.measure.stop_below == cut.config["measure"]["stop_below"] == 0.9 * 200
    assert cut.hash == start.hash
