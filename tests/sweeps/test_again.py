"""A state that a cell saved, resumed by another process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sweeps import auto, study
from sweeps.again import hold_against
from sweeps.command import command_of
from sweeps.config import Cell
from sweeps.isolate import Outcome
from sweeps.result import Row
from sweeps.rows import Rows
from sweeps.study import run_cell

pytestmark = pytest.mark.slow


def cell_of(folder: Path, *more: str) -> Cell:
    """Two windows of two steps, with a state beside each."""
    auto.register()
    small = ["model=tiny", "model.config.num_hidden_layers=1", "model.config.hidden_size=80"]
    small += ["shape=quick", "shape.seq_len=16", "logging=none", "data.max_bytes=65536"]
    small += ["machine.device=cpu", "measure=brief", "measure.save=true"]
    small += ["measure.windows=2", "measure.steps_per_window=2"]
    return command_of([*small, f"output_dir={folder}", *more]).cells[0]


@pytest.mark.parametrize("system", ["megatrain", "in_memory", "lora"])
def test_another_process_goes_on_bit_for_bit(system: str, tmp_path: Path) -> None:
    asked = [f"system={system}", "measure.heldout_tokens=128"]
    row = run_cell(cell_of(tmp_path, *asked), "", Rows())
    assert (row.status, row.reason) == ("ok", "")
    assert row.counters["resume_s"] > 0
    assert row.counters["resumed_difference"] == 0
    assert not list(tmp_path.glob(".state-*"))
    if system != "megatrain":
        return
    plain = run_cell(cell_of(tmp_path / "plain", *asked, "measure.save=false"), "", Rows())
    assert row.losses == plain.losses
    assert row.heldout_loss == plain.heldout_loss is not None, "that of the last window's weights"
    assert "resume_s" not in plain.counters


def test_a_cell_that_stops_early_is_resumed_from_its_only_window(tmp_path: Path) -> None:
    scratch = tmp_path / f"..state-{cell_of(tmp_path, 'system=megatrain').hash}-left"
    scratch.mkdir()  # of a process that was killed while it saved
    cell = cell_of(tmp_path, "system=megatrain", "+measure.stop_below=1000000000")
    row = run_cell(cell, "", Rows())
    assert row.reason.startswith("stopped after 1 of 2 windows"), row.reason
    assert "not resumed" not in row.reason
    assert row.counters["resumed_difference"] == 0
    assert not list(tmp_path.glob(".*state-*"))


def test_where_time_is_up_the_row_says_so() -> None:
    outcome = Outcome(status="ok", reason="first")
    hold_against(outcome, pytest.fail, deadline=0.0)
    assert outcome.reason == "first; its state was not resumed: time_limit_s was up"


def test_a_disk_without_room_for_the_log_costs_no_number() -> None:
    def full(*_: Any, **__: Any) -> Outcome:
        raise OSError(28, "No space left on device")

    window = {"event": "losses", "first_step": 1, "losses": [1.0]}
    outcome = Outcome(status="ok", reason="first", events=[window])
    hold_against(outcome, full, deadline=math.inf)
    assert outcome.reason == "first; its state was not resumed: No space left on device"


def spoiled(cell: Cell, monkeypatch: pytest.MonkeyPatch, spoil: Any) -> Row:
    """The row of a cell whose state was changed before it was resumed."""
    isolated = study._isolated

    def after_spoiling(
        cell: Cell, device: Any, deadline: float, module: str, *given: Any, **rest: Any
    ) -> Any:
        if module == "sweeps.again":
            (state,) = cell.output_dir.glob(".state-*")
            spoil(state)
        return isolated(cell, device, deadline, module, *given, **rest)

    monkeypatch.setattr(study, "_isolated", after_spoiling)
    return run_cell(cell, "", Rows())


def test_a_state_that_is_not_resumed_costs_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(state: Path) -> None:
        (state / "block-0001.safetensors").unlink()

    row = spoiled(cell_of(tmp_path, "system=megatrain"), monkeypatch, spoil)
    assert (row.status, row.tokens_per_s is None) == ("ok", False)
    assert row.reason.startswith("its state was not resumed: ValueError: resume: "), row.reason
    assert "has no block-0001.safetensors" in row.reason
    assert "resume_s" not in row.counters
    assert not list(tmp_path.glob(".state-*"))


def test_losses_that_are_others_are_said() -> None:
    """As those of a state that was taken a step too early."""
    window = {"event": "losses", "first_step": 23, "losses": [3.688, 3.631, 3.403]}
    outcome = Outcome(status="ok", reason="first", events=[window])
    asked: list[Any] = []

    def start(module: str, **given: Any) -> Outcome:
        asked.append((module, given["first_step"]))
        resumed = {"event": "resumed", "seconds": 2.0, "losses": [3.688, 3.744]}
        return Outcome(events=[resumed])

    hold_against(outcome, start, deadline=math.inf)
    assert asked == [("sweeps.again", 23)]
    assert outcome.resumed == {"resume_s": 2.0, "resumed_difference": pytest.approx(0.113)}
    assert outcome.reason == (
        "first; resumed by another process, its first losses differ by 0.11 nats"
    )
