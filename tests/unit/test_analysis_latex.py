"""LaTeX for a page: what it goes without, and that every committed table fits."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import load, report
from analysis.latex import as_latex, fitted_to_page, width_in
from analysis.make import RESULTS
from analysis.style import PAGE_IN
from analysis.tables import Sheet


def sheet_of(name: str) -> Sheet:
    (section,) = report.parted(load.load(RESULTS / f"{name}.jsonl"))
    return section.sheet


def test_the_headline_fits_a_page_and_keeps_its_intervals() -> None:
    whole = sheet_of("zero3_14b")
    assert width_in(whole) > PAGE_IN
    title = as_latex(whole).split("\\midrule")[0]
    for kept in ("ratio to \\\\ ZeRO-3 compiled", "95\\% \\\\ interval", "device \\\\ GB", "TFLOPS", "agrees"):
        assert kept in title
    for left_out in ("data sheet", "repeats", "loss at"):
        assert left_out not in title


def test_a_study_goes_without_memory_before_speed() -> None:
    whole = sheet_of("ladder")
    wide = replace(whole, cells=[[row[0] + "." * 60, *row[1:]] for row in whole.cells])
    assert fitted_to_page(wide).cells[0][1:] == ["tokens/s", "change from the first", "95% interval"]


def test_every_row_stays_and_cells_follow_their_titles() -> None:
    cells = [["system", "long words\nof no use", "tokens/s"], *[[name, "x" * 200, str(at)] for at, name in enumerate("abc")]]
    tex = as_latex(Sheet(cells=cells, align="lrr", spare=(1,)))
    assert "\\begin{tabular}{@{}lr@{}}\n\\toprule\nsystem & tokens/s \\\\\n\\midrule\na & 0 \\\\\nb & 1 \\\\\nc & 2 \\\\" in tex
    narrow = [["system", "kept"], ["a", "1"]]
    assert "system & kept" in as_latex(Sheet(cells=narrow, align="lr", spare=(1,)))


@pytest.mark.parametrize(
    ("title", "lines"), [("95% interval", "95\\% interval"), ("change from the first", "change from \\\\ the first")]
)
def test_long_titles_take_two_lines(title: str, lines: str) -> None:
    assert lines in as_latex(Sheet(cells=[["system", title], ["a", "1"]], align="lr"))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_tables_fit_a_page(path: Path) -> None:
    for section in report.parted(load.load(path)):
        assert width_in(fitted_to_page(section.sheet)) <= PAGE_IN
        tex = as_latex(section.sheet)
        assert tex.count("{") == tex.count("}")


@pytest.mark.parametrize(("name", "set_in"), [("zero3_14b", 6.49), ("ladder", 5.11), ("precision", 5.93), ("device_memory", 6.22)])
def test_the_width_is_about_what_latex_makes_of_it(name: str, set_in: float) -> None:
    """set_in: inches as pdflatex set these (article, 10 pt, Computer Modern)."""
    assert width_in(fitted_to_page(sheet_of(name))) == pytest.approx(set_in, rel=0.07)
