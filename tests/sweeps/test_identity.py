"""What a cell is known by stays what it was: of every preset, of the ladder, and of every committed
row."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sweeps import auto
from sweeps.config import cell_from
from sweeps.identity import RETIRED, current, digest, hashed, in_force
from sweeps.rowfile import read_rows

RESULTS = Path(__file__).resolve().parents[2] / "analysis" / "results"
CELLS = """
fsdp2 9fce15ec4f18
fsdp2_compiled 0703d730409c
fsdp2_grad_op 2b5038ff6795
fsdp2_grad_op_compiled 345e3274816a
fsdp2_grad_op_kept d5d2d1776c95
fsdp2_kept a5e26b96b92f
in_memory af2d3a91bde3
in_memory_compiled 4e28ebdefc25
in_memory_kept a83021244e67
megatrain 84beb948b33a
megatrain_fast 1d066c2f24b4
megatrain_long 15b30dfab346
megatrain_paper b08c06e93578
published_megatrain c196c0a5a322
roundpipe 91459bea79b8
roundpipe_stale 7374d72e9ebb
slideformer 3aee7e5e98bb
superoffload 34bf51a7cf29
superoffload_compiled d9ae3ee60e93
superoffload_kept 3bf544d805ff
torchao_offload 953a32488da2
torchao_offload_kept 04cb3d61dc4e
tuned/zero3_kept-qwen2.5-3b-h200-32cores 1e22d2f4c779
zenflow a8d7e0163576
zenflow_kept 4b0c81975477
zero2 3a3da6dc114b
zero2_compiled 1d9238d36f0e
zero2_kept ec4e98517fe5
zero3 d170ef77020d
zero3_compiled e56cc532a9c1
zero3_kept b98ac7654ced
zero3_optimizer 5ec57967bf29
zero3_optimizer_compiled 435aba34055c
zero3_twinflow eeec29363535
zero3_twinflow_compiled 1f0630bd64bc
zero3_twinflow_kept 2c0e7d5568e0
zero_infinity 8870484cf4e3
"""
"""Files of conf/system, and the cell of each with the tiny model on the CPU."""
LADDER = "79b3099ce52e 1aa34143b6b0 957e8d92bf14 6fe64b4ecc6a ea877b4b528a " + (
    "8a5210f6c807 1d6aa36f17de 2beaf67a5864 57a4110b2807"
)
"""The rungs' cells, in order."""


def cell_of(*overrides: str) -> str:
    """As on a machine without a GPU."""
    auto.register("cpu")
    try:
        with initialize_config_dir(str(auto.CONF), version_base="1.3"):
            config = compose("config", [*overrides, "model=tiny", "machine.device=cpu"])
            return cell_from(auto.resolve(config)).hash
    finally:
        auto.register()


@pytest.mark.parametrize("line", CELLS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_a_preset_is_the_cell_that_it_was(line: str) -> None:
    name, cell = line.split()
    assert cell_of(f"system={name}") == cell


def test_what_decays_is_part_of_a_cell_and_older_rows_say_nothing_of_it() -> None:
    cell = cell_of("system=megatrain")
    assert cell_of("system=megatrain", "recipe.decayed=all") == cell
    assert cell_of("system=megatrain", "recipe.decayed=matrices") != cell
    row = read_rows(next((RESULTS / "vs_zero3_14b").glob("*.jsonl")))[0].config
    read = in_force(row)
    assert "decayed" not in row["recipe"]
    today = {**current(row), "recipe": {**row["recipe"], "decayed": "all"}}
    assert in_force(today) == read
    assert digest(hashed(today)) == digest(hashed(current(row)))
    other = {**today, "recipe": {**row["recipe"], "decayed": "matrices"}}
    assert in_force(other)["recipe"]["decayed"] == "matrices"


def test_a_rung_is_the_cell_that_it_was() -> None:
    names = sorted(path.stem for path in (auto.CONF / "rung").glob("*.yaml"))
    assert [cell_of("+ablation=ladder", f"+rung={name}") for name in names] == LADDER.split()


def test_the_cell_of_every_committed_row_is_recomputed_from_its_config() -> None:
    rows = [row for path in sorted(RESULTS.glob("*/*.jsonl")) for row in read_rows(path)]
    assert len(rows) >= 240
    assert [row.cell for row in rows] == [digest(hashed(row.config)) for row in rows]


def test_a_row_of_before_reads_as_one_of_today() -> None:
    """Its fields stand where they stand now, and today's config of the same settings is the same
    cell."""
    rows = [row for path in sorted(RESULTS.glob("*/*.jsonl")) for row in read_rows(path)]
    before = [row for row in rows if row.system in RETIRED]
    rows = [row for row in before if set(RETIRED[row.system]) <= set(row.config["system"])]
    assert len(rows) >= 230, "a few are older than some of the knobs"
    for row in rows:
        read = current(row.config)
        assert not set(RETIRED[row.system]) & set(read["system"])
        assert "timeout_s" not in read["measure"]
        assert read["process"]["timeout_s"] == row.config["measure"]["timeout_s"]
        assert row.config["system"].get("checkout") or digest(hashed(read)) == row.cell
        assert cell_from(row.config).hash == row.cell
