"""The study of quality on the CPU, from its text to its figure; and the text that it is about."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import style as plot_style

from analysis import answers, report, speeds, studies, tables
from analysis import rows as frames
from analysis.figures import of_study, style
from sweeps import auto, study, sums
from sweeps.command import command_of
from sweeps.rowfile import read_rows
from sweeps.rows import Rows
from tests.made_rows import framed, row
from tests.study_rows import config
from tests.sweeps.test_ablations import in_this_process

SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_attention_heads=2",
    "system.compile=false",
    "measure.windows=2",
    "measure.steps_per_window=3",
    "measure.heldout_tokens=256",
    "measure.exact_match=3",
    "logging=none",
]


def test_sums_are_right_and_none_comes_twice(tmp_path: Path) -> None:
    sums.write(tmp_path / "a.jsonl", 3000)
    sums.write(tmp_path / "b.jsonl", 3000)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    seen = set()
    for line in lines:
        assert line["question"].startswith("What is ")
        one, sign, other = line["question"].removeprefix("What is ").removesuffix("?").split()
        values = int(one), int(other)
        assert int(line["answer"]) == (sum(values) if sign == "+" else values[0] * values[1])
        seen.add((sign, *sorted(values)))
    assert len(seen) == len(lines) == 3000
    assert len(sums.examples(sums.MOST)) == sums.MOST


@pytest.mark.parametrize("arguments", [["--lines", "0", "a.jsonl"], [], ["/dev/null/a.jsonl"]])
def test_a_bad_call_for_sums_is_one_line(arguments: list[str], capsys) -> None:
    try:
        code = sums.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_study_runs_on_the_cpu_from_its_text_to_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(study, "run_isolated", in_this_process)
    sums.write(tmp_path / "text" / "sums.jsonl", 400)
    auto.register("cpu")
    out = tmp_path / "out"
    whole = [f"data.files={tmp_path / 'text' / 'sums.jsonl'}", f"output_dir={out}"]
    command = command_of(["+experiment=quality", *SMALL, *whole])
    assert [cell.system for cell in command.cells] == [
        "in_memory", "megatrain", "megatrain", "megatrain", "zero3", "fsdp2", "lora", "qlora"
    ]  # fmt: skip
    assert len({cell.hash for cell in command.cells}) == 8
    rows = Rows()
    for cell in command.cells:
        if cell.system != "zero3":  # its own processes take seconds and prove nothing here
            study.run_cell(cell, "[1]", rows)
    found = read_rows(out / "rows.jsonl")
    assert [row.status for row in found] == ["ok"] * 7
    for one in found:
        tokens = [point["tokens"] for point in one.heldout]
        assert [point["step"] for point in one.heldout] == [0, 4, 7]
        assert tokens == sorted(set(tokens))
        assert one.heldout[-1]["loss"] < one.heldout[0]["loss"]
        assert one.heldout[-1]["loss"] == pytest.approx(one.heldout_loss, abs=5e-3)
        assert one.num_questions == 3
        assert 0.0 <= one.exact_match <= 1.0
        assert len(one.gradient_norms) == len(one.losses) == 7
    full = [one for one in found if one.agrees is not None]
    assert {one.system for one in found} - {one.system for one in full} == {"lora", "qlora"}
    assert [one.losses for one in full if one.preset == "fast"] == [
        one.losses for one in full if one.preset == "fast_fp32"
    ], "the split master is an fp32 one"
    (section,) = report.sections(frames.frame(out))
    page = report.markdown(*section)
    assert page.startswith("# Does it learn the same?")
    assert "systems with an exact master end within" in page
    assert "MegaTrain fast, bf16 master ends" in page
    last = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][-2:]
    assert last == ["LoRA", "QLoRA"]
    with mpl.rc_context(), plot_style.context(style.LOOK):
        tokens, hours, gap = of_study.draw(*section).axes
    assert len(tokens.lines) == len(hours.lines) == 7
    assert len(gap.lines) == 2 * 5, "every loss and their mean, of what trains every parameter"


def curve(*losses: float) -> list[dict[str, float]]:
    return [
        {"step": at, "tokens": 100 * at, "seconds": 2.0 * at, "loss": loss}
        for at, loss in enumerate(losses)
    ]


def test_what_is_not_known_of_quality_is_not_said() -> None:
    of: dict = {"experiment": "quality"}
    given = [row("in_memory", [1.0] * 3, config=config(name="in_memory"), **of)]
    for rows in (given, [*given, row("lora", [1.0] * 3, heldout=curve(3.0, 2.0), **of)]):
        lines = speeds.lines(studies.assigned(framed(rows)))
        told = studies.listed()["quality"]
        assert "Fewer than two systems" in answers.answer(told, lines)
        assert "held-out loss" not in tables.of(told, lines)
        assert style.drawn(lambda lines=lines, told=told: of_study.draw(told, lines))


def test_a_long_run_is_judged_by_its_heldout_loss_alone() -> None:
    for num_steps, said in ((9, True), (40, False)):
        given = row(
            "zero3",
            [1.0] * 3,
            experiment="quality",
            losses=[1.0] * num_steps,
            heldout_loss=0.4,
            agrees=False,
            max_loss_difference=0.01,
        )
        lines = speeds.lines(studies.assigned(framed([given])))
        assert any("not ranked" in note for note in tables.notes(lines)) is said
