"""Every study composes into distinct cells and runs on the CPU, from its cells to its figure; the
ladder is a switch a rung."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from analysis import report
from analysis import rows as frames
from analysis.figures import of_study
from baselines.model import count_params
from sweeps import auto, cell, environment, study, upload
from sweeps.command import command_of
from sweeps.config import Cell, cell_from
from sweeps.isolate import Outcome, guarded
from sweeps.result import Row
from sweeps.rowfile import read_rows
from sweeps.rows import Rows, comparable
from tests.made_rows import framed
from tests.models import H200
from tests.study_cells import overrides

pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in (auto.CONF / "ablation").glob("*.yaml"))
CELLS = {
    "double_buffering": 12,
    "ladder": 9,
    "placement": 8,
    "context_length": 10,
    "pinned": 3,
    "width": 5,
}
"""Studies whose size, of one system, is part of what they are."""
BESIDE = {
    name: {"system": "megatrain,zero3"}
    for name in ("model_size", "depth", "device_memory", "width")
}
"""Studies of which ZeRO-3 is measured too."""
OTHERS = {"ranks": "in_memory", "ranks_weak": "in_memory"}
"""The system that the tests measure where it is not the engine."""
WINDOW = {"event": "losses", "first_step": 0, "losses": [1.0], "seconds": 1.0, "num_tokens": 10}
SMALL = [
    "measure=brief",
    "logging=none",
    "data.max_bytes=65536",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_attention_heads=2",
]


@functools.cache  # Hydra takes a quarter of a second to compose a cell
def cells_of(*overrides: str) -> list[Cell]:
    auto.register()
    cells = command_of(list(overrides)).cells
    assert cells is not None
    return cells


def axes_of(name: str) -> dict[str, str]:
    """What the study varies, or the study that it is made from."""
    text = yaml.safe_load((auto.CONF / "ablation" / f"{name}.yaml").read_text())
    if "hydra" not in text:
        return axes_of(text["defaults"][0])
    axes: dict[str, str] = text["hydra"]["sweeper"]["params"]
    return axes


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_distinct_cells(name: str) -> None:
    axes = axes_of(name)
    systems = axes.get("system", "").split(",") if "system" in axes else []
    assert {(auto.CONF / "system" / f"{system}.yaml").exists() for system in systems} <= {True}
    system = OTHERS.get(name, "megatrain")
    cells = cells_of(f"+ablation={name}", *([f"system={system}"] if systems else []))
    assert len({one.hash for one in cells}) == len(cells) == CELLS.get(name, len(cells)) > 1
    assert {(one.experiment, one.system) for one in cells} == {(name, system)}


def in_this_process(
    module: str, config: Mapping[str, Any], *, on_event: Callable[[Any], None], **_: Any
) -> Outcome:
    """What `run_isolated` does, without the seconds that a process needs to import torch; of a
    cell of several ranks, on one."""
    outcome = Outcome()
    config = {**config, "process": {**config["process"], "num_cpu_ranks": 1}}

    def emit(event: str, **fields: Any) -> None:
        told = json.loads(json.dumps({"event": event, **fields}))
        outcome.events.append(told)
        on_event(told)

    guarded(lambda: cell.work(cell_from(config), emit), emit)
    failed = outcome.last("failed")
    outcome.status, outcome.reason = (
        ("ok", "") if outcome.last("done") else (failed["status"], failed["reason"])
    )
    return outcome


def ran(one: Cell, label: str) -> Row:
    """The engine's row, or that of ZeRO-3 out of memory: its own processes take seconds and prove
    nothing here."""
    if one.system == OTHERS.get(one.experiment, "megatrain"):
        return study.run_cell(one, label, Rows())
    machine = environment.machine(one.machine, None)
    row = study.row_of(
        one, Outcome(status="oom_device", reason="full"), started_at="2026", machine=machine
    )
    Rows().append(one.rows_path, row)
    return row


@pytest.mark.parametrize("name", NAMES)
def test_every_study_runs_on_the_cpu_from_its_cells_to_its_figure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "run_isolated", in_this_process)
    own = overrides(name, BESIDE.get(name))
    taken = {override.split("=")[0] for override in own}
    small = [override for override in SMALL if override.split("=")[0] not in taken]
    if name == "model_size":  # its models are what it varies
        small = [override for override in small if not override.startswith("model.")]
    if "model.config" in taken:
        small = [
            override
            for override in small
            if "hidden_size" not in override and "heads" not in override
        ]
    cells = cells_of(f"+ablation={name}", *small, *own, f"output_dir={tmp_path}")
    given = [ran(one, f"[{number}]") for number, one in enumerate(cells)]
    mine = [row for row in given if row.system == OTHERS.get(name, "megatrain")]
    assert [row.status for row in mine] == (
        ["ok", "wont_fit"] if name == "model_size" else ["ok"] * len(mine)
    )
    frame = frames.frame(tmp_path)
    assert len(frame) == len(cells) >= 2
    told = list(report.sections(frame))
    pages = "".join(report.markdown(*part) for part in told)
    assert pages.count("| out of device memory |") == len(given) - len(mine)
    named = [
        line for line in pages.splitlines() if line.startswith("| ") and "tokens/s" not in line
    ]
    assert len({line.split("|")[1] + line.split("|")[2] for line in named}) == len(cells), (
        "a name for each row"
    )
    for part in told:
        assert of_study.draw(*part).axes
    assert capsys.readouterr().out.count(" x ") == len(mine)


def test_studies_in_one_folder_share_their_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one has measured another takes as it is, under its own name, once."""
    monkeypatch.setattr(study, "run_isolated", in_this_process)
    tail = ["model=tiny", *SMALL, f"output_dir={tmp_path}"]
    first = cells_of("+ablation=checkpoint_interval", "system.checkpoint_interval=1", *tail)[0]
    second = cells_of(
        "+ablation=optimizer_overlap",
        "system.optimizer_overlap=true",
        "recipe.clip_norm=1.0",
        *tail,
    )[0]
    assert first.hash == second.hash
    measured = study.run_cell(first, "[1]", Rows())
    monkeypatch.setattr(study, "run_isolated", None)
    taken = [study.run_cell(one, "[2]", Rows()) for one in (second, second, first)]
    assert [row.started_at for row in taken] == [measured.started_at] * 3
    assert [row.experiment for row in read_rows(first.rows_path)] == [
        "checkpoint_interval",
        "optimizer_overlap",
    ]
    assert capsys.readouterr().out.count("taken from the study checkpoint_interval") == 1
    rows = read_rows(first.rows_path)
    assert len({upload.run_id(row) for row in rows}) == 2, "a run of its own in W&B"


def test_two_presets_of_equal_settings_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its row under its own label, and both rows tell of the one measurement."""
    monkeypatch.setattr(study, "run_isolated", in_this_process)
    tail = ["model=tiny", *SMALL, f"output_dir={tmp_path}"]
    rung, preset = (
        cells_of("+ablation=ladder", "+rung=0_paper", *tail)[0],
        cells_of("system=megatrain_paper", *tail)[0],
    )
    assert (
        rung.identity
        == preset.identity
        != cells_of("+ablation=ladder", "+rung=1_own_slabs", *tail)[0].identity
    )
    measured = study.run_cell(preset, "[1]", Rows())
    monkeypatch.setattr(study, "run_isolated", None)
    taken = [study.run_cell(one, "[2]", Rows()) for one in (rung, rung, preset)]
    assert [row.started_at for row in taken] == [measured.started_at] * 3
    rows = Rows().of(preset)
    assert [(row.cell, row.preset) for row in rows] == [
        (preset.hash, "paper"),
        (rung.hash, "0_paper"),
    ]
    assert [row.config["system"]["preset"] for row in rows] == ["paper", "0_paper"]
    assert len({upload.run_id(row) for row in rows}) == 2, "a run of its own in W&B"


@pytest.mark.parametrize("fields", [{"status": "error"}, {"bench_version": 1}])
def test_a_measurement_taken_over_replaces_what_no_longer_stands(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    tail = ["model=tiny", *SMALL, f"output_dir={tmp_path}"]
    first = cells_of("+ablation=checkpoint_interval", "system.checkpoint_interval=1", *tail)[0]
    second = cells_of(
        "+ablation=optimizer_overlap",
        "system.optimizer_overlap=true",
        "recipe.clip_norm=1.0",
        *tail,
    )[0]
    good = study.row_of(
        first, Outcome(status="ok", events=[WINDOW]), started_at="later", machine={}
    )
    Rows().append(
        first.rows_path,
        dataclasses.replace(good, experiment=second.experiment, started_at="before", **fields),
    )
    Rows().append(first.rows_path, good)
    assert study.run_cell(second, "[1]", Rows()).started_at == "later"
    last = read_rows(first.rows_path)[-1]
    assert (last.experiment, last.started_at, last.status) == (second.experiment, "later", "ok")


def test_a_row_of_another_kind_of_machine_stands_for_nothing_here(tmp_path: Path) -> None:
    cell = cells_of("model=tiny", *SMALL, f"output_dir={tmp_path}")[0]
    here = environment.machine(cell.machine, None)
    row = study.row_of(
        cell,
        Outcome(status="ok", events=[WINDOW]),
        started_at="",
        machine={**here, "num_cores": 4096},
    )
    Rows().append(cell.rows_path, row)
    assert not Rows().standing(cell)
    assert not comparable(row, cell)
    Rows().append(cell.rows_path, dataclasses.replace(row, machine={**here, "boot": "of another"}))
    assert Rows().standing(cell)


def test_a_row_that_was_asked_less_stands_for_nothing_that_asks_more(tmp_path: Path) -> None:
    asked = ["model=tiny", *SMALL, f"output_dir={tmp_path}"]
    searched = cells_of(*asked, "+measure.stop_below=1e9")[0]
    stopped = Outcome(status="ok", events=[WINDOW])
    here = environment.machine(searched.machine, None)
    row = study.row_of(searched, stopped, started_at="", machine=here)
    assert row.reason.startswith("stopped after 1 of 2 windows")
    Rows().append(searched.rows_path, row)
    assert Rows().standing(searched)
    whole = cells_of(*asked)[0]
    assert not Rows().standing(whole), "it was stopped after a window"
    row = study.row_of(
        whole, Outcome(status="ok", events=[WINDOW, WINDOW]), started_at="", machine=here
    )
    Rows().append(whole.rows_path, row)
    assert Rows().standing(whole)
    evaluated = cells_of(*asked, "measure.heldout_tokens=64")[0]
    assert evaluated.identity == whole.identity
    assert not Rows().standing(evaluated), "nothing was evaluated"
    row = study.row_of(
        evaluated, Outcome(status="ok", events=[WINDOW, WINDOW]), started_at="", machine=here
    )
    Rows().append(whole.rows_path, row)
    assert Rows().standing(evaluated)
    assert Rows().standing(whole)
    for more in ("measure.heldout_tokens=65", "measure.heldout_every_window=true"):
        assert not Rows().standing(cells_of(*asked, "measure.heldout_tokens=64", more)[0])


def test_a_checkout_that_changed_meanwhile_is_no_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cells_of("model=tiny", *SMALL, f"output_dir={tmp_path}")[0]
    outcome = Outcome(status="ok", events=[WINDOW, WINDOW])
    monkeypatch.setattr(study, "run_isolated", lambda *_, **__: dataclasses.replace(outcome))
    for seen, told in ((["a"] * 9, "a"), (["a", "a", "b"], "a-dirty"), (["a", None], "a-dirty")):
        commits = itertools.chain(seen, itertools.repeat(seen[-1]))
        monkeypatch.setattr(environment, "git_commit", lambda commits=commits: next(commits))
        row = study.run_cell(cell, "", Rows())
        assert row.git_commit == told
        cell.rows_path.unlink()


def test_tidying_up_after_a_refusal_leaves_what_was_there(tmp_path: Path) -> None:
    mine = tmp_path / ".hydra" / "mine"
    mine.parent.mkdir()
    mine.touch()
    (tmp_path / ".hydra" / "multirun.yaml").touch()
    study.tidy(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [".hydra", "mine"]


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        ({"qwen2.5-7b": 64}, "qwen2.5-7b"),
        ({"qwen2.5-7b": 8, "qwen2.5-3b": 16, "qwen2.5-0.5b": 64}, "qwen2.5-0.5b"),
        ({"qwen2.5-3b": 16}, "tiny"),
    ],
)
def test_a_study_compares_one_model_though_its_cells_have_room_for_several(
    monkeypatch: pytest.MonkeyPatch, room: dict[str, int], expected: str
) -> None:
    def largest(plain: Mapping[str, Any]) -> dict[str, Any]:
        asked, batch = plain["model"], plain["shape"]["batch_size"]
        fitting = (name for name in asked["candidates"] if room.get(name, 0) >= batch)
        return auto._load(next(fitting, asked["fallback"]))

    monkeypatch.setattr(auto, "_model", largest)
    auto.register()
    told = ["+ablation=batch_size", "system=megatrain", "shape.batch_size=8,16,64"]
    cells = command_of(told).cells
    assert cells is not None
    assert [cell.shape.batch_size for cell in cells] == [8, 16, 64]
    assert {cell.model.name for cell in cells} == {expected}
    named = command_of([*told[:2], "shape.batch_size=8", "model=tiny,auto"]).cells
    assert named is not None
    assert len(named) == 2, "models that a command names are its own affair"
    lists = "model.candidates=[qwen2.5-7b],[qwen2.5-3b]"
    swept = command_of([*told[:2], "shape.batch_size=8", lists]).cells
    assert swept is not None
    assert len(swept) == 2


def test_an_axis_of_a_study_can_be_cut_down_on_the_command_line() -> None:
    cells = cells_of(
        "+ablation=double_buffering", "system.depth=1,2", "system.streams=3", "model=tiny"
    )
    assert [(cell.options["depth"], cell.options["streams"]) for cell in cells] == [(1, 3), (2, 3)]


def test_the_ladder_goes_from_paper_to_fast_one_switch_at_a_time() -> None:
    rungs = [dict(cell.options) for cell in cells_of("+ablation=ladder", "model=tiny")]
    labels = [rung.pop("preset") for rung in rungs]
    assert labels == sorted(path.stem for path in (auto.CONF / "rung").glob("*.yaml"))
    ends = [
        dict(cells_of(f"system={name}", "model=tiny")[0].options)
        for name in ("megatrain_paper", "megatrain_fast")
    ]
    assert [{**end, "preset": ""} for end in ends] == [
        {**rungs[0], "preset": ""},
        {**rungs[-1], "preset": ""},
    ]
    changed = [
        {name for name in rung if rung[name] != before[name]}
        for before, rung in itertools.pairwise(rungs)
    ]
    assert changed == [
        {"gradient_slabs"},
        {"optimizer_overlap"},
        {"late_moments"},
        {"checkpoint_interval"},
        {"compile"},
        {"device_optimizer"},
        {"keep_activations"},
        {"offload_activations"},
    ]


@pytest.mark.parametrize(
    "path", sorted((auto.CONF / "rung").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_rung_stands_alone(path: Path) -> None:
    auto.register()
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        config = compose("config", ["system=megatrain_paper", f"+rung={path.stem}"])
    assert config.system.preset == path.stem


def test_depth_width_and_length_are_the_published_ones() -> None:
    deep = cells_of("+ablation=depth", "system=megatrain")
    published = {
        28: 7.62,
        42: 10.88,
        56: 14.14,
        84: 20.67,
        132: 31.85,
        180: 43.04,
    }  # in 1e9 parameters
    assert [one.model.config["num_hidden_layers"] for one in deep] == list(published)
    first, second = (
        count_params(one.model).total / 1e9 for one in deep[:2]
    )  # the rest follows: layers are alike
    assert {
        number: round(first + (number - 28) * (second - first) / 14, 2) for number in published
    } == published
    wide = [one.model.config for one in cells_of("+ablation=width", "system=megatrain")]
    assert [one["hidden_size"] / 1792 for one in wide] == [1, 3, 3.5, 4, 5]
    for one in wide:
        assert one["num_hidden_layers"] == 28
        assert one["hidden_size"] == 128 * one["num_attention_heads"]
        assert one["intermediate_size"] * 1792 == one["hidden_size"] * 9472
    auto.register("cuda")
    try:
        with initialize_config_dir(str(auto.CONF), version_base="1.3"):
            lengths = [1 << power for power in range(10, 20)]
            shapes = [
                compose("config", ["+ablation=context_length", f"shape.seq_len={length}"]).shape
                for length in lengths
            ]
            assert [shape.batch_size for shape in shapes] == [32, 16, 8, 4, 2, 1, 1, 1, 1, 1]
    finally:
        auto.register()


def test_a_cell_without_room_says_what_its_step_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU, where rates are probed; here they are those of conf/rates, and nothing is
    allocated."""
    monkeypatch.setattr("engine.planner.planner.measure", lambda *_, **__: H200)
    caps: list[int] = []
    monkeypatch.setattr(cell, "cap_device_memory", caps.append)  # torch's own refuses without a GPU
    (one,) = cells_of(
        "model=qwen2.5-7b",
        "shape=b32x1024",
        "machine.device_bytes=24000000000",
        "machine.host_bytes=50000000000",
    )
    config = {**one.config, "machine": {**one.config["machine"], "device": "cuda"}}
    outcome = in_this_process("sweeps.cell", config, on_event=lambda event: None)
    row = study.row_of(cell_from(config), outcome, started_at="", machine={})
    assert (row.status, row.tokens_per_s, caps) == ("wont_fit", None, [24_000_000_000])
    assert 1 < row.plan["step_s"] < 10
    assert framed([row])["plan"][0]["step_s"] == row.plan["step_s"]
