"""The cost model held against the committed rows of the engine: each simulated again from the rates that its cell had probed."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import analysis
from baselines import megatrain
from engine import Machine, Rates
from sweeps.config import cell_from
from sweeps.result import Row, read_rows

FILES = sorted((Path(analysis.__file__).parent / "results").glob("*.jsonl"))
OPTIONS = {"device_optimizer": "device_blocks", "keep_activations": "kept_layers", "offload_activations": "offloaded_layers"}
"""Option of the engine -> what a row calls the number that was chosen for it."""


def measured() -> dict[str, Row]:
    """Rows of today's engine that keep their rates and placement; older ones do not, or ran with one pass of AdamW.

    One measurement may stand in several studies.
    """
    rows = [(path, row) for path in FILES for row in read_rows(path) if row.step_s and "rates" in row.plan]
    kept = {(row.cell, row.started_at): (path, row) for path, row in rows if "late_moments" in row.config["system"]}
    return {f"{path.stem}-{row.cell}": row for path, row in kept.values()}


def predictable() -> list[Any]:
    """A row whose own windows differ by more than a tenth says nothing about a tenth."""
    return [pytest.param(row, id=name) for name, row in measured().items() if max(row.step_s) <= 1.1 * min(row.step_s)]


def test_few_rows_are_too_unsteady_to_be_predicted() -> None:
    assert len(measured()) - len(predictable()) <= len(measured()) / 20


@pytest.mark.parametrize("row", predictable())
def test_what_windows_measure_is_predicted_within_a_tenth(row: Row) -> None:
    cell = cell_from(json.loads(json.dumps(row.config)))
    placed = {option: row.plan["placement"][name] for option, name in OPTIONS.items()}
    spec = dataclasses.replace(cell.spec(), options={**cell.options, **placed}, device=torch.device("cpu"))
    engine = megatrain.build(spec, Machine(rates=Rates(**row.plan["rates"])))
    num_steps = cell.measure.steps_per_window
    predicted = engine.predict_window(num_steps) / num_steps
    assert statistics.mean(row.step_s) == pytest.approx(predicted, rel=0.1), f"predicted {predicted:.3f} s a step"
