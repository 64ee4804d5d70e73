"""Pages: what is committed is what the rows give, and prose types no number that a row could
change."""

import re
from pathlib import Path

import pytest

from analysis import answers, names, numbers, record, report, studies
from tests.analysis.test_record import BOOT, OTHER, measured
from tests.made_rows import save

TYPED = re.compile(r"\d\.\d+ ?x\b|\d{1,3},\d{3} tokens/s|\d+(\.\d+)?%|\d+ tokens/s|[+−]\d+\.\d")
"""Ratios, speeds and percentages."""
COUNTED = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten) (?:times|machines|repeats|trials)\b"
)
"""What a later run would change."""
CLAIM = "1.84x"
"""The paper's number, which no row of ours can change."""
LINES = record.lines()


def test_committed_pages_are_what_the_rows_give() -> None:
    """So whoever deletes them gets them back."""
    given = dict(report.pages(LINES))
    assert set(given) == set(record.RESULTS.rglob("README.md")), "a page without rows: delete it"
    for path, text in given.items():
        assert path.read_text() == text, f"{path.name} is stale: make docs"
    for name in report.FILLED:
        text = (report.ROOT / name).read_text()
        assert numbers.fill(text, LINES) == text, f"{name} is stale: make docs"


@pytest.mark.parametrize("name", report.FILLED)
def test_prose_types_no_measured_number(name: str) -> None:
    text = numbers.MARKER.sub("", (report.ROOT / name).read_text())
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace(CLAIM, "")
    assert TYPED.findall(prose) == []
    assert COUNTED.findall(prose) == []


def test_every_study_has_a_page_with_question_answer_table_and_origin() -> None:
    for study, _ in studies.shown(LINES):
        text = (record.RESULTS / study.name / "README.md").read_text()
        assert text.startswith(f"# {study.title}\n\n{study.question}\n\n")
        assert "| --- " not in text.split("## ")[0]
        assert "## Measure it again" in text
        assert "## Where the rows come from" in text
        for run, note in study.notes.items():
            assert f"\n- {note}\n" in text.split(f"run `{run}`")[1].split("\n## ")[0]
        for run in study.superseded:
            assert (record.RESULTS / study.name / f"{run}.jsonl").exists(), run


def test_rows_of_a_second_machine_join_the_page_and_no_ratio_spans_the_two(tmp_path: Path) -> None:
    rows = [measured("zero3"), measured("megatrain"), measured("megatrain", machine=OTHER)]
    record.add([save(tmp_path / "rows.jsonl", rows)], tmp_path / "results")
    page, index = (tmp_path / "results" / name for name in ("mine/README.md", "README.md"))
    assert set(report.refresh(tmp_path / "results")) == {page, index}
    text = page.read_text()
    first, second = text.split("\n## ")[1:3]
    assert "0123abcd" in first
    assert "1.00x" in first
    assert "deadbeef" in second
    assert "x |" not in second
    assert report.refresh(tmp_path / "results") == [], "what is right is not written again"
    page.unlink()
    assert report.refresh(tmp_path / "results") == [page]
    assert page.read_text() == text


def test_an_answer_of_two_runs_names_both_machines() -> None:
    ((study, mine),) = [one for one in studies.shown(LINES) if one[0].name == "context_length"]
    told = answers.answer(study, mine)
    for _, line in answers.lines_of(study, mine).iterrows():
        assert f"{line['tokens_per_s']:,.0f} tokens/s" in told


@pytest.mark.parametrize(
    "marker",
    [
        "ratio:nowhere/fast/zero3",
        "speed:vs_zero3_14b/echo",
        "bogus:vs_zero3_14b/fast",
        "most:nowhere",
        "steady:vs_zero3_14b/fast/zero3",
        "trials:nobody-h200-16cores",
        "gain:zero3_kept-qwen2.5-3b-h200-32cores/fast",
    ],
)
def test_a_marker_that_names_nothing_is_one_line(marker: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{{{marker}}}")) as caught:
        numbers.fill(f"<!--{{{marker}}}-->1<!--/-->", LINES)
    assert "\n" not in str(caught.value)


def test_a_number_says_what_it_should() -> None:
    assert numbers.number("ratio", "vs_zero3_14b/fast/zero3", LINES) == "1.75x"
    assert numbers.number("ratio", "vs_zero3_14b/paper/zero3", LINES) == "0.95x (one round)"
    assert numbers.number("interval", "vs_zero3_14b/fast/zero3", LINES) == "1.59–1.93"
    three = LINES[LINES["run"].str[-8:].isin(["6ae4ec2a", "ba71c3ca", "19e485b7"])]
    found = numbers.number("spread", "vs_zero3_7b/fast/twinflow", three)
    assert found == "1.55x to 1.61x (one or two rounds in each run)"
    two = three[three["run"].str[-8:] != "ba71c3ca"]
    few = numbers.number("spread", "vs_zero3_7b/fast/twinflow", two)
    assert few == "1.55x to 1.61x (one round in each run)"
    kept = LINES[LINES["run"].str[-8:].isin(["4d5eb753", "0b51b947"])]
    assert (
        numbers.number("spread", "vs_zero3_3b/fast/zero3.kept+compiled", kept)
        == "2.01x (one round)"
    ), "in the other run ZeRO-3 was still getting faster"
    assert numbers.number("steady", "vs_zero3_3b@06e212f3/fast/roundpipe", LINES) == "2.88x"
    one_round = numbers.number("steady", "vs_zero3_7b@e456478c/fast/zero3.compiled", LINES)
    assert one_round == "2.26x (one round)"
    assert numbers.number("repeats", "vs_zero3_14b/fast", LINES) == "3"
    assert numbers.number("share", "saving@2fa189ef/fast", LINES) == "95%"
    assert numbers.number("most", "context_length", LINES) == "512K"
    assert (
        numbers.number("heldout", "quality@98d7b6ad/fast_float8/fast", LINES) == "0.0014 nats below"
    )
    search = "zero3_twinflow_compiled-qwen2.5-7b-h200-16cores"
    assert [numbers.number(kind, search, LINES) for kind in ("trials", "gain")] == [
        "4",
        "1.04x (one round)",
    ]
    rival = numbers.line(numbers.run_of("vs_zero3_7b", LINES), "rival")
    assert names.name(rival) == "Twin-Flow, compiled"
    assert BOOT["boot"] not in numbers.number("machine", "vs_zero3_14b/fast", LINES)
