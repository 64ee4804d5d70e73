"""The cost model held against the committed rows of the engine: each simulated again from the rates
that the cells of its machine had probed."""

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
from engine.planner.placement import LEFT_FREE, USABLE_DEVICE, usable
from engine.planner.planner import Planner
from sweeps.config import cell_from
from sweeps.result import Row
from sweeps.rowfile import read_rows

pytestmark = pytest.mark.slow

FILES = sorted((Path(analysis.__file__).parent / "results").rglob("*.jsonl"))
OPTIONS = {
    "device_optimizer": "device_blocks",
    "keep_activations": "kept_layers",
    "offload_activations": "offloaded_layers",
    "checkpoint_interval": "checkpoint_interval",
    "keep_attention": "kept_attention",
    "offload_attention": "offloaded_attention",
    "reload_weights": "reload_weights",
    "disk_blocks": "disk_blocks",
}
"""Option of the engine -> what a row calls the number that was chosen for it; older rows never
chose the last four."""


def measured() -> dict[str, Row]:
    """Rows of today's engine that keep their rates and placement; older ones do not, or ran with
    one pass of AdamW.

    One measurement may stand in several studies.
    """
    rows = [
        (path, row)
        for path in FILES
        for row in read_rows(path)
        if row.step_s and "rates" in row.plan
    ]
    kept = {
        (row.cell, row.started_at): (path, row)
        for path, row in rows
        if "late_moments" in row.config["system"]
    }
    return {f"{path.parent.name}/{path.stem}/{row.cell}": row for path, row in kept.values()}


MEASURED = measured()
LAYER_PROBED = "2026-11-27T19"
"""Since then AdamW is probed on a block as large as a layer."""
SMALL_PROBE = 0.85
"""A run's rate of AdamW over that of an older probe, which ran on a smaller block."""
ON_DISK = 0.15
"""What a prediction may be off by where a step waits for a drive: for five seconds it was probed
and for minutes it is used."""


UNEXPLAINED = {
    "batch_size/2026-11-22_h200-16c_124fe042/a5e22b2b9ad5": "2,048 tokens: 20% over; perhaps "
    "launching kernels",
    "model_size/2026-11-22_h200-16c_124fe042/d347379aa670": "0.5B: 12% over, as above",
    **{
        f"vs_zero3_14b/{cell}": "14B beside 64 cores: 11 to 13% over; evictions are slow beside so "
        "many threads of AdamW (docs/log.md, 164), and were not probed beside them"
        for cell in (
            "2026-11-22_h200-64c_524bf9d0/3277d7d5a9e1",
            "2026-11-22_h200-64c_524bf9d0/a60261f3653f",
            "2026-11-22_h200-64c_524bf9d0/447988802def",
            "2026-11-27_h100x4-64c_30543fc7/584f04805d93",
        )
    },
    "vs_zero3_14b/2026-11-27_h100x4-64c_12805ab5/584f04805d93": "14B: 19% under; the probe of AdamW "
    "read half of what the run did (docs/log.md, 170)",
    "tier/2026-11-26_h100-16c_c436eaaa/e78ddcbadf93": "8,192 tokens, 12 blocks on disk: 15.02% "
    "over; the drive did 1.0 GB/s, and 1.13 when it was probed",
    "context_length/2026-11-28_h200-16c_73f53d93/7e63866a5e5d": "256K tokens: 12% over; one step "
    "without a warm-up, in which it compiles (docs/log.md, 194)",
    "context_length/2026-11-28_h200x2-32c_8dbd632a/d82742560b05": "512K tokens: 40% over; nothing of "
    "attention was kept in the first step (docs/log.md, 192)",
    "batch_size/2026-11-21_h200-16c_t2118/5d45b3e2bc00": "2,048 tokens, all AdamW: 15% under",
}


def probes(row: Row) -> list[dict[str, float]]:
    """What the cells of the row's machine had probed: one probe of AdamW says less of a cell than
    all of its machine's."""
    return [
        probed(one)
        for one in MEASURED.values()
        if (machine(one), pageable(one)) == (machine(row), pageable(row))
    ]


def probed(row: Row) -> dict[str, float]:
    """The rates that the row's cell probed, as today's probe would have read them."""
    rates: dict[str, float] = row.plan["rates"]
    if row.started_at >= LAYER_PROBED:
        return rates
    slower = {"adamw_params", "weights_params", "moments_params"}
    return {name: rate * (SMALL_PROBE if name in slower else 1) for name, rate in rates.items()}


def pageable(row: Row) -> bool:
    """Whether copies were from and to pageable memory, as the link was probed then."""
    return bool(row.config["system"].get("pinned") == "none")


def machine(row: Row) -> tuple[Any, ...]:
    """Rows of one machine share its matrix peak, and since they name one its boot."""
    return row.machine["matrix_peak_tflops"], row.machine.get("boot")


def predictable() -> list[Any]:
    """A row whose own windows differ by more than a tenth says nothing about a tenth."""
    return [
        pytest.param(
            row,
            id=name,
            marks=[pytest.mark.xfail(strict=True, reason=UNEXPLAINED[name])]
            if name in UNEXPLAINED
            else [],
        )
        for name, row in MEASURED.items()
        if max(row.step_s) <= 1.1 * min(row.step_s)
    ]


def test_few_rows_cannot_be_predicted() -> None:
    assert len(MEASURED) - len(predictable()) + len(UNEXPLAINED) <= len(MEASURED) / 8


@pytest.mark.parametrize("row", predictable())
def test_what_windows_measure_is_predicted_within_a_tenth(
    row: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cell = cell_from(json.loads(json.dumps(row.config)))
    chosen = {"reload_weights": 0, **row.plan["placement"]}  # older rows never loaded twice
    one_pass = chosen.get("late_moments") == 0
    monkeypatch.setattr(Planner, "_one_pass_wins", lambda planner, blocks: one_pass)
    placed = {option: chosen[name] for option, name in OPTIONS.items() if name in chosen}
    if placed.get("keep_attention"):  # a row counts those on the host too
        placed["keep_attention"] -= placed.get("offload_attention", 0)
    if placed.get("disk_blocks"):
        placed["nvme_path"] = str(tmp_path)
    spec = dataclasses.replace(
        cell.spec(), options={**cell.options, **placed}, device=torch.device("cpu")
    )
    told = probes(row)
    known = {field.name for field in dataclasses.fields(Rates)} & set(told[0])  # some probed more
    rates = Rates(**{name: statistics.median(probe[name] for probe in told) for name in known})
    engine = megatrain.build(spec, Machine(rates=rates))
    assert dict(engine.placement, **row.plan["placement"]) == engine.placement
    num_steps = cell.measure.steps_per_window
    predicted = engine.predict_window(num_steps) / num_steps
    rel = ON_DISK if placed.get("disk_blocks") else 0.1
    assert statistics.mean(row.step_s) == pytest.approx(predicted, rel=rel), (
        f"predicted {predicted:.3f} s a step"
    )


def test_what_a_run_takes_of_a_device_beyond_its_plan_is_left_free():
    """By NVML, of rows that fill a device of which all but LEFT_FREE may be filled."""
    beyond = [
        row.device_bytes["nvml"] - sum(row.plan["device"].values())
        for path in FILES
        for row in read_rows(path)
        if row.system == "megatrain" and row.step_s and "nvml" in row.device_bytes
        if row.config["machine"].get("device_bytes") is None
        if fills(row)
    ]
    assert len(beyond) >= 38
    assert max(beyond) < LEFT_FREE


def fills(row: Row) -> bool:
    whole = row.machine.get("device_bytes") or 0
    large = usable(whole) > int(USABLE_DEVICE * whole)
    return large and sum(row.plan["device"].values()) > 0.9 * whole
