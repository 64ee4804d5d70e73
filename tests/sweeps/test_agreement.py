"""Which row is the reference that another is held against, and whether it agrees."""

import dataclasses
from pathlib import Path

import pytest

from sweeps.agreement import COMPARED_STEPS, FLOAT8_TOLERANCE, LOSS_TOLERANCE, compared
from sweeps.result import Row
from tests.sweeps.test_bench import ROW


def row(system: str, loss: float, seed: int = 0, repeat: int = 1, **options: object) -> Row:
    config = {
        "system": {"name": system, "dtype": "bfloat16", **options},
        "seed": seed,
        "measure": {"windows": 1, "repeat": repeat},
        "machine": {"device": "cpu"},
    }
    return Row(
        **{**ROW, "system": system}, cell=f"{system}{loss}{seed}", losses=[loss], config=config
    )


def without_room(one: Row) -> Row:
    return dataclasses.replace(one, status="wont_fit", losses=[])


NO_ROOM = without_room(row("in_memory", 1.0))
EAGER, COMPILED = row("zero3", 1.0), row("zero3", 1.002, compile=True)
MINE = row("megatrain", 1.003)


def both_ways(mine: Row, rows: list[Row]) -> tuple[bool | None, bool | None]:
    """While cells are still to come, and when all have run."""
    return compared(mine, rows).agrees, compared(mine, rows, complete=True).agrees


def test_agreement_is_with_the_reference_of_the_same_config() -> None:
    rows = [row("in_memory", 1.0)]
    assert compared(row("zero3", 1.001), rows).agrees is True
    assert compared(row("zero3", 1.003), rows).agrees is False
    assert compared(row("zero3", 1.0, seed=1), rows).agrees is None
    assert compared(row("in_memory", 1.0), []).agrees is True


@pytest.mark.parametrize(("step", "agrees"), [(29, False), (30, True)])
def test_a_long_run_is_held_against_the_first_steps_of_the_reference(
    step: int, agrees: bool
) -> None:
    """Later ones are far apart under two exact systems."""
    losses = [1.0] * 100
    reference = dataclasses.replace(row("in_memory", 1.0), losses=losses)
    mine = dataclasses.replace(row("zero3", 1.0), losses=[*losses[:step], 2.0, *losses[step + 1 :]])
    assert compared(mine, [reference]).agrees is agrees


def test_the_page_says_what_is_compared() -> None:
    page = (Path(__file__).parents[2] / "docs/methods.md").read_text()
    assert f"no loss lies further than {LOSS_TOLERANCE:.0e}".replace("e-0", "e-") in page
    assert f"{FLOAT8_TOLERANCE:.0e}".replace("e-0", "e-") in page
    assert f"At most the first {COMPARED_STEPS} steps are" in page


def test_what_multiplies_in_float8_is_held_less_tightly_against_a_reference_of_its_own() -> None:
    plain, reference = row("in_memory", 1.0), row("in_memory", 1.04, products="float8")
    mine, wrong = (row("megatrain", loss, products="float8") for loss in (1.025, 1.0))
    assert compared(mine, [plain, reference]).agrees is True
    assert compared(wrong, [plain, reference]).agrees is False  # bf16's losses, under that name
    assert compared(row("megatrain", 1.015), [plain, reference]).agrees is False


def test_zero3_stands_in_where_the_reference_has_no_room_and_only_there() -> None:
    assert compared(EAGER, []).agrees is None
    assert compared(EAGER, [NO_ROOM]).max_loss_difference == 0.0
    assert compared(row("megatrain", 1.001), [NO_ROOM, EAGER]).agrees is True
    assert compared(MINE, [NO_ROOM, EAGER]).agrees is False
    assert compared(row("megatrain", 1.001), [EAGER]).agrees is None
    assert compared(MINE, [NO_ROOM, EAGER, row("in_memory", 1.003)]).agrees is True


def test_compiled_it_stands_in_where_it_was_measured_so_alone() -> None:
    """Which is known when all have run."""
    alone = [NO_ROOM, COMPILED]
    assert both_ways(MINE, alone) == (None, True)
    assert compared(COMPILED, alone, complete=True).max_loss_difference == 0.0
    assert compared(MINE, [*alone, EAGER], complete=True).agrees is False
    difference = compared(COMPILED, [*alone, EAGER], complete=True).max_loss_difference
    assert difference == pytest.approx(0.002)
    failed = dataclasses.replace(EAGER, status="oom_host", losses=[])
    assert compared(MINE, [*alone, failed], complete=True).agrees is True
    refused = without_room(row("in_memory", 1.0, compile=True))
    assert compared(MINE, [refused, COMPILED], complete=True).agrees is True
    fits = row("in_memory", 1.003, compile=True)  # which is no reference: that is eager
    assert compared(row("megatrain", 1.001), [NO_ROOM, fits, EAGER]).agrees is True


def test_where_nothing_says_that_there_was_no_room_it_stands_in_when_all_have_run() -> None:
    """As a preset only kept, and only alone."""
    kept = dataclasses.replace(row("zero3", 1.004, compile=True), preset="kept")
    other = dataclasses.replace(row("zero3", 1.0, compile=True), preset="twinflow kept")
    assert both_ways(MINE, [EAGER]) == (None, False)
    assert compared(MINE, [other], complete=True).agrees is None
    assert compared(MINE, [other, kept], complete=True).agrees is True
    assert compared(other, [other, kept], complete=True).agrees is False
    assert compared(kept, [other, kept], complete=True).max_loss_difference == 0.0
    difference = compared(kept, [kept, COMPILED], complete=True).max_loss_difference
    assert difference == pytest.approx(0.002)


def test_with_its_state_on_disk_it_stands_in_where_nothing_else_was_measured() -> None:
    on_disk = row("zero_infinity", 1.002, compile=True)
    assert both_ways(MINE, [on_disk]) == (None, True)
    assert compared(on_disk, [on_disk], complete=True).max_loss_difference == 0.0
    assert compared(MINE, [on_disk, EAGER], complete=True).agrees is False


def test_training_in_memory_compiled_stands_in_where_no_eager_one_was_measured() -> None:
    fits = row("in_memory", 1.002, compile=True)
    assert both_ways(MINE, [fits]) == (None, True)
    assert compared(fits, [fits], complete=True).max_loss_difference == 0.0
    far = row("in_memory", 1.5, compile=True)
    assert compared(MINE, [far, EAGER], complete=True).agrees is False  # ZeRO-3 comes first
    assert compared(far, [far, row("zero_infinity", 1.0)], complete=True).agrees is True
    kept = dataclasses.replace(row("in_memory", 1.004, compile=True), preset="kept")
    assert both_ways(MINE, [kept]) == (None, True)
    assert compared(kept, [kept, fits], complete=True).max_loss_difference == pytest.approx(0.002)


def test_of_its_repeats_the_first_is_the_reference_for_the_others_too() -> None:
    again = row("zero3", 1.005, repeat=2)
    assert compared(EAGER, [NO_ROOM, EAGER, again]).max_loss_difference == 0.0
    assert compared(again, [NO_ROOM, EAGER, again]).agrees is False
    assert compared(row("megatrain", 1.001), [NO_ROOM, EAGER, again]).agrees is True
