"""Both commands, from rows on disk to files and lines on the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import effects, load, make, report, style
from analysis.cells import percent
from analysis.compare import CPU_NOTE
from sweeps.result import Row
from tests.unit.study_rows import factor_rows, grid_rows, ladder_rows, precision_rows, size_rows
from tests.unit.test_analysis_load import cpu_rows, h200_rows, row, save

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pictures: these tests look at files, not at pixels."""
    monkeypatch.setitem(style.RC, "savefig.dpi", 50)


def test_report_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert report.main([str(save(tmp_path / "rows.jsonl", h200_rows()))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("quickstart: qwen2.5-3b (3.40B parameters), batch 32 × 1024 tokens\nNVIDIA H200, 16 cores, 134 GB host\n")
    assert "torch 2.11.0, deepspeed 0.19.8, 2026-11-21, commit 012345678" in out
    assert "MegaTrain is the fastest: 1.80x" in out
    kinds = ("png", "pdf", "md", "tex")
    assert out.splitlines()[-4:] == [str(tmp_path / f"report.{kind}") for kind in kinds]
    assert all((tmp_path / f"report.{kind}").stat().st_size > 500 for kind in kinds)
    page = (tmp_path / "report.md").read_text()
    assert re.search(r"!\[.*\]\(report\.png\)", page)


def test_cpu_report_says_what_it_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_folder = tmp_path / "out"
    assert report.main([str(save(tmp_path / "rows.jsonl", cpu_rows())), "--out", str(out_folder), "--name", "cpu"]) == 0
    assert CPU_NOTE in capsys.readouterr().out
    assert CPU_NOTE in (out_folder / "cpu.md").read_text()


def test_one_table_and_figure_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [row(system, [5.0], seq_len=2048, cell=f"long {system}") for system in ("zero3", "megatrain")]
    rows = [*cpu_rows(), row("zero3", [2.9]), *long]
    assert report.main([str(save(tmp_path / "rows.jsonl", rows))]) == 0
    assert capsys.readouterr().out.count("quickstart: ") == 3
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "report-1-quickstart-qwen2-tiny-8x256.png",
        "report-2-quickstart-qwen2.5-3b-32x1024.png",
        "report-3-quickstart-qwen2.5-3b-32x2048.png",
    ]
    assert (tmp_path / "report.md").read_text().count("\n## ") == 2


@pytest.mark.parametrize(
    ("rows", "told", "drawn"),
    [
        (grid_rows(), "Without double buffering (one slot instead of two, 3 streams) throughput changes by −33.3%", "ablation"),
        (ladder_rows(), "Rung fast is the fastest", "ablation"),
        (factor_rows(), "optimizer overlap on, clip norm 1.0 is the fastest", "ablation"),
        ([one for one in size_rows() if one.system == "megatrain"], "At 2.00B parameters MegaTrain fast is the", "throughput"),
        (size_rows(), "At 2.00B parameters MegaTrain fast is the fastest: 3.00x", "throughput"),
        ([one for one in size_rows() if one.preset == "fast"], "tokens/s at 1.00B parameters, 16,384", "throughput"),
    ],
    ids=["grid", "ladder", "factor", "sizes of one system", "sizes of several", "sizes of one preset"],
)
def test_a_study_has_the_figure_and_the_sentence_that_suit_it(
    rows: list[Row],
    told: str,
    drawn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    for name, drawing in (("ablation", "figure"), ("throughput", "study_figure"), ("quickstart", "figure")):
        module = getattr(report, name)
        own = getattr(module, drawing)
        monkeypatch.setattr(module, drawing, lambda part, own=own, name=name: calls.append(name) or own(part))
    assert report.main([str(save(tmp_path / "rows.jsonl", rows))]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    assert calls == [drawn]
    assert "\\toprule" in (tmp_path / "report.tex").read_text()


def test_figures_of_the_last_report_do_not_outlive_it(tmp_path: Path) -> None:
    """Those that its page shows, and nothing else: neither another report's nor what somebody put there."""
    rows = tmp_path / "rows.jsonl"
    save(rows, cpu_rows())
    assert report.main([str(rows)]) == 0
    others = ["report-9-mine.png", "report.old.png", "report-1.png", "reports.pdf", "second.png", "notes.png"]
    for name in others:
        (tmp_path / name).write_text("not the report's")
    (tmp_path / "report.md").write_text((tmp_path / "report.md").read_text() + "\n![mine](notes.png) ![mine](report-9-mine.png)\n")
    save(rows, [*cpu_rows(), row("zero3", [2.9])])
    assert report.main([str(rows)]) == 0
    both = [f"report-{number}.{kind}" for number in ("1-quickstart-qwen2-tiny-8x256", "2-quickstart-qwen2.5-3b-32x1024")
            for kind in ("pdf", "png")]  # fmt: skip
    kept = [*others, "report.md", "report.tex", "rows.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*both, *kept])
    (tmp_path / "report-1-quickstart-qwen2-tiny-8x256.md").write_text("a report of its own")
    save(rows, cpu_rows())
    assert report.main([str(rows)]) == 0
    own = ["report.png", "report.pdf", *both[:2], "report-1-quickstart-qwen2-tiny-8x256.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*own, *kept])


def test_readme_prints_markdown_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(save(tmp_path / "rows.jsonl", h200_rows())), "--readme"]) == 0
    assert "| **★ MegaTrain** |" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_a_document_shows_what_the_committed_rows_give(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / document).read_text()
    tables = re.findall(r"<!-- table:(\w+) -->\n(.*?)\n<!-- /table -->", page, re.DOTALL)
    assert tables
    for name, table in tables:
        assert report.main([str(make.RESULTS / f"{name}.jsonl"), "--readme"]) == 0
        assert table == capsys.readouterr().out.strip(), f"put the output of python -m analysis.report ... --readme into {name}"


def test_the_documents_state_double_buffering_as_the_rows_do() -> None:
    """Change and interval, and the other pair's change, wherever the result is told."""
    found = effects.setting_changes(load.load(*sorted(make.RESULTS.glob("*.jsonl"))), "without double buffering")
    gap = found[0].estimate
    assert gap.lo is not None
    assert gap.hi is not None
    for name in ("README.md", "docs/results.md", "docs/comparison.md"):
        page = (ROOT / name).read_text()
        told = [line for line in page.split("\n- ") if line.startswith("**Double buffering")]
        for number in (gap.value, gap.lo, gap.hi, found[1].estimate.value):
            assert percent(number) in told[0], f"{name}: {percent(number)}"


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analysis.report", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_make_rebuilds_every_file_to_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "h200_quickstart.jsonl", h200_rows()[:2])
    save(tmp_path / "grid.jsonl", grid_rows())
    save(tmp_path / "sizes.jsonl", [one for one in size_rows() if one.preset == "fast"])
    save(tmp_path / "precision.jsonl", precision_rows())
    assert make.main(["--results", str(tmp_path)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    page, picture = ("png", "pdf", "md", "tex"), ("png", "pdf")
    names = [f"{stem}.{kind}" for stem in ("grid", "h200_quickstart") for kind in page]
    names += [f"h200_quickstart.{extra}.{kind}" for extra in ("memory", "convergence") for kind in picture]
    names += [f"precision.{kind}" for kind in page] + [f"precision.convergence.{kind}" for kind in picture]
    names += [f"sizes.{kind}" for kind in page] + [f"throughput.{kind}" for kind in picture] + [f"paper.{kind}" for kind in page]
    assert [path.name for path in written] == names
    before = [path.read_bytes() for path in written]
    assert make.main(["--results", str(tmp_path)]) == 0
    assert [path.read_bytes() for path in written] == before


def test_make_removes_the_figures_that_its_rows_no_longer_give(tmp_path: Path) -> None:
    """By their exact names, and not where a study or a timeline is so named."""
    save(tmp_path / "a.jsonl", [one for one in size_rows() if one.preset == "fast"])
    save(tmp_path / "throughput_again.jsonl", cpu_rows()[:2])
    save(tmp_path / "a-2.jsonl", cpu_rows()[:2])
    kept = ["a.fast.timeline.png", "a-b.memory.png", "a-3.memory.svg", "throughput_mine.png"]
    stale = ["a.memory.png", "a-3.memory.pdf", "a.convergence.png", "throughput-4.png"]
    for name in (*kept, *stale):
        (tmp_path / name).write_text("earlier")
    assert make.main(["--results", str(tmp_path)]) == 0
    there = {path.name for path in tmp_path.iterdir()}
    assert there >= {*kept, "throughput_again.png", "throughput_again.memory.png", "a-2.memory.png", "throughput.png"}
    assert there.isdisjoint(stale)


def test_make_without_rows_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert make.main(["--results", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --results: got {tmp_path / 'absent'}, allowed ")
    assert error.count("\n") == 1
    (tmp_path / "bad.jsonl").write_text('{"schema_version": 0}\n')
    assert make.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
