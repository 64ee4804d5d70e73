"""What a study says of its time: from predictions, from rows of the folder, or that it does not
know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps import auto, outlook
from sweeps.command import command_of
from sweeps.config import Cell, cell_from
from sweeps.events import wrong
from sweeps.forecast import Forecast, announce, duration, settings
from sweeps.isolate import Outcome
from sweeps.outlook import Outlook
from sweeps.result import Row
from sweeps.rows import Rows
from tests.models import H200

pytestmark = pytest.mark.slow

STEP_OF_2_S = Outlook(events=[{"event": "predicted", "prediction": {"step_s": 2.0}}], refusal=None)


def cells_of(*overrides: str) -> list[Cell]:
    auto.register()
    cells = command_of(["--multirun", "model=tiny", "measure=brief", *overrides]).cells
    assert cells is not None
    return cells


def row_of(cell: Cell, step_s: float, **fields: Any) -> Row:
    known: dict[str, Any] = {
        "experiment": cell.experiment,
        "cell": cell.hash,
        "config": dict(cell.config),
        "system": cell.system,
        "model": cell.model.name,
        "preset": cell.options.get("preset"),
        "batch_size": cell.shape.batch_size,
        "seq_len": cell.shape.seq_len,
        "num_micro_batches": 1,
        "status": "ok",
        "step_s": [step_s, step_s],
    }
    return Row(**known | fields)


def test_rows_of_the_folder_predict_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = cells_of(f"output_dir={tmp_path}", "system=megatrain,fsdp2", "shape.batch_size=2,4")
    path = cells[0].rows_path
    Rows().append(path, row_of(cells[0], 10.0))
    forecast = announce(cells, {}, Rows())
    assert capsys.readouterr().out.splitlines() == [
        "adhoc: 4 cells, 1 already measured; time left: about 60 s and 2 of unknown length, steps "
        "alone: starting up adds to it",
        "  system=megatrain shape.batch_size=2  measured",
        "  system=megatrain shape.batch_size=4  about 60 s (20 s x 3 steps)",
        "  system=fsdp2 shape.batch_size=2      unknown",
        "  system=fsdp2 shape.batch_size=4      unknown",
    ]
    with forecast.watching(cells[0]):  # skipped: says nothing
        pass
    assert capsys.readouterr().out == ""
    with forecast.watching(cells[1]):
        Rows().append(path, row_of(cells[1], 20.0))
    assert capsys.readouterr().out == "2 of 4 cells left; time left: unknown\n"
    with forecast.watching(cells[2]):
        Rows().append(path, row_of(cells[2], 5.0))
    assert (
        capsys.readouterr().out
        == "1 of 4 cells left; time left: about 30 s, steps alone: starting up adds to it\n"
    )
    with forecast.watching(cells[3]):
        Rows().append(path, row_of(cells[3], 5.0, status="error"))
    assert capsys.readouterr().out == ""


def test_starting_up_counts_once_it_is_known(tmp_path: Path) -> None:
    cells = cells_of(f"output_dir={tmp_path}", "system.depth=1,2")
    known = Forecast(cells, {cell.hash: STEP_OF_2_S for cell in cells}, Rows())
    assert known.remaining() == "about 12 s, steps alone: starting up adds to it"
    with known.watching(cells[0]):
        Rows().append(cells[0].rows_path, row_of(cells[0], 3.0, cell_s=17.0, losses=[7.0] * 3))
    assert known.seconds(cells[1]) == 2.0 * 3 + (17.0 - 3.0 * 3)
    assert known.remaining() == "about 14 s"


def test_starting_up_takes_what_it_took_the_same_system(tmp_path: Path) -> None:
    cells = cells_of(f"output_dir={tmp_path}", "system=megatrain,fsdp2")
    path = cells[0].rows_path
    Rows().append(path, row_of(cells[0], 1.0, cell_s=13.0, losses=[7.0] * 3))
    Rows().append(path, row_of(cells[1], 1.0, cell_s=93.0, losses=[7.0] * 3, batch_size=8))
    known = Forecast(cells, {}, Rows())
    assert [known.extra_s(cell) for cell in cells] == [10.0, 90.0]


def test_a_cell_is_begun_where_it_is_expected_to_end_in_time(tmp_path: Path) -> None:
    cells = cells_of(f"output_dir={tmp_path}", "system.depth=1,2,3")
    Rows().append(cells[0].rows_path, row_of(cells[0], 3.0, cell_s=17.0, losses=[7.0] * 3))
    known = Forecast(cells, {cells[1].hash: STEP_OF_2_S}, Rows())
    assert known.too_long(cells[0], 0.0, 60.0) is None, "it has its number"
    assert known.too_long(cells[1], 14.5, 60.0) is None
    assert (
        known.too_long(cells[1], 5.0, 60.0)
        == "5 s left of time_limit_s = 60, about 14 s needed; the same command goes on"
    )
    assert (
        known.too_long(cells[1], 5.0, 6.0)
        == "5 s left of time_limit_s = 6, about 14 s needed; raise it"
    )
    assert Forecast([], {}, Rows()).too_long(cells_of("system=fsdp2")[0], 0.5, 60.0) is None, (
        "nobody knows how long it takes"
    )
    assert (
        Forecast([], {}, Rows()).too_long(cells_of("system=fsdp2")[0], -3.0, 9.0)
        == "0 s left of time_limit_s = 9; the same command goes on"
    )


def test_a_repeat_takes_what_it_took_before_and_no_model_speaks_for_another(tmp_path: Path) -> None:
    one, again, wide, other = (
        cells_of(f"output_dir={tmp_path}", "system=zero3", *overrides)[0]
        for overrides in (
            [],
            ["measure.repeat=2"],
            ["shape.batch_size=32", "measure.repeat=2"],
            ["model.name=other"],
        )
    )
    path = one.rows_path
    for step_s, compiled in ((1.0, False), (2.0, False), (3.0, True)):
        config = {**one.config, "system": {**one.config["system"], "compile": compiled}}
        Rows().append(
            path, row_of(one, step_s, config=config, cell_s=50.0 + 3 * step_s, losses=[7.0] * 3)
        )
    wider = cells_of("system=zero3", "shape.batch_size=32")[0]
    Rows().append(
        path, row_of(wider, 4.0, config=dict(wider.config), cell_s=92.0, losses=[7.0] * 3)
    )
    known = Forecast([], {}, Rows())
    assert (known.step_s(again), known.extra_s(again)) == (2.0, 50.0), (
        "the last of the same configuration"
    )
    assert (known.step_s(wide), known.extra_s(wide)) == (4.0, 80.0)
    assert (known.step_s(other), known.extra_s(other)) == (None, None)


def test_one_cell_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert announce(cells_of("system.depth=1"), {}, Rows()).cells == []
    assert capsys.readouterr().out == ""


def test_only_what_tells_cells_apart_is_told() -> None:
    assert (
        settings(cells_of("system.depth=1,2", "shape.seq_len=16,32"))[1]
        == "system.depth=1 shape.seq_len=32"
    )
    assert settings(cells_of("system=megatrain,megatrain_fast")) == [
        "system.preset=stream",
        "system.preset=fast",
    ]
    systems = [
        "system=zero3",
        "system=zero3 system.preset=optimizer",
        "system=megatrain system.preset=paper",
    ]
    assert settings(cells_of("system=zero3,zero3_optimizer,megatrain_paper")) == systems
    assert settings(cells_of("system=zero3,zero3_optimizer")) == [
        "system.preset=None",
        "system.preset=optimizer",
    ]
    assert settings(cells_of("machine.device_bytes=null,9")) == [
        "machine.device_bytes=None",
        "machine.device_bytes=9",
    ]


def test_the_cost_model_predicts_the_engine_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rates of conf/rates in place of probed ones, which need the GPU; the rates are
    probed once."""
    probed = []
    monkeypatch.setattr("engine.planner.planner.measure", lambda *_, **__: probed.append(1) or H200)
    memory: dict[Any, Any] = {}
    seen: list[dict[str, Any]] = []
    overrides = [
        "model=qwen2.5-7b",
        "shape=b32x1024",
        "machine.host_bytes=140000000000",
        "machine.device_bytes=9,24000000000,80000000000",
    ]
    cells = []
    for cell in cells_of(*overrides):
        cells.append(
            cell_from({**cell.config, "machine": {**cell.config["machine"], "device": "cuda"}})
        )
        found = outlook.outlook_here(cells[-1], memory)
        assert found is not None
        seen.append(
            {
                "event": "outlook",
                "cell": cells[-1].hash,
                "events": found.events,
                "refusal": found.refusal,
            }
        )
    assert len(probed) == 1
    threads = {"process": {**cells[0].config["process"], "omp_num_threads": 3}}
    outlook.outlook_here(cell_from({**cells[0].config, **threads}), memory)
    assert len(probed) == 2, "with other threads AdamW has another rate"
    assert not any(map(wrong, json.loads(json.dumps(seen))))
    monkeypatch.setattr(outlook, "run_isolated", lambda *_, **__: Outcome(events=seen))
    first, second, last = outlook.outlooks(cells).values()
    assert [event["event"] for event in first.events] == [
        "plan",
        "predicted",
    ]  # figures draw it as what it is
    assert 1 < (last.step_s or 0) < 10
    assert (first.step_s, second.step_s, last.outcome) == (0.0, 0.0, None)
    assert first.outcome is not None
    assert first.outcome.last("predicted")["prediction"]["step_s"] > 1
    lines = Forecast(cells, outlook.outlooks(cells), Rows()).lines()
    assert lines[1].endswith("does not fit")
    assert "steps)" in lines[3]


@pytest.mark.parametrize(
    ("seconds", "words"), [(45.4, "45 s"), (119, "119 s"), (720, "12 min"), (12240, "3.4 h")]
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
