"""What kind of study rows are, what was varied in them, and their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from analysis import compare, latex, load, studies, tables
from analysis.compare import CPU_NOTE
from analysis.studies import study_of
from sweeps.result import Row
from tests.unit.study_rows import (
    batch_rows,
    by_label,
    capped_rows,
    config,
    deep_rows,
    factor_rows,
    grid_rows,
    ladder_rows,
    precision_rows,
    scaled,
    size_rows,
    study,
    windows,
)
from tests.unit.test_analysis_load import CPU, cpu_rows, curve, h200_rows, row


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
    rows[0].config["system"]["huge_pages"] = False  # as newer rows say
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
    failed = row("megatrain", status="oom_host", reason="killed", plan={"step_s": 4.096})
    assert study([failed]).cells[0].drawn is None, "it was run, and that is what it came to"


def test_notes_say_in_short_why_there_is_no_room() -> None:
    refusal = "model: got 7b, which needs 198,006,029,312 bytes of host memory, allowed 137,438,953,472; choose a smaller model"
    full = "CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 139.80 GiB of which"
    rows = size_rows()
    rows[2] = dataclasses.replace(rows[2], reason=refusal)
    rows[5] = dataclasses.replace(rows[5], status="oom_device", reason=full)
    assert study(rows).notes[:2] == [
        "MegaTrain fast at 8.00B parameters: does not fit: needs 198.0 GB of host memory, allowed 137.4 GB",
        "MegaTrain stream at 8.00B parameters: OOM (device): CUDA out of memory. Tried to allocate 1.02 GiB.",
    ]


def test_a_prediction_is_of_the_windows_as_they_are_measured() -> None:
    """Windows end with a drain; older rows predict the steady step alone."""
    guesses = [one.predicted.value for rows in (batch_rows(), grid_rows()) for one in study(rows).cells if one.predicted]
    assert guesses == [pytest.approx(32 * 1024 / 8.192), pytest.approx(32 * 1024 / 4.096)]


def test_a_host_peak_that_was_missed_says_so() -> None:
    rows = batch_rows(plan={"host": {"moments": 100 * 10**9}}, peak_host_bytes=90 * 10**9)
    assert not [note for note in study(rows).notes if "host memory" in note]
    rows[0] = dataclasses.replace(rows[0], peak_host_bytes=31_700_000_000)
    told = "31.7 GB of host memory seen of 100.0 GB planned: sampled too early"
    assert f"MegaTrain stream at batch 2: {told}" in study(rows).notes
    assert f"MegaTrain stream: {told}" in compare.notes(compare.compare(load.from_rows(rows[:1])))


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


def test_the_sentence_is_of_systems_that_ran_on_one_machine() -> None:
    def sentence(boot_of: Callable[[Row], str]) -> str:
        rows = [dataclasses.replace(one, machine={**one.machine, "boot": boot_of(one)}) for one in batch_rows()]
        return studies.sentence(study(rows))

    fast = sentence(lambda one: "b" if (one.preset, one.batch_size) == ("fast", 8) else "a")
    assert fast.startswith("At batch 2 MegaTrain fast is the fastest: 2.00x")
    assert sentence(lambda one: str(one.preset)).startswith("At batch 8 "), "there is no other"


def test_systems_that_share_no_place_are_one_series() -> None:
    rows = [scaled(1, 1024 << n, 1.0 * 4**n, preset=preset) for n, preset in enumerate(("stream", "stream", "long", "long"))]
    lines = by_label(rows, 2)
    assert list(lines) == [
        ("system", "tokens a sequence"),
        ("MegaTrain stream", "1,024"),
        ("MegaTrain stream", "2,048"),
        ("MegaTrain long", "4,096"),
        ("MegaTrain long", "8,192"),
    ]
    assert [line[1] for line in lines.values()] == ["change from the fastest", "—", "−50.0%", "−75.0%", "−87.5%"]
    told = "MegaTrain stream at 1,024 tokens a sequence is the fastest (1,024 tokens/s); MegaTrain long at 8,192 tokens a sequence"
    assert studies.sentence(study(rows)).startswith(f"{told} the slowest, −87.5%")
    settings = [config(checkpoint_interval=4 if one.seq_len == 8192 else 1) for one in rows]
    configs = [one | {"shape": {"seq_len": each.seq_len}} for one, each in zip(settings, rows, strict=True)]
    apart = [dataclasses.replace(one, config=composed) for one, composed in zip(rows, configs, strict=True)]
    assert study(apart).notes == ["MegaTrain long at 8,192 tokens a sequence: checkpoint interval 4, not 1"]


def test_a_capped_device_hides_no_system_and_is_no_comparison() -> None:
    rows = capped_rows(16 * 10**9, 24 * 10**9, 48 * 10**9)
    lines = by_label(rows, 2)
    assert len(lines) == 10
    assert lines["ZeRO-3", "16 GB"][0] == "OOM (device)"
    assert lines["MegaTrain fast", "24 GB"][1] == "4.00x"
    assert studies.unablated(load.from_rows(rows)).empty
    assert studies.unablated(load.from_rows([one for one in rows if "16000000000" in str(one.config)])).empty, "of one size too"
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
    tex = latex.as_latex(tables.study_sheet(study(grid_rows())))
    assert "\\begin{tabular}{@{}llrrrrl@{}}\n\\toprule\ndepth & streams & tokens/s" in tex
    assert "\\begin{tabular}[b]{@{}r@{}}change from \\\\ the fastest\\end{tabular}" in tex
    assert "\\textbf{2} & \\textbf{2} & \\textbf{8,192}" in tex
    assert "$-$33.3\\%" in tex
    assert tex.index("\\bottomrule") < tex.index("\\par\\smallskip\\noindent Predicted speeds")
    assert not set("−—–†") & set(tex)


def test_studies_of_several_machines_stay_apart() -> None:
    other = [row("megatrain", [1.0], experiment="ladder", preset="0_paper", machine={"gpu": "NVIDIA A100"})]
    frame = load.from_rows([*ladder_rows(), *other])
    assert [(one.machine, len(one.cells)) for one in studies.studies(frame)] == [
        ("NVIDIA H200, 16 cores, 134 GB host", 4),
        ("NVIDIA A100", 1),
    ]
    assert isinstance(frame, pd.DataFrame)
