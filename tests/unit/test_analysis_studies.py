"""What kind of study rows are, what was varied in them, and what a setting is worth; tables of studies. Fixture studies."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import effects, load, machines, report, studies, tables
from analysis.compare import CPU_NOTE
from analysis.studies import Study, study_of
from sweeps.result import Row
from tests.unit.test_analysis_load import CPU, H200, cpu_rows, curve, h200_rows, row, save

RUNGS = ("0_paper", "1_own_slabs", "2_overlap", "6_fast")


def config(recipe: dict[str, Any] | None = None, **system: Any) -> dict[str, Any]:
    composed = {"name": "megatrain", "dtype": "bfloat16", **system}
    machine = {"device": "cuda", "device_bytes": None}
    return {"system": composed, "recipe": recipe or {"clip_norm": 1.0}, "measure": {"windows": 3}, "machine": machine}


def windows(step_s: float) -> list[float]:
    return [step_s, step_s * 1.004, step_s * 0.996]


def grid_rows() -> list[Row]:
    """Depth 1 to 3, streams 1 to 3: depth 1 costs half as much again; one OOM, one prediction, one with other numerics."""
    rows = []
    for depth, streams in itertools.product((3, 1, 2), (1, 2, 3)):
        common: dict[str, Any] = {"experiment": "double_buffering", "cell": f"{depth}{streams}", "preset": "stream"}
        common |= {"config": config(depth=depth, streams=streams), "agrees": True}
        step_s = (6.0 if depth == 1 else 4.0) * (1.2 if streams == 1 else 1.0)
        if (depth, streams) == (3, 1):
            rows.append(row("megatrain", status="oom_device", reason="141 GB", **common))
        elif (depth, streams) == (3, 2):
            rows.append(row("megatrain", status="wont_fit", plan={"step_s": 4.096}, **common))
        elif (depth, streams) == (2, 1):
            rows.append(row("megatrain", windows(0.1), **(common | {"agrees": False, "max_loss_difference": 0.1})))
        else:
            rows.append(row("megatrain", windows(step_s), **common))
    return rows


def ladder_rows() -> list[Row]:
    steps = zip(RUNGS, (6.0, 5.0, 4.0, 2.0), strict=True)
    common: dict[str, Any] = {"experiment": "ladder", "config": config(), "agrees": True}
    return [row("megatrain", windows(step_s), cell=rung, preset=rung, **common) for rung, step_s in reversed(list(steps))]


def factor_rows() -> list[Row]:
    """Overlap on and off, with clipping and without."""
    settings = itertools.product((True, False), (1.0, 0))
    return [
        row(
            "megatrain",
            windows(2.0 + number),
            experiment="optimizer_overlap",
            cell=str(number),
            config=config(optimizer_overlap=overlap, recipe={"clip_norm": clip}),
        )
        for number, (overlap, clip) in enumerate(settings)
    ]


def size_rows() -> list[Row]:
    """Three sizes of two systems: the largest is predicted of one, does not fit for the other."""
    rows = []
    for system, preset in (("megatrain", "fast"), ("megatrain", "stream"), ("zero3", None)):
        for billions in (1, 2, 8):
            name, slow = f"{system}{preset}", {"fast": 1.0, "stream": 1.5}.get(str(preset), 3.0)
            common: dict[str, Any] = {"experiment": "model_size", "cell": f"{name}{billions}", "preset": preset}
            common |= {"model": f"{billions}b", "num_params": billions * 10**9}
            if billions < 8:
                rows.append(row(system, windows(slow * billions), **common))
            elif system == "zero3":
                rows.append(row(system, status="wont_fit", reason="host", **common))
            else:
                rows.append(row(system, status="wont_fit", plan={"step_s": 10.0 * slow}, **common))
    return rows


def capped_rows(*caps: int | None) -> list[Row]:
    """Stream, fast and ZeRO-3 under caps of the device: ZeRO-3 has no room in the least."""
    rows = []
    for (system, preset), (number, cap) in itertools.product(
        (("megatrain", "stream"), ("megatrain", "fast"), ("zero3", None)), enumerate(caps)
    ):
        machine = {"machine": {"device": "cuda", "device_bytes": cap}}
        common: dict[str, Any] = {"experiment": "device_memory", "cell": f"{system}{preset}{cap}", "preset": preset}
        common |= {"config": config(name=system) | machine}
        oom = system == "zero3" and number == 0
        step_s = windows({"stream": 4.0, "fast": 2.0}.get(str(preset), 8.0))
        rows.append(row(system, status="oom_device", reason="full", **common) if oom else row(system, step_s, **common))
    return rows


def deep_rows() -> list[Row]:
    """Two systems at three depths under one model name, ZeRO-3 out of memory at the last, before anything was counted."""
    rows = []
    for system, layers in itertools.product(("megatrain", "zero3"), (28, 42, 56)):
        model = {"name": "qwen2.5-deep", "config": {"num_hidden_layers": layers, "hidden_size": 3584}}
        common: dict[str, Any] = {"experiment": "depth", "model": "qwen2.5-deep", "cell": f"{system}{layers}"}
        common |= {"preset": "stream" if system == "megatrain" else None, "num_params": layers * 10**8}
        common |= {"config": config(name=system) | {"model": model}}
        if system == "zero3" and layers == 56:
            rows.append(row(system, status="oom_host", reason="killed", **(common | {"num_params": None})))
        else:
            rows.append(row(system, windows(layers / (7 if system == "megatrain" else 3.5)), **common))
    return rows


def batch_rows(**fields: Any) -> list[Row]:
    """Stream and fast at three batches; streaming at the largest is only predicted."""
    rows = []
    for preset, batch in itertools.product(("stream", "fast"), (2, 8, 32)):
        common: dict[str, Any] = {"experiment": "batch_size", "batch_size": batch, "cell": f"{preset}{batch}", "preset": preset}
        step_s = (1.0 + batch / 8) * (2 if preset == "stream" else 1)
        if (preset, batch) == ("stream", 32):
            rows.append(row("megatrain", status="wont_fit", plan={"step_s": 8.0, "window_step_s": 8.192}, **common))
        else:
            rows.append(row("megatrain", windows(step_s), tokens_per_s=batch * 1024 / step_s, **common))
    return rows


def precision_rows() -> list[Row]:
    """Three masters: the second as the first but for rounding, the third loses updates and has more steps."""
    found = []
    for master, offset, num_steps in (("split", 0.0, 9), ("fp32", 1e-4, 9), ("bf16", 0.9, 12)):
        told: dict[str, Any] = {"caveat": "small updates are lost"} if master == "bf16" else {}
        told |= {"experiment": "precision", "cell": master, "preset": "stream", "losses": curve(num_steps, offset)}
        found.append(row("megatrain", windows(3.0 if told.get("caveat") else 4.0), config=config(master=master), **told))
    return found


def study(rows: list[Row]) -> Study:
    return study_of(load.from_rows(rows))


@pytest.mark.parametrize(
    ("rows", "kind", "factors"),
    [
        (grid_rows(), "grid", {"system.depth": [1, 2, 3], "system.streams": [1, 2, 3]}),
        (ladder_rows(), "ladder", {}),
        (factor_rows(), "factor", {"system.optimizer_overlap": [True, False], "recipe.clip_norm": [0, 1.0]}),
        (size_rows(), "scale", {}),
        (capped_rows(16 * 10**9, 24 * 10**9), "scale", {}),
        (
            capped_rows(16 * 10**9, None),
            "factor",
            {"system": ["MegaTrain stream", "MegaTrain fast", "ZeRO-3"], "machine.device_bytes": [16 * 10**9, None]},
        ),
        (deep_rows(), "scale", {}),
        (batch_rows(), "scale", {}),
        (h200_rows(), "comparison", {}),
        (h200_rows()[:3], "comparison", {}),
        ([row("megatrain", [1.0], preset=name, cell=name) for name in ("stream", "fast")], "comparison", {}),
    ],
    ids=["grid", "ladder", "factor", "scale", "caps", "a cap and none", "depths", "batches", "systems", "one of each", "presets"],
)
def test_a_study_is_known_by_what_differs(rows: list[Row], kind: str, factors: dict[str, list[Any]]) -> None:
    found = study(rows)
    assert (found.kind, found.factors) == (kind, factors)
    assert len(found.cells) == len(rows)


def test_what_cannot_change_a_measurement_is_no_factor_and_references_stand_beside() -> None:
    rows = grid_rows()
    for number, one in enumerate(rows):
        one.config["measure"] = {"windows": number}
        one.config["output_dir"] = str(number)
    found = study([row("in_memory", [1.0], experiment="double_buffering"), *rows])
    assert found.kind == "grid"
    assert list(found.factors) == ["system.depth", "system.streams"]
    assert {one.standing.system for one in found.cells} == {"megatrain"}
    several = study([*rows, row("fsdp2", [1.0], experiment="double_buffering")])
    assert several.kind == "comparison", "an axis that joins a comparison of systems hides none of them"


def test_a_capped_device_is_a_factor() -> None:
    caps = (16 * 10**9, None)
    rows = [
        row(
            "megatrain",
            [1.0 + n],
            experiment="device_memory",
            cell=str(n),
            config=config() | {"machine": {"device": "cuda", "device_bytes": cap}},
        )
        for n, cap in enumerate(caps)
    ]
    assert [one.label for one in study(rows).cells] == ["device bytes 16 GB", "device bytes whole device"]


def test_a_prediction_is_never_a_measurement() -> None:
    found = {(one.factors["system.depth"], one.factors["system.streams"]): one for one in study(grid_rows()).cells}
    guess = found[3, 2]
    assert guess.predicted is not None
    assert guess.drawn is not None
    assert guess.drawn.value == pytest.approx(32 * 1024 / 4.096)
    assert not guess.drawn.has_interval
    assert not guess.standing.measured
    assert found[3, 1].drawn is None
    assert found[3, 3].predicted is None
    measured = row("megatrain", [1.0], plan={"step_s": 0.5})
    assert study([measured]).cells[0].predicted is None


def test_a_prediction_is_of_the_windows_as_they_are_measured() -> None:
    """Windows end with a drain; older rows predict the steady step alone."""
    guesses = [one.predicted.value for rows in (batch_rows(), grid_rows()) for one in study(rows).cells if one.predicted]
    assert guesses == [pytest.approx(32 * 1024 / 8.192), pytest.approx(32 * 1024 / 4.096)]


def test_repeats_are_one_cell_of_a_study() -> None:
    rows = [one for one in factor_rows() for _ in range(2)]
    again = [dataclasses.replace(one, cell=f"{one.cell} {number}") for number, one in enumerate(rows)]
    cells = study(again).cells
    assert (len(cells), {one.standing.num_repeats for one in cells}) == (4, {2})
    apart = load.from_rows(again, sources=["a.jsonl", "b.jsonl"] * 4)
    assert len(study_of(apart).cells) == 8, "two files are two runs"


def test_sizes_under_one_name_are_never_held_against_each_other() -> None:
    frame = load.from_rows(deep_rows())
    assert [len(part) for part in load.groups(frame)] == [2, 2, 2], "ZeRO-3 without a count is of the size of its model"
    assert set(frame["label"]) == {"MegaTrain stream", "ZeRO-3"}
    lines = by_label(deep_rows(), 3)
    assert list(lines) == [
        ("system", "parameters", "layers"),
        *[
            (name, f"{size}B", layers)
            for size, layers in (("2.80", "28"), ("4.20", "42"), ("5.60", "56"))
            for name in ("MegaTrain stream", "ZeRO-3")
        ],
    ]
    assert [line[1] for line in lines.values()] == ["ratio to ZeRO-3", "2.00x", "1.00x", "2.00x", "1.00x", "—", "—"]
    assert lines["ZeRO-3", "5.60B", "56"][0] == "OOM (host)"
    assert studies.sentence(study(deep_rows())).startswith("At 4.20B parameters MegaTrain stream is the fastest: 2.00x (")
    one = [each for each in deep_rows() if each.system == "megatrain"]
    assert by_label(one, 2)["parameters", "layers"] == ["tokens/s", "TFLOPS 6P"], "no change between sizes"
    alone = "MegaTrain stream: 8,192 tokens/s at 2.80B parameters, 4,096 tokens/s at 5.60B parameters."
    assert studies.sentence(study(one)) == alone
    assert not study(one).bests


def test_every_row_of_a_batch_study_says_which_it_is() -> None:
    sheet, lines = tables.study_sheet(study(batch_rows())), by_label(batch_rows(), 2)
    assert list(lines)[:3] == [("system", "batch"), ("MegaTrain stream", "2"), ("MegaTrain fast", "2")]
    assert len(lines) == 7
    assert lines["MegaTrain stream", "32"][0] == "4,000 predicted"
    assert lines["MegaTrain fast", "8"][1] == "2.00x"
    assert sheet.best == {2, 4}, "the faster where both were measured"
    assert sheet.notes == ["MegaTrain stream at batch 32: does not fit", "Predicted speeds are the cost model's, not measured."]
    assert "At batch 8 MegaTrain fast is the fastest: 2.00x" in studies.sentence(study(batch_rows()))
    fast = [one for one in batch_rows() if one.preset == "fast"]
    assert list(by_label(fast, 1)) == [("batch",), ("2",), ("8",), ("32",)]
    told = "MegaTrain fast at batch 32 is the fastest (6,554 tokens/s); MegaTrain fast at batch 2 the slowest, −75.0%"
    assert studies.sentence(study(fast)).startswith(told)


def test_a_capped_device_hides_no_system_and_is_no_comparison() -> None:
    rows = capped_rows(16 * 10**9, 24 * 10**9, 48 * 10**9)
    lines = by_label(rows, 2)
    assert len(lines) == 10
    assert lines["ZeRO-3", "16 GB"][0] == "OOM (device)"
    assert lines["MegaTrain fast", "24 GB"][1] == "4.00x"
    assert studies.unablated(load.from_rows(rows)).empty
    rows = capped_rows(16 * 10**9, None)
    rows[0].config["system"]["depth"] = 3
    assert study(rows).kind == "comparison", "a system of which more is varied"
    assert len(by_label(capped_rows(16 * 10**9, None), 2)) == 7


def test_losses_are_told_where_the_arithmetic_is_varied() -> None:
    lines, found = by_label(precision_rows(), 1), study(precision_rows())
    assert lines["master",][-3:] == ["loss at step 9", "max |Δloss| from split", "agrees"]
    assert [line[-2] for line in lines.values()][1:] == ["—", "8.9e-05", "6.0e-01"]
    assert lines["bf16",][-3] == f"{curve(12, 0.9)[8]:.4f}", "the same step for all"
    assert lines["bf16",][-1] == "differs"
    fastest = max(found.cells, key=lambda one: one.standing.speed.value)
    assert fastest.factors == {"system.master": "bf16"}
    assert found.best is not fastest, "no speed with other numerics is ranked"
    assert "bf16: small updates are lost" in found.notes
    assert studies.sentence(found).endswith(f"Loss at step 9: master bf16 {curve(12, 0.9)[8]:.4f}, master split {curve(9)[8]:.4f}.")
    alike = [dataclasses.replace(one, losses=curve(9)) for one in factor_rows()]
    assert not study(alike).tells_losses
    alike[-1].losses[-1] += 0.1
    assert study(alike).tells_losses
    assert not study(batch_rows()).tells_losses, "other data"


def test_best_and_change_leave_out_other_numerics() -> None:
    found = study(grid_rows())
    assert found.best is not None
    assert (found.best.factors["system.depth"], found.best.standing.agrees) == (2, True)
    odd = next(one for one in found.cells if one.standing.agrees is False)
    assert studies.change(odd, found.best) is None
    slow = next(one for one in found.cells if one.factors == {"system.depth": 1, "system.streams": 3})
    gap = studies.change(slow, found.best)
    assert gap is not None
    assert gap.value == pytest.approx(4 / 6 - 1)
    assert gap.lo is not None
    assert gap.hi is not None
    assert -1 < gap.lo < gap.value < gap.hi < 0


def changes(rows: list[Row], setting: str = "without double buffering") -> list[effects.Change]:
    return effects.setting_changes(load.from_rows(rows), setting)


def test_the_setting_of_an_ablation_is_a_pair_that_differs_in_it_alone() -> None:
    found = changes(grid_rows())
    assert [(one.cell.config["system.depth"], one.base.config["system.depth"]) for one in found] == [(1, 2), (1, 2)]
    assert [one.cell.config[effects.STREAMS] == one.base.config[effects.STREAMS] for one in found] == [True, True]
    assert [one.cell.config[effects.STREAMS] for one in found] == [3, 2], "where overlap is taken away comes first"
    assert found[0].estimate.value == pytest.approx(-1 / 3)
    assert found[0].estimate.has_interval
    unlike = [one for one in grid_rows() if one.config["system"]["depth"] == 1 or one.config["system"]["streams"] == 1]
    assert changes(unlike) == []
    assert changes(grid_rows(), "checkpoint interval 1") == []
    assert changes(grid_rows(), "without the gradient slab pool") == []


def depth_rows(*step_s: float, repeat: int = 1, **fields: Any) -> list[Row]:
    """Depth 1, then depth 2, three streams, as one round of the study measures them."""
    rows = []
    for depth, second in enumerate(step_s, 1):
        composed = config(depth=depth, streams=3) | {"measure": {"windows": 3, "repeat": repeat}}
        common: dict[str, Any] = {"experiment": "double_buffering", "cell": f"{depth} {repeat}", "config": composed}
        rows.append(row("megatrain", windows(second), **(common | fields)))
    return rows


@pytest.mark.parametrize(
    "differs",
    [
        {"machine": H200 | {"matrix_peak_tflops": 694.19}},
        {"machine": H200 | {"boot": "0123abcd"}},
        {"git_commit": "another"},
        {"config": config(depth=1, streams=3) | {"measure": {"windows": 2}}},
        {"config": config(depth=1, streams=3) | {"measure": {"windows": 3, "repeat": 2}}},
    ],
    ids=["matrix peak", "boot", "commit", "windows", "repeat"],
)
def test_no_pair_spans_machines_commits_or_ways_to_measure(differs: dict[str, Any]) -> None:
    shallow, deep = depth_rows(6.0, 4.0, machine=H200 | {"matrix_peak_tflops": 679.04})
    assert len(changes([shallow, deep])) == 1
    assert changes([dataclasses.replace(shallow, **differs), deep]) == []


def test_no_pair_spans_files_and_the_one_with_most_windows_speaks(tmp_path: Path) -> None:
    shallow, deep = depth_rows(6.0, 4.0)
    apart = load.load(save(tmp_path / "a.jsonl", [shallow]), save(tmp_path / "b.jsonl", [deep]))
    assert effects.setting_changes(apart, "without double buffering") == []
    brief = [dataclasses.replace(one, step_s=one.step_s[:2], started_at="2026-12-01T00:00:00Z") for one in depth_rows(5.0, 4.0)]
    frame = load.load(save(tmp_path / "a.jsonl", [shallow, deep]), save(tmp_path / "b.jsonl", brief))
    found = effects.setting_changes(frame, "without double buffering")
    assert [(one.file, one.num_windows) for one in found] == [("a.jsonl", 3), ("b.jsonl", 2)]
    assert found[0].estimate.value == pytest.approx(4 / 6 - 1)


def test_repeats_pair_round_by_round() -> None:
    """Whatever machine a round met, it met for both; a round that lacks one of the two does not count."""
    rounds = [(6.0, 4.0), (9.0, 6.1), (3.0, 2.02)]
    rows = []
    for number, (shallow, deep) in enumerate(rounds, 1):
        rows += depth_rows(shallow, deep, repeat=number, machine=H200 | {"matrix_peak_tflops": 600.0 + number})
    (found,) = changes([*rows, *depth_rows(1.0, repeat=4)])
    assert (found.num_rounds, found.num_windows) == (3, 9)
    assert found.estimate.value == pytest.approx((4.0 + 6.1 + 2.02) / 18 - 1)
    assert found.estimate.lo is not None
    assert found.estimate.hi is not None
    assert found.estimate.hi - found.estimate.lo < 0.05, "rounds differ by half, pairs do not"
    assert not changes(rows[:4])[0].estimate.has_interval


def machines_of(*found: dict[str, Any]) -> list[str]:
    rows = [row("megatrain", [1.0], cell=str(number), machine=H200 | machine) for number, machine in enumerate(found)]
    refused = row("zero3", status="wont_fit", machine=H200)
    return machines.notes(load.from_rows([*rows, refused]))


def test_rows_of_several_machines_of_a_kind_say_so() -> None:
    slow, fast = {"matrix_peak_tflops": 680.0}, {"matrix_peak_tflops": 700.4}
    assert machines_of({}) == machines_of(slow, slow) == []
    told = "Rows of 2 machines of this kind; differences between them, up to 3.0% in their matrix peak, are in these numbers."
    assert machines_of(slow, fast, slow) == [told]
    assert machines_of(slow | {"boot": "01234567"}, fast | {"boot": "01234567"}) == [], "one machine, its peak measured twice"
    assert machines_of({"boot": "01234567"}, {"boot": "89abcdef"}) == [
        "Rows of 2 machines of this kind; differences between them are in these numbers."
    ]
    rows = ladder_rows()
    rows[0] = dataclasses.replace(rows[0], machine=H200 | fast)
    rows[1:] = [dataclasses.replace(one, machine=H200 | slow) for one in rows[1:]]
    (part,) = report.sections(load.from_rows(rows))
    assert told in part.sheet.notes
    assert told in " ".join(part.figure().get_suptitle().split())
    pair = [row("megatrain", windows(2.0), machine=H200 | slow), row("zero3", windows(4.0), machine=H200 | fast)]
    (part,) = report.sections(load.from_rows(pair))
    assert told in part.sheet.notes
    assert told in " ".join(part.figure().get_suptitle().split())


def test_sentences() -> None:
    assert studies.sentence(study(ladder_rows())).startswith(
        "Rung fast is the fastest (16,384 tokens/s); Rung paper the slowest, −66.7%"
    )
    assert "optimizer overlap on, clip norm 1.0 is the fastest" in studies.sentence(study(factor_rows()))
    nothing = [row("megatrain", status="oom_device", experiment="x", cell=str(n), config=config(depth=n)) for n in (1, 2)]
    assert studies.sentence(study(nothing)) == "x: no cell was measured with agreeing losses."


def test_only_systems_as_they_are_meant_to_be_run_are_compared_with_the_paper() -> None:
    frame = load.from_rows([*h200_rows(), *grid_rows(), *ladder_rows(), *size_rows(), *cpu_rows()])
    assert set(studies.unablated(frame)["experiment"]) == {"quickstart", "model_size"}
    assert studies.unablated(load.from_rows(grid_rows())).empty


def by_label(rows: list[Row], columns: int) -> dict[tuple[str, ...], list[str]]:
    sheet = tables.study_sheet(study(rows))
    return {tuple(line[:columns]): line[columns:] for line in sheet.cells}


def test_table_of_a_grid() -> None:
    sheet, lines = tables.study_sheet(study(grid_rows())), by_label(grid_rows(), 2)
    title = ["tokens/s", "change from the fastest", "95% interval", "TFLOPS 6P", "agrees"]  # no row states its memory
    assert lines["depth", "streams"] == title
    assert lines["1", "3"][:2] == ["5,461", "−33.3%"]
    assert lines["1", "3"][2].startswith("−3")
    assert lines["3", "2"][:2] == ["8,000 predicted", "—"]
    assert lines["3", "1"][0] == "OOM (device)"
    assert lines["2", "1"][-1] == "differs"
    assert sheet.notes == [
        "2, 1: numerics differ from the reference; not compared",
        "3, 1: OOM (device): 141 GB",
        "3, 2: does not fit",
        "Predicted speeds are the cost model's, not measured.",
    ]
    assert "| **2** | **2** | **8,192** |" in tables.as_markdown(sheet)


def test_a_study_on_a_cpu_says_what_it_is_worth() -> None:
    rows = [row("megatrain", windows(n), experiment="x", cell=str(n), config=config(depth=n), machine=CPU) for n in (1.0, 2.0)]
    assert tables.study_sheet(study(rows)).notes == [CPU_NOTE]


def test_table_of_a_ladder_counts_from_the_first_rung() -> None:
    lines = by_label(ladder_rows(), 1)
    assert list(lines) == [("rung",), ("paper",), ("own slabs",), ("overlap",), ("fast",)]
    assert [line[1] for line in lines.values()] == ["change from the first", "—", "+20.0%", "+50.0%", "+200.0%"]


def test_latex_has_rules_and_caveats() -> None:
    tex = tables.as_latex(tables.study_sheet(study(grid_rows())))
    assert tex.startswith("\\begin{tabular}{llrrrrl}\n\\toprule\ndepth & streams & tokens/s")
    assert "\\textbf{2} & \\textbf{2} & \\textbf{8,192}" in tex
    assert "$-$33.3\\%" in tex
    assert tex.index("\\bottomrule") < tex.index("\\multicolumn{7}{@{}p{\\linewidth}@{}}{\\footnotesize Predicted speeds")
    assert not set("−—–†") & set(tex)


def test_studies_of_several_machines_stay_apart() -> None:
    other = [row("megatrain", [1.0], experiment="ladder", preset="0_paper", machine={"gpu": "NVIDIA A100"})]
    frame = load.from_rows([*ladder_rows(), *other])
    assert [(one.machine, len(one.cells)) for one in studies.studies(frame)] == [
        ("NVIDIA H200, 16 cores, 134 GB host", 4),
        ("NVIDIA A100", 1),
    ]
    assert isinstance(frame, pd.DataFrame)
