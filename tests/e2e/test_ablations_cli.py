"""Every study of conf/ablation through its real command: sweeps.run's main, Hydra's multirun, a
process a cell, the report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.rowfile import read_rows
from tests.study_cells import overrides

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model=tiny",
    "measure=brief",
    "logging=none",
    "data.max_bytes=65536",
    "shape.batch_size=2",
    "shape.seq_len=16",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_attention_heads=2",
]

QUICK = ["measure=brief", "logging=none", "data.max_bytes=65536"]
CHOSEN: dict[str, dict[str, str]] = {
    "device_memory": {"machine.device_bytes": "16000000000", "system": "megatrain_fast,zero3"},
    "model_size": {},
}
"""Studies that show what only processes of their own do: compiled layers and ZeRO-3, a cell without
room. Every study runs without processes in tests/sweeps/test_ablations.py."""


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command, ended well."""
    command = [sys.executable, "-m", "sweeps.run", *arguments, f"output_dir={folder}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_study_goes_from_its_command_to_its_figure(name: str, tmp_path: Path) -> None:
    done = ran(tmp_path, f"+ablation={name}", *QUICK, *overrides(name, CHOSEN[name]))
    assert f"{name}: 2 cells, 0 already measured" in done.stdout
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row.status for row in rows] == ["ok", "wont_fit" if name == "model_size" else "ok"]
    assert {row.experiment for row in rows} == {name}
    table = [
        line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("|")
    ]
    assert len(table) == 2 + len(rows)
    shown = "".join(table).replace("*", "")
    for row in rows:
        assert (
            f"| {row.tokens_per_s:,.0f} |" if row.status == "ok" else "| does not fit |"
        ) in shown
    picture = tmp_path / "report.png"
    if name == "model_size":  # a line of one point
        assert not picture.exists()
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(900)
def test_the_table_of_a_study_is_of_its_rows(tmp_path: Path) -> None:
    study = ["+ablation=depth", "system=megatrain", "model.config.num_hidden_layers=1,2"]
    done = ran(tmp_path, *study, *SMALL)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [(row.experiment, row.status) for row in rows] == [("depth", "ok")] * 2
    assert [row.config["model"]["config"]["num_hidden_layers"] for row in rows] == [1, 2]
    assert rows[0].num_params is not None
    assert rows[1].num_params is not None
    assert rows[0].num_params < rows[1].num_params
    page = (tmp_path / "report.md").read_text()
    title, _, *body = [
        line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")
    ]
    assert title[:2] == ["num hidden layers", "tokens/s"]
    assert [line[0] for line in body] == ["1", "2"]
    for line, row in zip(body, rows, strict=True):
        assert row.tokens_per_s is not None
        assert line[1] == f"{row.tokens_per_s:,.0f}"
        assert f"  {line[1]}  " in done.stdout
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "\\toprule" in (tmp_path / "report.tex").read_text()
    assert f"rows: {tmp_path / 'rows.jsonl'}" in done.stdout
