"""Who is the reference, who the base of ratios, and who is ranked, among rows of one group."""

from __future__ import annotations

from typing import Any

import pytest

from analysis import load, tables
from analysis.compare import Comparison, compare, notes
from sweeps.result import Row, compared
from tests.unit.test_analysis_load import curve, plan, row


def comparison(rows: list[Row]) -> Comparison:
    return compare(load.from_rows(rows))


def test_a_disagreeing_zero3_gives_no_ratio() -> None:
    rows = [
        row("in_memory", [1.0], losses=curve(3)),
        row("zero3", [2.0], agrees=False, max_loss_difference=0.1),
        row("megatrain", [1.5], agrees=True),
    ]
    result = comparison(rows)
    assert all(one.ratio is None for one in result.standings)
    assert "No ratios: ZeRO-3 was not measured with agreeing losses." in notes(result)


def test_without_a_reference_row_speeds_are_ranked_and_the_note_says_so() -> None:
    rows = [
        row("in_memory", status="wont_fit", reason="needs 236 GB", plan=plan(236, 1)),
        row("zero3", [10.7]),
        row("megatrain", [5.9]),
    ]
    result = comparison(rows)
    assert [one.system for one in result.ranked] == ["megatrain", "zero3"]
    assert "No reference row: numerics were not checked." in notes(result)
    assert "in memory: does not fit: needs 236 GB" in notes(result)


@pytest.mark.parametrize(
    ("seed", "told"), [(0, " Losses lie within 1.0e-02 of one another over the 3 steps that more than one ran."), (1, "")]
)
def test_without_a_reference_the_note_says_how_far_losses_of_the_same_batches_lie_apart(seed: int, told: str) -> None:
    def config(name: str, seed: int) -> dict[str, object]:
        system = {"name": name, "dtype": "bfloat16"}
        return {"system": system, "seed": seed, "machine": {"device": "cuda"}, "measure": {"repeat": 1}}

    rows = [
        row("fsdp2", [3.0], losses=[9.0, 8.002, 7.5], config=config("fsdp2", 0)),
        row("zero3", [2.0], losses=[9.001, 8.0, 7.51], config=config("zero3", 0)),
        row("megatrain", [1.0], losses=[8.999, 7.998], config=config("megatrain", seed)),
        row("zenflow", status="oom_device", losses=[]),
    ]
    assert f"No reference row: numerics were not checked.{told}" in notes(comparison(rows))


def test_repeats_of_a_stand_in_are_one_reference_and_tell_their_spread() -> None:
    def told(name: str, repeat: int = 1) -> dict[str, object]:
        return {"system": {"name": name, "dtype": "bfloat16"}, "machine": {"device": "cuda"}, "measure": {"repeat": repeat}}

    refused = row("in_memory", status="wont_fit", config=told("in_memory"))
    first = row("zero3", [3.0], losses=[9.0], config=told("zero3"), cell="z1", started_at="1")
    later = row("zero3", [3.1], losses=[9.0015], config=told("zero3", 2), cell="z2", started_at="2")
    preset = row("zero3", [3.0], losses=[9.0], preset="optimizer", config=told("optimizer"))
    mine = row("megatrain", [1.0], losses=[8.999], config=told("megatrain"))
    rows = [refused, first, later, preset, mine]
    result = comparison([compared(one, rows) for one in rows])
    assert result.reference is not None
    assert (result.reference.num_repeats, result.reference.losses, result.reference.preset) == (2, [9.0], None)
    gaps = {one.label: (tables._gap(one), tables._agrees(one)) for one in result.standings if one.measured}
    assert gaps == {"ZeRO-3": ("1.5e-03", "reference"), "ZeRO-3 optimizer": ("0.0e+00", "yes"), "MegaTrain": ("1.0e-03", "yes")}


@pytest.mark.parametrize("first", ["in memory", "ZeRO-3"])
def test_one_row_is_the_reference_even_where_the_next_has_its_very_losses(first: str) -> None:
    rows = [
        row("in_memory", [1.0], losses=[9.0]) if first == "in memory" else row("in_memory", status="wont_fit"),
        row("zero3", [3.0], losses=[9.0], agrees=True, max_loss_difference=0.0),
        row("zero3", [2.0], losses=[9.0], agrees=True, max_loss_difference=0.0, config={"system": {"compile": True}}, cell="c"),
        row("megatrain", [1.0], losses=[9.001], agrees=True, max_loss_difference=1e-3),
    ]
    result = comparison(rows)
    assert result.reference is not None
    assert result.reference.label == first
    assert [one.label for one in result.standings if tables._agrees(one) == "reference"] == [first]
    assert {tables._agrees(one) for one in result.ranked} <= {"yes", "reference"}
    assert len(result.ranked) == 3


def told(system: str, preset: str | None = None, *, compiled: bool = False) -> dict[str, Any]:
    settings = {"name": system, "dtype": "bfloat16", "preset": preset, "compile": compiled}
    return {"system": settings, "machine": {"device": "cuda"}, "measure": {"repeat": 1}}


def compiling(system: str, seconds: float, preset: str | None = None, **more: Any) -> Row:
    config = told(system, preset, compiled=True)
    return row(system, [seconds, seconds * 1.01, seconds * 0.99], preset=preset, config=config, **more)


@pytest.mark.parametrize(
    ("seconds", "preset", "base"), [(1.2, "kept", "kept compiled"), (1.6, "kept", "compiled"), (1.2, "tuned kept", "tuned kept")]
)
def test_ratios_are_over_the_fastest_zero3_whether_it_recomputes_every_layer_or_not(seconds: float, preset: str, base: str) -> None:
    rows = [
        row("megatrain", [1.0, 1.01, 0.99], agrees=True),
        row("zero3", [2.0, 2.01, 1.99], agrees=True),
        compiling("zero3", 1.5, agrees=True),
        compiling("zero3", seconds, preset, agrees=True),
        compiling("zero3", 1.1, "optimizer", agrees=True),  # does not offload its weights
    ]
    found = comparison(rows)
    assert found.baseline is not None
    assert found.baseline.preset == base
    assert found.standings[0].ratio is not None
    assert found.standings[0].ratio.value == pytest.approx(min(seconds, 1.5), rel=1e-3)


@pytest.mark.parametrize("latest", [0, 1, 2])
def test_the_reference_is_plain_training_in_memory_whatever_ran_after_it(latest: int) -> None:
    plain = row("in_memory", [2.0], losses=[9.0, 8.0], agrees=True, max_loss_difference=0.0)
    presets = [compiling("in_memory", 1.5, losses=[9.1, 8.1]), compiling("in_memory", 1.0, "kept", losses=[9.2, 8.2])]
    found = comparison([*presets[:latest], plain, *presets[latest:], row("megatrain", [1.1], losses=[9.0, 8.0], agrees=True)])
    assert found.reference is not None
    assert (found.reference.preset, found.reference.losses) == (None, [9.0, 8.0])
    assert [one.system for one in found.ranked] == ["megatrain"]


def test_what_keeps_layers_in_memory_is_no_reference_beside_the_stand_in() -> None:
    rows = [
        row("in_memory", status="wont_fit", config=told("in_memory")),
        row("zero3", [3.0], losses=[9.0], config=told("zero3")),
        compiling("in_memory", 1.0, "kept", losses=[9.1]),
        row("megatrain", [1.0], losses=[9.001], config=told("megatrain")),
    ]
    found = comparison([compared(one, rows, complete=True) for one in rows])
    assert found.reference is not None
    assert (found.reference.system, found.reference.losses) == ("zero3", [9.0])
    assert [(one.system, one.agrees) for one in found.standings if one.measured] == [
        ("in_memory", False),
        ("megatrain", True),
        ("zero3", True),
    ]


def test_a_row_without_verdict_is_not_ranked_beside_checked_ones() -> None:
    rows = [row("zero3", [3.0], agrees=True), row("megatrain", [1.0], agrees=None)]
    assert [one.system for one in comparison(rows).ranked] == ["zero3"]


@pytest.mark.parametrize(
    ("windows", "by_the_last"),
    [([3.16, 2.78, 2.35], "13,944"), ([2.1, 2.0, 2.0], None), ([2.0, 1.5], "21,845"), ([2.5, 2.0, 2.1], None), ([2.0], None)],
)
def test_windows_that_still_get_shorter_are_told(windows: list[float], by_the_last: str | None) -> None:
    def told(*repeats: int) -> list[str]:
        common = {"system": {"name": "zero3", "dtype": "bfloat16"}, "machine": {"device": "cuda"}}
        rows = [row("zero3", windows, cell=f"{n}", config=common | {"measure": {"repeat": n}}) for n in repeats]
        return [note for note in notes(comparison(rows)) if "not settled" in note]

    assert [note.endswith(f"by the last alone {by_the_last} tokens/s") for note in told(1)] == ([True] if by_the_last else [])
    assert not told(1, 2), "repeats tell their spread"


def test_a_table_says_how_much_of_a_step_was_the_optimizers() -> None:
    def row_of(repeat: int, *counters: dict[str, float]) -> Row:
        config = told("zero3") | {"measure": {"repeat": repeat, "steps_per_window": 2}}
        return row("zero3", [2.0, 2.1], cell=f"{repeat}", config=config, window_counters=list(counters))

    ran = [{"optimizer_s": 2.0, "optimizer_wait_s": 1.0}, {"optimizer_s": 2.4, "optimizer_wait_s": 1.2}]
    words = "ZeRO-3: of 2.05 s a step the optimizer ran for {} s, and was waited for {} s."
    assert words.format("1.10", "0.550") in notes(comparison([row_of(1, *ran)]))
    assert words.format("1.00", "0.500") in notes(
        comparison([row_of(1, *ran), row_of(2, ran[0], {"optimizer_s": 1.6, "optimizer_wait_s": 0.8})])
    )
    for silent in ([], [{"h2d_bytes": 1.0}] * 2, [{"optimizer_s": 0.0, "optimizer_wait_s": 0.0}] * 2):
        assert not [note for note in notes(comparison([row_of(1, *silent)])) if "optimizer" in note]
