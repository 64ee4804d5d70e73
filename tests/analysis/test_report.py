"""The command line: a report of any rows, and bad input in one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from analysis import __main__ as command
from analysis import answers, record, report, rows, speeds, studies, tables
from analysis.figures import of_study
from sweeps import auto, identity
from sweeps.command import command_of
from sweeps.result import Row
from tests.made_rows import CPU, H200, framed, row, save
from tests.study_rows import batch_rows, config, factor_rows, grid_rows, ladder_rows, size_rows


def test_an_axis_of_studies_yaml_that_no_row_has_is_one_line(monkeypatch) -> None:
    known = studies.listed()["double_buffering"]
    bad = dataclasses.replace(known, x="system.bogus")
    monkeypatch.setattr(studies, "listed", lambda: {bad.name: bad})
    with pytest.raises(ValueError, match=r"studies.yaml: double_buffering.x: got 'system.bogus'"):
        list(report.sections(framed(grid_rows())))


@pytest.mark.parametrize("entry", ["{title: Mine, bogus: 1}", "{figure: bars}", ""])
def test_an_entry_of_studies_yaml_that_is_none_is_one_line(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "studies.yaml"
    path.write_text(f"mine: {entry}\n")
    with pytest.raises(ValueError, match=r"studies.yaml: mine: .*allowed") as caught:
        studies.listed(path)
    assert "\n" not in str(caught.value)


def test_a_figure_that_there_is_not_is_one_line() -> None:
    ((known, lines),) = report.sections(framed(grid_rows()))
    with pytest.raises(ValueError, match=r"figure: got 'pie', allowed comparison, bars"):
        of_study.draw(dataclasses.replace(known, figure="pie"), lines)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = command.main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_comparison_has_a_table_an_answer_and_a_picture(tmp_path: Path, capsys) -> None:
    given = [
        row("in_memory", [1.0] * 3),
        row("zero3", [3.0] * 3, agrees=True),
        row("megatrain", [1.5, 1.51, 1.49], agrees=True),
    ]
    path = save(
        tmp_path / "rows.jsonl",
        [
            *given,
            row("fsdp2", status="oom_device", reason="141 GB"),
            row("zenflow", [1.0] * 3, agrees=False, max_loss_difference=0.5),
        ],
    )
    code, out, _ = run(capsys, "report", path)
    assert code == 0
    assert "MegaTrain is 2.00x" in out.replace("\n", " ")
    assert "out of device memory: 141 GB." in out
    assert "its losses differ" in out
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    page = (tmp_path / "report.md").read_text()
    order = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert order == ["in memory", "MegaTrain", "ZeRO-3", "ZenFlow", "FSDP2"]


def test_a_steady_rate_stands_beside_the_windows_and_does_not_rank(tmp_path: Path, capsys) -> None:
    given = [
        row("zero3", [4.0] * 3, steady_tokens_per_s=8200.0),
        row("megatrain", [2.0] * 3, steady_tokens_per_s=20500.0),
        row("fsdp2", [1.9] * 3),
    ]
    path = save(tmp_path / "rows.jsonl", given)
    code, out, _ = run(capsys, "report", path)
    assert code == 0
    page = (tmp_path / "report.md").read_text()
    assert "| MegaTrain | 16,384 | 20,500 | 2.00x |" in page
    order = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert order == ["FSDP2", "MegaTrain", "ZeRO-3"]
    save(path, given[:2])
    code, out, _ = run(capsys, "report", path)
    assert "without the waits at a window's end, this run has 2.50x" in " ".join(out.split())


def test_energy_stands_in_the_report_where_rows_know_it(tmp_path: Path, capsys) -> None:
    pace = {"power_w": 600.0, "sm_mhz": 1480.0, "throttle_reasons": {"sw_power_cap": 0.75}}
    given = [row("zero3", [3.0] * 3), row("megatrain", [1.0] * 3, **pace)]
    path = save(tmp_path / "rows.jsonl", given)
    assert run(capsys, "report", path)[0] == 0
    page = (tmp_path / "report.md").read_text()
    assert "| 0.0183 | 1.48 | power 75% |" in page  # 600 W over 32,768 tokens/s
    assert "0.0183" in (tmp_path / "report.tex").read_text()
    save(path, given[:1])
    assert run(capsys, "report", path)[0] == 0
    assert "J/token" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("given", "x", "hue", "figure"),
    [
        (grid_rows(), "system.depth", "system.streams", "lines"),
        (ladder_rows(), "system.preset", None, "bars"),
        (factor_rows(), "system.optimizer_overlap", "recipe.clip_norm", "bars"),
        (size_rows(), "num_params", "system", "lines"),
        (batch_rows(), "batch_size", "system", "lines"),
    ],
)
def test_what_varies_is_drawn(given, x, hue, figure, tmp_path: Path, capsys) -> None:
    save(tmp_path / "rows.jsonl", given)
    ((study, _),) = report.sections(rows.frame(tmp_path))
    assert (study.x, study.hue, study.figure) == (x, hue, figure)
    assert run(capsys, "report", tmp_path)[0] == 0
    assert (tmp_path / "report.png").exists()


def test_streams_and_batch_are_one_figure_of_two_axes(tmp_path: Path) -> None:
    """Shapes that differ beside a setting are an axis like any other."""
    given = [
        row(
            "megatrain",
            [1.0 + streams / 10 + batch / 100] * 3,
            batch_size=batch,
            cell=f"{streams}{batch}",
            experiment="mine",
            config=config(streams=streams) | {"shape": {"batch_size": batch}},
        )
        for streams in (1, 2, 3)
        for batch in (4, 8, 16)
    ]
    ((study, _),) = report.sections(framed(given))
    assert (study.x, study.hue) == ("system.streams", "batch_size")
    ((turned, _),) = report.sections(framed(given), x="batch_size", hue="system.streams")
    assert (turned.x, turned.hue) == ("batch_size", "system.streams")


def three_axes() -> list[Row]:
    """Depth, streams and batch of the engine; ZeRO-3, which has neither, at both batches."""
    given = [
        row(
            "megatrain",
            [(4 - depth) * (1.2 if streams == 1 else 1.0) * batch / 4] * 3,
            batch_size=batch,
            cell=f"{depth}{streams}{batch}",
            experiment="mine",
            config=config(depth=depth, streams=streams) | {"shape": {"batch_size": batch}},
        )
        for depth in (1, 2, 3)
        for streams in (1, 2)
        for batch in (4, 8)
    ]
    return given + [
        row(
            "zero3",
            [8.0 * batch] * 3,
            batch_size=batch,
            cell=f"zero3{batch}",
            experiment="mine",
            config=config(name="zero3") | {"shape": {"batch_size": batch}},
        )
        for batch in (4, 8)
    ]


def test_what_x_and_hue_leave_open_is_a_column_and_no_ratio_or_line_spans_it(
    tmp_path: Path, capsys
) -> None:
    alone = [one for one in three_axes() if one.system == "megatrain"]
    ((study, lines),) = report.sections(framed(alone))
    assert (study.x, study.hue, study.rest) == ("system.depth", "system.streams", ["batch_size"])
    for _, line in lines.iterrows():
        assert tables.base_of(study, lines, line)["batch_size"] == line["batch_size"]
    slowest = "The slowest is 1 weight slot with 1 CUDA stream and 4 sequences per step: −72.2%"
    assert slowest in answers.answer(study, lines), "of the same batch as the fastest"
    drawn = [label for label, _, _ in of_study._series(study, lines)]
    assert sorted(drawn) == [
        f"CUDA streams: {streams}, {batch} sequences per step"
        for streams in (1, 2)
        for batch in (4, 8)
    ]
    path = save(tmp_path / "rows.jsonl", three_axes())
    code, out, err = run(capsys, "report", path, "--x", "batch_size")
    assert (code, err) == (0, "")
    assert (
        "At 8 sequences per step with 3 weight slots and 2 CUDA streams, MegaTrain is"
        in " ".join(out.split())
    )


def test_what_a_system_lacks_keeps_it_a_base() -> None:
    ((study, lines),) = report.sections(framed(three_axes()), x="batch_size", hue="system")
    assert set(study.rest) == {"system.depth", "system.streams"}
    engine = lines[lines["family"] == "megatrain"]
    bases = [tables.base_of(study, lines, line) for _, line in engine.iterrows()]
    assert [one["family"] for one in bases] == ["zero3"] * 12
    assert [one["batch_size"] for one in bases] == list(engine["batch_size"])


def test_a_listed_study_of_two_models_holds_each_against_its_own() -> None:
    """As model=auto chose them on two machines, before a study's cells shared one."""
    small = [
        dataclasses.replace(one, model="small", num_params=10**9, cell=f"{one.cell}b")
        for one in grid_rows()
    ]
    ((study, lines),) = report.sections(framed([*grid_rows(), *small]))
    assert study.rest == ["num_params"]
    assert [part["model"].nunique() for part in studies.parts(study, lines)] == [1, 1]
    told = report.markdown(study, lines)
    assert "Small, 32 x 1024 tokens a step" in told
    assert "Qwen2.5-3b of 3.4B parameters, 32 x 1024 tokens a step" in told  # unlike its name


def test_a_table_says_how_the_options_of_rivals_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuned row is of the search whose best trial has its settings, not of one that is called
    like its system; of two of equal settings that of its model."""
    monkeypatch.setattr(tables, "TUNED", tmp_path)

    def settings(preset: str | None) -> dict[str, Any]:
        return config(preset=preset, compile="twinflow" in (preset or ""))

    def searched(stem: str, preset: str, worse: int, **process: Any) -> None:
        best = {"tokens_per_s": 2.0, "system": settings(preset)["system"]}
        best["process"] = {**settings(preset).get("process", {}), "timeout_s": 1, **process}
        trials = [{**best, "tokens_per_s": None}, best] + [
            {"tokens_per_s": 1.0, "system": {**best["system"], "depth": number}}
            for number in range(worse - 1)
        ]
        (tmp_path / f"{stem}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in trials))

    def notes(*systems: tuple[str, str | None]) -> list[str]:
        made = [
            row(name, [1.0] * 3, cell=f"{n}", preset=preset, config=settings(preset))
            for n, (name, preset) in enumerate(systems)
        ]
        return tables.notes(speeds.lines(studies.assigned(framed(made))))

    nobody = "The options of rivals are those of conf/system, not of a search."
    assert notes(("megatrain", "fast"), ("in_memory", None)) == []
    assert notes(("megatrain", "fast"), ("zero3", None), ("fsdp2", None)) == [nobody]
    (one,) = notes(("zero3", "tuned twinflow"))
    assert one.endswith("its options are the best of a search (`+tune`)."), "its trials are gone"
    searched("zero3_kept-m-h200-16cores", "tuned kept", worse=6)
    searched("a-m-h200-32cores", "tuned twinflow", worse=8, omp_num_threads=16)
    (one,) = notes(("zero3", "tuned twinflow"))
    assert one.endswith("of a search (`+tune`)."), "that was with other threads"
    (tmp_path / "none.jsonl").touch()
    searched("zero3_twinflow-m-h200-32cores", "tuned twinflow", worse=3)
    (one,) = notes(("zero3", "tuned twinflow"))
    best = "its options are the best of {} trials of a search (`system=tuned/{}`)."
    told = best.format(4, "zero3_twinflow-m-h200-32cores")
    assert one == f"Twin-Flow, tuned, compiled: {told}"
    one, others = notes(("zero3", "tuned kept"), ("fsdp2", None))
    assert one.endswith(best.format(7, "zero3_kept-m-h200-16cores"))
    assert others == nobody.replace("of rivals", "of the other rivals")
    searched("zero3_twinflow-qwen2.5-3b-cpu-2cores", "tuned twinflow", worse=1)
    (one,) = notes(("zero3", "tuned twinflow"))
    assert one.endswith(best.format(2, "zero3_twinflow-qwen2.5-3b-cpu-2cores")), "of its model"
    old = row("zero3", [1.0] * 3, preset="tuned", config={})
    (one,) = tables.notes(speeds.lines(studies.assigned(framed([old]))))
    assert one.endswith("of a search (`+tune`)."), "a row may have no config"


def test_the_winner_of_every_search_is_known_whatever_its_age() -> None:
    """A trial's settings are moved and retired as a row's are."""
    auto.register()
    winners = sorted(identity.TUNED.glob("*.yaml"))
    assert len(winners) >= 3
    for path in winners:
        (cell,) = command_of([f"system=tuned/{path.stem}", "model=tiny"]).cells or []
        again = row("zero3", [1.0] * 3, preset="tuned", config=cell.config)
        told = tables.notes(speeds.lines(studies.assigned(framed([again]))))
        assert f"(`system=tuned/{path.stem}`)" in told[0]


def test_a_table_says_what_was_measured_in_rounds() -> None:
    def notes(*measured: tuple[str, int, str]) -> list[str]:
        """measured: system, depth of its slots, and a digit for each round that it ran in."""
        made = [
            row(
                name,
                [1.0] * 3,
                cell=f"{name}{depth}{repeat}",
                config=config(depth=depth) | {"measure": {"windows": 3, "repeat": int(repeat)}},
            )
            for name, depth, repeats in measured
            for repeat in repeats
        ]
        told = tables.notes(speeds.lines(studies.assigned(framed(made))))
        return [one for one in told if "easured" in one]

    assert notes(("megatrain", 2, "1"), ("in_memory", 2, "1")) == []
    turns = ["Each was measured in 3 rounds, in turn."]
    assert notes(("megatrain", 2, "123"), ("in_memory", 2, "123")) == turns
    assert notes(("megatrain", 2, "123")) == ["Measured in 3 rounds: MegaTrain."]
    apart = ["Measured in 2 rounds: MegaTrain; in memory."]
    assert notes(("megatrain", 2, "12"), ("in_memory", 2, "23")) == apart
    several = ("megatrain", 2, "123"), ("megatrain", 3, "12"), ("in_memory", 2, "1")
    assert notes(*several) == [
        "Measured in 3 rounds: MegaTrain (weight slots 2).",
        "Measured in 2 rounds: MegaTrain (weight slots 3).",
        "Each of the others was measured once.",
    ]


def test_the_worst_of_several_repeats_is_told_and_why() -> None:
    """How far a resumption was off, what the bench said, and the seconds of all."""
    given = [
        row(
            "megatrain",
            [1.0] * 3,
            cell=f"{repeat}",
            experiment="mine",
            cell_s=60.0,
            reason="the GPU was shared with 2 others" if repeat == 3 else "",
            counters={"resumed_difference": apart},
            config=config() | {"measure": {"windows": 3, "repeat": repeat}},
        )
        for repeat, apart in enumerate((0.0, 0.7, 0.5), 1)
    ]
    ((_, lines),) = report.sections(framed(given))
    (line,) = (line for _, line in lines.iterrows())
    assert (line["num_repeats"], line["cell_s"]) == (3, 180.0)
    assert line["counters"]["resumed_difference"] == 0.7
    assert "MegaTrain: the GPU was shared with 2 others." in tables.notes(lines)


@pytest.mark.parametrize("grows", [False, True])
def test_efficiency_is_over_one_gpu_with_the_same_work(grows: bool) -> None:
    """Of two batches, whose scaling is perfect; or of one that grows with the GPUs."""
    given = [
        row(
            "megatrain",
            [1.0] * 3,
            batch_size=batch * (gpus if grows else 1),
            num_ranks=gpus,
            cell=f"{gpus}{batch}",
            experiment="mine",
            tokens_per_s=1000.0 * batch * gpus,
            config=config(batch=batch) | {"gpus": gpus},
        )
        for gpus in (1, 2, 4)
        for batch in ((8,) if grows else (8, 64))
    ]
    ((study, lines),) = report.sections(framed(given), x="num_ranks")
    assert set(tables.of(study, lines)["efficiency"]) == {"100%"}


def test_a_list_is_an_axis_like_any_other(tmp_path: Path, capsys) -> None:
    given = [
        row(
            "megatrain",
            [1.0] * 3,
            cell=str(repeated),
            config=config() | {"measure": {"windows": 3, "repeated": repeated}},
        )
        for repeated in ([], ["zero3"])
    ]
    path = save(tmp_path / "rows.jsonl", given)
    code, out, err = run(capsys, "report", path, "--x", "measure.repeated")
    assert (code, err) == (0, ""), out


def test_a_cpu_s_speeds_say_what_they_prove(tmp_path: Path, capsys) -> None:
    path = save(tmp_path / "rows.jsonl", [row("zero3", [1.0] * 3, machine=CPU)])
    assert tables.CPU_NOTE in run(capsys, "report", path)[1].replace("\n", " ")


def test_a_report_removes_the_pictures_of_the_one_before(tmp_path: Path, capsys) -> None:
    two = [
        row("zero3", [1.0] * 3),
        row("zero3", [1.0] * 3, model="other", cell="b", num_params=10**9),
    ]
    path = save(tmp_path / "rows.jsonl", two)
    run(capsys, "report", path, "--x", "num_params")
    save(path, [row("zero3", [1.0] * 3), row("fsdp2", [1.0] * 3)])
    run(capsys, "report", path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "report.md",
        "report.pdf",
        "report.png",
        "report.tex",
        "rows.jsonl",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["report", "nowhere"], "nowhere: no such file or folder"),
        (["report", "EMPTY"], "no *.jsonl and no W&B run in this folder"),
        (["report", "ROWS", "--x", "system.bogus"], "--x: got 'system.bogus', allowed"),
        (["add", "ROWS"], "rows measured without a GPU"),
        (["docs", "--results", "EMPTY"], "no *.jsonl"),
        (["figures", "--results", "EMPTY"], "no *.jsonl"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], told: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    given = [
        row("megatrain", [1.0] * 3, machine=CPU, config=config(depth=depth), cell=str(depth))
        for depth in (1, 2)
    ]
    save(tmp_path / "some" / "rows.jsonl", given)
    places = {"EMPTY": tmp_path / "empty", "ROWS": tmp_path / "some"}
    code, _, err = run(capsys, *[places.get(one, one) for one in arguments])
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_study_of_ranks_has_efficiencies_and_predicts_what_the_machine_lacks() -> None:
    """Two GPUs were there; of four and eight the engine alone has a prediction."""
    two = H200 | {"num_gpus": 2}
    rows = [
        row(
            system,
            [step / num * (1.1 if num == 2 else 1.0)] * 3,
            experiment="ranks",
            cell=f"{system}-{num}",
            num_ranks=num,
            machine=two,
        )
        for system, step in (("megatrain", 2.0), ("zero3", 4.0))
        for num in (1, 2)
    ]
    rows += [
        row(
            system,
            experiment="ranks",
            cell=f"{system}-{num}",
            num_ranks=num,
            machine=two,
            status="wont_fit",
            reason=f"process.num_gpus: got {num}, which is more than the 2 of this machine",
            plan={"step_s": 2.2 / num} if system == "megatrain" else {},
        )
        for system in ("megatrain", "zero3")
        for num in (4, 8)
    ]
    ((ranks, found),) = report.sections(framed(rows))
    table = tables.of(ranks, found)
    assert list(table["ranks"]) == ["1", "1", "2", "2", "4", "4", "8", "8"]
    assert list(table["efficiency"]) == ["100%", "100%", "91%", "91%", *["—"] * 4]
    figure = of_study.draw(ranks, found)
    hollow = [one for one in figure.axes[0].lines if one.get_markerfacecolor() == "white"]
    (drawn,) = (one for one in hollow if len(one.get_xdata()) == 2)
    assert list(drawn.get_xdata()) == [4, 8]
    assert list(drawn.get_ydata()) == pytest.approx([32 * 1024 * 4 / 2.2, 32 * 1024 * 8 / 2.2])


def test_float8_is_held_against_the_same_system_run_the_same_way() -> None:
    """And a system is not said to be in float8 twice."""
    told = {study.name: (study, mine) for study, mine in studies.shown(record.lines())}
    study, mine = told["float8"]
    table = tables.of(study, studies.leading(study, mine)).set_index(
        ["products of the layers", "system"]
    )
    speeds_of = table["tokens/s"].str.replace(",", "").astype(int)
    for system in ("in memory", "in memory, compiled", "MegaTrain fast"):
        times = speeds_of["float8", system] / speeds_of["bfloat16", system]
        assert table.loc[("float8", system), "vs bfloat16"].startswith(f"{times:.2f}x")
        assert table.loc[("bfloat16", system), "vs bfloat16"] == tables.NONE


def test_what_lies_on_disk_is_told_where_some_does_with_the_speed_that_was_planned() -> None:
    told = {study.name: (study, mine) for study, mine in studies.shown(record.lines())}
    study, mine = told["infinity"]
    lead = tables.of(study, studies.leading(study, mine))
    ours, theirs = (line for _, line in lead.iterrows())
    assert (ours["disk GB"], theirs["disk GB"]) == ("31", "49")
    assert theirs["drive GB/s"] == tables.NONE
    predicted, reached = (
        float(ours[name].replace(",", "")) for name in ("predicted tokens/s", "tokens/s")
    )
    assert predicted == pytest.approx(reached, rel=0.15)
    study, mine = told["vs_zero3_14b"]
    assert "disk GB" not in tables.of(study, mine)


def test_one_run_of_an_experiment_can_be_another_study_s() -> None:
    found = framed([row("megatrain", [1.0], experiment="tier")])
    assert list(studies.assigned(found)["study"]) == ["tier"]
    (run,) = (one.partition("@")[2] for one in studies.listed()["larger"].experiments if "@" in one)
    assert list(studies.assigned(found.assign(run=run))["study"]) == ["larger"]
