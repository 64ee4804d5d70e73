"""What one cell of a study probed of the machine is what the next ones plan with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sweeps import auto, cell, environment, outlook, study
from sweeps.command import command_of
from sweeps.config import Cell, cell_from
from sweeps.isolate import Outcome
from sweeps.result import Row
from sweeps.rows import Rows
from tests.models import H200

RATES = dataclasses.asdict(H200)


def cell_of(folder: Path, *overrides: str) -> Cell:
    auto.register()
    (one,) = (
        command_of(
            [f"output_dir={folder}", "logging=none", "model=tiny", "system=megatrain", *overrides]
        ).cells
        or []
    )
    return one


def probed(one: Cell, **fields: Any) -> Row:
    """The row of a cell that had to probe, as the study writes it."""
    event = {"event": "predicted", "prediction": {"step_s": 1.0, "rates": RATES}}
    machine = environment.machine(one.machine, None)
    row = study.row_of(
        one, Outcome(status="error", events=[event]), started_at="2026", machine=machine
    )
    row = dataclasses.replace(row, **fields)
    Rows().append(one.rows_path, row)
    return row


def test_a_cell_plans_with_what_an_earlier_one_had_probed(tmp_path: Path) -> None:
    one = cell_of(tmp_path)
    assert study.known_rates(one, Rows()) is None
    probed(one)
    alike = (
        [],
        ["system.depth=3"],
        ["system=megatrain_fast"],
        ["shape.batch_size=8"],
        ["model.config.num_hidden_layers=2"],
        ["model.attn_implementation=eager"],
    )
    for overrides in alike:
        assert study.known_rates(cell_of(tmp_path, *overrides), Rows()) == RATES
    others = (
        "system.pinned=torch",
        "process.omp_num_threads=1",
        "process.huge_pages=true",
        "system=in_memory",
        "model.config.intermediate_size=176",
    )
    for override in others:
        assert study.known_rates(cell_of(tmp_path, override), Rows()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"git_commit": "another"},
        {"num_ranks": 2},
        {"machine": {"boot": "another"}},
        {"machine": {"boot": environment.boot(), "num_cores": 4096}},
        {"machine": {}},
        {"plan": {}},
    ],
)
def test_rates_of_another_machine_or_commit_are_probed_anew(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    one = cell_of(tmp_path)
    probed(one, **fields)
    assert study.known_rates(one, Rows()) is None


def test_what_is_known_reaches_the_cell_and_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, sent, seen = cell_of(tmp_path), list[dict[str, Any]](), list[Any]()
    probed(one)
    monkeypatch.setattr(
        study,
        "run_isolated",
        lambda _, config, **__: sent.append(config) or Outcome(status="error", reason="x"),
    )
    study.run_cell(one, "", Rows())
    rates = json.loads(json.dumps(sent[0])).pop("rates")
    assert rates == RATES
    assert (
        cell_from({name: value for name, value in sent[0].items() if name != "rates"}).hash
        == one.hash
    )

    def seen_enough(system: Any, _: Cell) -> outlook.Outlook:
        seen.append(system.rates)
        return outlook.Outlook(events=[], refusal="seen enough")

    monkeypatch.setattr(outlook, "outlook_of", seen_enough)
    cell.work(one, lambda event, **fields: None, rates)
    assert seen == [H200]


def test_a_model_that_draws_random_numbers_is_refused_with_known_rates_too(tmp_path: Path) -> None:
    random = ["model.model_type=phimoe", "+model.config.num_local_experts=4"]
    events: list[tuple[str, str]] = []
    drawing = cell_of(tmp_path, *random)
    cell.work(
        drawing, lambda event, **fields: events.append((event, fields.get("reason", ""))), RATES
    )
    assert [event for event, _ in events] == ["phase", "invalid"]
    assert "draws random numbers" in events[-1][1]
