"""The paper's numbers and what stands beside them: claims as the file has them, matches, table, sentence and figure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from analysis import effects, load, paper, style
from analysis.figures import paper as drawing
from analysis.make import RESULTS
from analysis.paper import Claim
from sweeps.result import Row
from tests.unit.study_rows import config, grid_rows, windows
from tests.unit.test_analysis_figures import words
from tests.unit.test_analysis_load import H200, row

CLAIMS = paper.claims()
SHAPE = {"num_hidden_layers": 28, "hidden_size": 3584}
TRUSTS = {"P", "S2", "S1", "R"}


def one_claim(**fields: Any) -> Claim:
    (found,) = [one for one in CLAIMS if all(getattr(one, name) == value for name, value in fields.items())]
    return found


def measured(system: str, step_s: float, name: str = "qwen2.5-7b", length: int = 1024, **fields: Any) -> Row:
    params = {"qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664}[name]
    shape: dict[str, Any] = {"model": name, "num_params": params, "seq_len": length, "batch_size": 32768 // length}
    cell = f"{system}{fields.get('preset')}{name}{length}"
    return row(system, windows(step_s), config={"model": {"config": SHAPE}}, cell=cell, **shape, **fields)


def test_every_claim_has_a_source_a_trust_and_known_words() -> None:
    assert len(CLAIMS) > 90
    for one in CLAIMS:
        assert one.trust in TRUSTS
        assert "2602.04816" not in one.source, "withdrawn: its numbers are never printed"
        assert one.source.startswith(("arXiv ", "the public repository"))
        assert one.value is not None or one.oom or one.flag
        assert one.metric in ("tflops", "tokens_per_s", "step_s", "device_gb", "percent", "ratio", "change")


def printed(name: str, *systems: str, **shape: Any) -> list[str]:
    rows = [row(system, [1.0, 1.1], model=name, **shape) for system in systems]
    return paper.printed(load.from_rows(rows))


def test_a_report_says_what_the_paper_prints_for_its_size() -> None:
    both = ("megatrain", "zero3")
    assert printed("qwen2.5-14b", *both) == [
        "The paper prints 1.84x (its own words) of ZeRO-3 at 14B: 264† TFLOPS (by notes that agree) against 143 TFLOPS (by notes "
        "that agree), on one GH200, 96 × 1,024 tokens, formula not stated; another machine and batch than here. † 266.3 in Table 4."
    ]
    (seven,) = printed("qwen2.5-7b", *both)
    assert "1.23x, as we divide, of ZeRO-3 at 7B: 284.7 TFLOPS (by notes that agree) against 232 TFLOPS (by one note)" in seven
    (three,) = printed("qwen2.5-3b", "published_megatrain", "zero3")
    assert "1.39x, as we divide, of ZeRO-3 at 3B: 33.18 TFLOPS (by notes that agree)" in three
    assert "on one RTX 3090 24 GB, 7 × 1,024 tokens, formula 6P" in three
    assert not printed("qwen2.5-14b", "megatrain", "fsdp2")
    assert not printed("qwen2.5-14b", *both, seq_len=4096)
    assert not printed("tiny", *both)


def test_numbers_of_the_paper_are_as_it_has_them() -> None:
    assert one_claim(metric="ratio").value == 1.84
    assert one_claim(setting="without double buffering", metric="change").value == -0.313
    full, without = (one_claim(setting=name, metric="tflops").value for name in ("full", "without double buffering"))
    assert full is not None
    assert without is not None
    assert without / full - 1 == pytest.approx(-0.313, abs=5e-4)
    for one in CLAIMS:
        if one.study == "context" and one.formula == paper.ATTENTION and one.metric == "tflops":
            step = one_claim(study="context", seq_len=one.seq_len, metric="step_s").value
            assert step is not None
            assert one.seq_len is not None
            per_token = 6 * 7_615_616_512 + 12 * 28 * 3584 * one.seq_len
            assert one.value == pytest.approx(per_token * one.seq_len / step / 1e12, rel=2e-3)
    doubtful = [one.seq_len for one in CLAIMS if one.study == "context" and one.metric == "tflops" and one.flag]
    assert doubtful == [8192, 32768, 131072, 524288]
    assert "625 TFLOPS" in one_claim(study="context", seq_len=131072, metric="tflops").flag


def test_a_row_that_is_no_claim_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "paper.csv"
    bad.write_text(paper.CSV.read_text().splitlines()[0] + "\na,headline,GH200,7B,zero3,,x,,tflops,1,6P,P,\n")
    with pytest.raises(ValueError, match=r"paper.csv: line 2 is not a claim .*'x'"):
        paper.claims(bad)


def test_a_measurement_stands_beside_a_claim_only_if_size_length_and_system_are_the_same() -> None:
    rows = [
        measured("megatrain", 4.0, preset="stream"),
        measured("megatrain", 2.5, preset="fast"),
        measured("megatrain", 2.5, preset="fast", length=8192),
        measured("megatrain", 9.0, "qwen2.5-14b", preset="fast"),
        row("zero3", status="wont_fit", model="qwen2.5-7b", config={}, cell="z"),
        *grid_rows(),
    ]
    cells = paper.cells_in(load.from_rows(rows))
    ours = one_claim(study="headline", model="7B", system="megatrain")
    assert [(one.preset, one.seq_len) for one in paper.cells_for(ours, cells)] == [("fast", 1024), ("stream", 1024)]
    told = paper.measured_text(ours, cells)
    assert re.fullmatch(r"7\.6B, H200 16 cores, batch 32: MegaTrain fast 599 \(\d+–\d+\), MegaTrain stream 374 \(\d+–\d+\)", told)
    refused = paper.measured_text(one_claim(study="headline", model="7B", system="zero3"), cells)
    assert refused == "3.4B, H200 16 cores, batch 32: ZeRO-3 does not fit"
    large = H200 | {"num_gpus": 4, "num_cores": 64}
    both = paper.cells_in(load.from_rows([rows[1], measured("megatrain", 2.0, preset="fast", machine=large)]))
    assert [part.partition(":")[0] for part in paper.measured_text(ours, both).split("; ")] == [
        "7.6B, H200 (one of 4) 64 cores, batch 32",
        "7.6B, H200 16 cores, batch 32",
    ]
    assert paper.measured_text(one_claim(study="headline", model="32B", system="megatrain"), cells) == ""
    assert [one.preset for one in paper.cells_for(one_claim(study="depth", setting="28 layers", system="megatrain"), cells)]
    assert paper.cells_for(one_claim(study="depth", setting="42 layers"), cells) == []
    assert paper.cells_for(one_claim(study="other_gpus", model="7B", system="zero3", hardware="A100 PCIe 80 GB"), cells) == []
    repeats = [
        measured("megatrain", step_s, preset="fast", started_at=f"2026-12-0{day}T00:00:00Z") for day, step_s in ((1, 2), (2, 4))
    ]
    assert "MegaTrain fast 499" in paper.measured_text(ours, paper.cells_in(load.from_rows(repeats)))  # not 749, the better one
    for other in ({"experiment": "another"}, {"machine": large}):
        assert len(paper.cells_in(load.from_rows([repeats[0], replace(repeats[1], **other)]))) == 2
    a100 = [measured("zero3", 9.0, machine=H200 | {"gpu": "NVIDIA A100-PCIE-80GB"})]
    there = paper.cells_in(load.from_rows(a100))
    assert paper.cells_for(one_claim(study="other_gpus", model="7B", system="zero3", hardware="A100 PCIe 80 GB"), there)


def test_attention_is_counted_where_the_claim_counts_it() -> None:
    (cell,) = paper.cells_in(load.from_rows([measured("megatrain", 10.0, length=32768)]))
    plain = 6 * 7_615_616_512 * 3276.8 / 1e12
    assert paper.tflops(cell, "6P") == pytest.approx(plain, rel=1e-4)
    assert paper.tflops(cell, paper.ATTENTION) == pytest.approx(plain + 12 * 28 * 3584 * 32768 * 3276.8 / 1e12, rel=1e-4)


def test_the_ratio_comes_from_one_run() -> None:
    rows = [measured("zero3", 10.0, "qwen2.5-14b"), measured("megatrain", 5.0, "qwen2.5-14b", preset="fast")]
    claim = one_claim(metric="ratio")
    told = paper.ratio_text(claim, load.from_rows(rows))
    assert re.match(r"14\.8B, H200 16 cores, batch 32: MegaTrain fast 2\.00x \(95% interval 1\.9\d to 2\.0\d\)$", told)
    alone = paper.ratio_text(claim, load.from_rows([replace(rows[0], preset="twinflow"), rows[1]]))
    assert alone == f"{told} over ZeRO-3 twinflow"
    theirs = measured("published_megatrain", 20.0, "qwen2.5-14b", agrees=False)
    told = paper.ratio_text(claim, load.from_rows([*(replace(one, agrees=True) for one in rows), theirs]))
    assert re.search(r"MegaTrain \(published\) 0\.50x .*\(numerics differ\)$", told)
    apart = [rows[0], measured("megatrain", 5.0, "qwen2.5-14b", experiment="another")]
    assert paper.ratio_text(claim, load.from_rows(apart)) == ""
    elsewhere = [rows[0], measured("megatrain", 5.0, "qwen2.5-14b", machine=H200 | {"boot": "0123abcd"})]
    assert paper.ratio_text(claim, load.from_rows(elsewhere)) == ""


def test_table_keeps_flags_formulas_and_machines() -> None:
    sheet = paper.table(load.from_rows([measured("megatrain", 4.0), *grid_rows()]))
    lines = {(line[0], line[1], line[2], line[5]): line for line in sheet.cells[1:]}
    doubled = lines["ablation", "MegaTrain", "14B, without double buffering", "change"]
    assert doubled[4] == "−31.3%"
    assert re.fullmatch(r"3\.4B, H200 16 cores, batch 32: −33\.3% \(−3\d\.\d% to −3\d\.\d%\)", doubled[8])
    assert lines["context", "MegaTrain", "7B, T 131072", "TFLOPS"][4] == "305.3†"
    assert lines["context", "MegaTrain", "7B, T 262144", "TFLOPS"][6] == paper.ATTENTION
    assert lines["headline", "ZeRO-3", "32B", "TFLOPS"][4] == "OOM"
    assert sheet.notes[0].startswith("Measured on NVIDIA H200, 16 cores, 134 GB host")
    assert sum(note.startswith("†") for note in sheet.notes) >= 8
    assert "the public repository (919520f)" in {line[-1] for line in sheet.cells}
    assert all(line[-1].count("(") == line[-1].count(")") for line in sheet.cells)
    tex = paper.latex(sheet)
    assert "305.3$^\\dagger$" in tex
    assert not set("†−–—×") & set(tex)


def test_latex_fills_pages_and_repeats_its_title() -> None:
    sheet = paper.table(load.from_rows([measured("megatrain", 4.0)]))
    tex = paper.latex(sheet)
    lines = tex.splitlines()
    assert lines[0] == "% \\usepackage{array,booktabs,longtable}"
    assert (lines[2], lines[-1]) == ("\\begin{longtable}{@{}", "\\end{longtable}}")
    assert "tabular" not in tex
    head = lines.index("\\endhead")
    assert lines[head - 3 : head] == ["\\toprule", " & ".join(sheet.cells[0]) + " \\\\", "\\midrule"]
    assert sum(" & " in line for line in lines[head:]) == len(sheet.cells) - 1
    assert all(line.replace("\\&", "").count("&") == 9 for line in lines[head - 2 :] if " & " in line)
    widths = [float(width) for width in re.findall(r"p\{(0\.\d+)\\linewidth\}", tex[: tex.index("toprule")])]
    spaces_pt = 2 * 2 * (len(widths) - 1)
    assert sum(widths) + spaces_pt / (72 * style.PAGE_IN) <= 1
    unescaped = re.sub(r"\\[{}]", "", tex)
    assert unescaped.count("{") == unescaped.count("}")


def test_the_double_buffering_sentence_comes_from_rows() -> None:
    none = paper.double_buffering(load.from_rows([measured("megatrain", 4.0)]))
    assert none == (
        "Double buffering has not been measured here yet (python -m sweeps.run +ablation=double_buffering makes the rows); "
        "the paper reports −31.3% (14B on one GH200, arXiv 2604.05091 Table 4)."
    )
    told = paper.double_buffering(load.from_rows(grid_rows()))
    assert re.fullmatch(
        r"Without double buffering \(one slot instead of two, 3 streams\) throughput changes by −33\.3% \(95% interval "
        r"−3\d\.\d% to −3\d\.\d%, 3 windows of 1 step each; qwen2\.5-3b, 32 × 1024 tokens, NVIDIA H200, 16 cores, 134 GB host\); "
        r"the paper reports −31\.3% .*",
        told,
    )
    slower = [row("megatrain", windows(step_s), experiment="d", cell=str(d), config=config(depth=d, streams=2)) for d, step_s in
              ((1, 8.0), (2, 4.0))]  # fmt: skip
    assert "changes by −50.0%" in paper.double_buffering(load.from_rows(slower))


def test_the_committed_sentence_is_of_one_machine_and_most_steps() -> None:
    told = paper.double_buffering(load.load(*sorted(RESULTS.glob("*.jsonl"))))
    six = r"changes by −9\.8% \(95% interval −19\.8% to \+1\.4%, 3 windows of 2 steps each, double_buffering_six_cells\.jsonl"
    assert re.search(six, told)
    assert "another pair −6.8% (2 windows of 2 steps each, double_buffering_two_windows.jsonl, 7.6B, H200 16 cores)" in told
    assert "another pair −2.9% (3 windows of 1 step each, double_buffering.jsonl, 7.6B, H200 16 cores)" in told
    checked = [load.load(RESULTS / f"checkpoint_interval{name}.jsonl") for name in ("_first", "")]
    held = [[round(one.estimate.value, 3) for one in effects.setting_changes(rows, "checkpoint interval 1")] for rows in checked]
    assert held == [[], [0.135]], "of two machines nothing is told"


def marked(axes: Axes, label: str) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in np.asarray(one.get_xydata())] for one in axes.lines if one.get_label() == label]


def test_figure_sets_claims_apart_from_measurements() -> None:
    rows = [measured("megatrain", 2.5, preset="fast"), measured("zero3", 9.0, "qwen2.5-14b"), *grid_rows()]
    figure = drawing.figure(load.from_rows(rows))
    headline, ablation, context, depth = figure.axes
    assert figure.get_size_inches()[0] == style.PAGE_IN
    assert [axes.get_ylabel() for axes in (headline, context, depth)] == ["TFLOPS (6P)", "TFLOPS (6P + 12LhT)", "TFLOPS (6P)"]
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "parameters (10⁹)",
        "change of throughput, %",
        "tokens a sequence",
        "layers",
    ]
    said, oom = marked(headline, "the paper's ZeRO-3")
    assert said == [(7.6, 232), (14.8, 143)]
    assert oom[0][0] == 32.8
    assert marked(headline, "ZeRO-3") == [[(14.8, pytest.approx(6 * 14_770_033_664 * 32768 / 9 / 1e12, rel=1e-3))]]
    claimed = next(one for one in headline.lines if one.get_label() == "the paper's MegaTrain")
    assert (claimed.get_linestyle(), to_hex(str(claimed.get_markerfacecolor()))) == (":", "#ffffff")
    assert words(headline).count("†") == 2
    assert words(context).count("†") == 4
    assert len([one for one in headline.lines if one.get_marker() == "x"]) == 4
    bars = {str(box.get_label()): box.patches[0] for box in ablation.containers if hasattr(box, "patches")}
    assert bars["without double buffering, paper"].get_width() == pytest.approx(-31.3)
    assert bars["without double buffering, qwen2.5-3b"].get_width() == pytest.approx(-100 / 3, rel=1e-3)
    assert bars["without double buffering, paper"].get_facecolor()[3] == 0
    assert (words(ablation).count("no counterpart here"), words(ablation).count("no pair from one machine here")) == (1, 1)
    assert "GH200" in figure.get_suptitle()
    assert "NVIDIA H200" in figure.get_suptitle()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[-1] == "OOM in the paper"
    assert {"the paper's MegaTrain", "MegaTrain fast", "the paper's in memory"} <= set(names)


def test_figure_keeps_machines_apart_and_shows_intervals_and_refusals() -> None:
    large = H200 | {"num_gpus": 4, "num_cores": 64}
    rows = [
        measured("megatrain", 2.5, preset="fast"),
        measured("megatrain", 5.0, "qwen2.5-14b", preset="fast", machine=large),
        row("zero3", status="wont_fit", model="qwen2.5-7b", config={}, cell="z"),
        row("in_memory", status="oom_device", model="qwen2.5-14b", config={}, cell="i", machine=large),
    ]
    figure = drawing.figure(load.from_rows(rows))
    headline = figure.axes[0]
    assert [len(line) for line in marked(headline, "MegaTrain fast")] == [1, 1], "a line never spans two machines"
    assert sorted(word for word in words(headline) if word in "ab") == ["a", "a", "b", "b"]
    assert len([one for one in headline.containers if isinstance(one, ErrorbarContainer)]) == 2
    crosses = [str(one.get_marker()) for one in headline.lines if one.get_color() == style.ALARM]
    assert crosses.count("+") == 1
    assert crosses.count("x") == 4 + 1
    assert "(a) NVIDIA H200, 16 cores, 134 GB host; (b) NVIDIA H200 (one of 4), 64 cores, 134 GB host" in figure.get_suptitle()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(names[-3:]) == {"OOM in the paper", "does not fit here", "OOM (device) here"}
    assert {"ZeRO-3", "in memory"} <= set(names)


def test_a_panel_without_measurements_says_so() -> None:
    figure = drawing.figure(load.from_rows([measured("megatrain", 9.0, "qwen2.5-14b")]))
    told = [[text.get_text() for text in axes.texts if "not measured here yet" in text.get_text()] for axes in figure.axes]
    assert [bool(one) for one in told] == [False, False, True, False]


def test_no_marker_of_the_committed_figure_lies_on_another() -> None:
    """Nor a letter or a dagger on a marker: distances on the page, in points."""
    rows = load.latest(load.load(*sorted(RESULTS.glob("*.jsonl"))))
    figure = drawing.figure(rows[rows["gpu"].notna()])
    figure.draw_without_rendering()
    headline, _, context, depth = figure.axes
    for axes in (headline, context, depth):
        drawn = [one for one in axes.lines if not str(one.get_label()).startswith("_")]
        at = np.vstack([one.get_transform().transform(np.asarray(one.get_xydata())) for one in drawn]) * 72 / figure.dpi
        apart = np.abs(at[:, None] - at[None]).max(axis=-1) + np.diag([99.0] * len(at))
        assert apart.min() > 3.8, "a marker is 3.8 points wide"
        edges = axes.get_window_extent().get_points() * 72 / figure.dpi
        edges[0, 1] = max(label.get_window_extent().y1 for label in axes.get_xticklabels()) * 72 / figure.dpi  # what has no speed
        assert ((at - 1.9 >= edges[0]) & (at + 1.9 <= edges[1])).all(), axes.get_title(loc="left")
        for text in axes.texts:
            box = text.get_window_extent().padded(0.5).get_points() * 72 / figure.dpi
            assert not ((at > box[0]) & (at < box[1])).all(axis=-1).any(), text.get_text()


def test_points_that_would_overlap_stand_side_by_side_at_their_own_heights() -> None:
    speeds = {"megatrain": 6.0, "published_megatrain": 6.05, "zero3": 6.1}
    rows = [measured(system, step_s, "qwen2.5-14b") for system, step_s in speeds.items()]
    figure = drawing.figure(load.from_rows(rows))
    headline, places = figure.axes[0], []
    for system, step_s in speeds.items():
        (line,) = (one for one in headline.lines if one.get_label() == style.name_of(system))
        ((x, y),) = np.asarray(line.get_xydata())
        assert (x, y) == (14.8, pytest.approx(6 * 14_770_033_664 * 32768 / step_s / 1e12, rel=1e-3))
        shown, plain = line.get_transform().transform((x, y)), headline.transData.transform((x, y))
        assert shown[1] == pytest.approx(plain[1])
        places.append(round((shown[0] - plain[0]) * 72 / figure.dpi, 3))
    assert len(set(places)) == 3
