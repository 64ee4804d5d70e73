"""Statistics, ranking, the sentence, and the table in its three forms."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from rich.console import Console

from analysis import latex, stats, tables
from analysis.compare import CPU_NOTE, interval_text, notes
from analysis.make import RESULTS
from analysis.verdict import sentence
from sweeps.result import Row, read_rows
from tests.unit.test_analysis_compare import comparison
from tests.unit.test_analysis_load import cpu_rows, h200_rows, plan, row

COMMITTED = list(read_rows(RESULTS / "h200_3b.jsonl"))


def printed(rows: list[Row], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(tables.terminal(comparison(rows), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def t_probability(quantile: float, degrees: int) -> float:
    """P(T <= quantile): the density of Student's t integrated over x = sqrt(degrees) tan(angle)."""
    angle = np.linspace(0.0, math.atan(quantile / math.sqrt(degrees)), 20_001)
    area = np.trapezoid(np.cos(angle) ** (degrees - 1), angle) * math.sqrt(degrees)
    return 0.5 + float(area) * math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))


def test_t_quantiles_are_the_known_ones() -> None:
    assert [stats.t_quantile(degrees) for degrees in (1, 2, 4, 10, 30)] == [12.7062, 4.3027, 2.7764, 2.2281, 2.0423]
    for degrees in range(1, 31):
        assert t_probability(stats.t_quantile(degrees), degrees) == pytest.approx(0.975, abs=1e-5), degrees
    assert stats.t_quantile(31) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-4)


def test_fewer_than_three_windows_have_no_interval() -> None:
    for windows in ([1.0], [1.0, 1.1]):
        few = stats.throughput(100.0, windows)
        assert few is not None
        assert (few.value, few.has_interval, few.num_samples) == (100.0, False, len(windows))
        quotient = stats.ratio(100.0, windows, 50.0, [2.0, 2.1, 2.05])
        assert quotient is not None
        assert (quotient.value, quotient.lo, quotient.hi) == (2.0, None, None)
        assert interval_text(quotient) == "2.00x (too few windows for an interval)"
    assert stats.throughput(None, []) is None
    assert stats.ratio(100.0, [1.0], None, []) is None


def test_throughput_interval_by_hand() -> None:
    """Logs -0.1, 0, 0.1: standard deviation 0.1, two degrees of freedom."""
    speed = stats.throughput(100.0, [math.exp(-0.1), 1.0, math.exp(0.1)])
    assert speed is not None
    factor = math.exp(4.3027 * 0.1 / math.sqrt(3))
    assert (speed.lo, speed.hi) == (pytest.approx(100 / factor), pytest.approx(100 * factor))
    steady = stats.throughput(100.0, [1.0, 1.0, 1.0])
    assert steady is not None
    assert (steady.lo, steady.hi) == (100.0, 100.0)


def test_ratio_interval_is_welch() -> None:
    """Equal spreads of three windows give four degrees of freedom; beside a steady system only the other's two count."""
    noisy = [math.exp(-0.1), 1.0, math.exp(0.1)]
    for over, quantile, error in ((noisy, 2.7764, 0.1 * math.sqrt(2 / 3)), ([1.0, 1.0, 1.0], 4.3027, 0.1 / math.sqrt(3))):
        quotient = stats.ratio(200.0, noisy, 100.0, over)
        assert quotient is not None
        factor = math.exp(quantile * error)
        assert (quotient.value, quotient.lo, quotient.hi) == (2.0, pytest.approx(2 / factor), pytest.approx(2 * factor))


@pytest.mark.parametrize("spreads", [(0.02, 0.02), (0.005, 0.04)], ids=["alike", "unlike"])
def test_intervals_of_three_windows_cover_the_truth(spreads: tuple[float, float]) -> None:
    """Of 2000 draws of 3 windows a system, at least 93% of the intervals hold the true speed 1 and the true ratio 2."""
    generator = np.random.default_rng(7)
    held = [0, 0]
    for _ in range(2000):
        fast, slow = generator.normal(1.0, spreads[0], 3), generator.normal(2.0, 2 * spreads[1], 3)
        speed = stats.throughput(1 / fast.mean(), fast.tolist())
        quotient = stats.ratio(1 / fast.mean(), fast.tolist(), 1 / slow.mean(), slow.tolist())
        assert speed is not None
        assert quotient is not None
        held[0] += not speed.excludes(1.0)
        held[1] += not quotient.excludes(2.0)
    assert min(held) >= 0.93 * 2000


def test_ratio_is_the_quotient_of_the_printed_speeds() -> None:
    by_system = {one.system: one for one in comparison(h200_rows()).standings}
    megatrain, zero3 = by_system["megatrain"], by_system["zero3"]
    assert megatrain.speed is not None
    assert zero3.speed is not None
    assert megatrain.ratio is not None
    assert megatrain.ratio.value == pytest.approx(megatrain.speed.value / zero3.speed.value)
    assert megatrain.ratio.value == pytest.approx(14.45 / 8.03)
    assert megatrain.ratio.excludes(1.0)


def test_order_ranking_and_winner() -> None:
    standings = comparison(h200_rows()).standings
    assert [one.system for one in standings] == [
        "in_memory",
        "megatrain",
        "zero3",
        "fsdp2",
        "published_megatrain",
        "zero2",
        "superoffload",
        "zenflow",
    ]
    assert [one.system for one in standings if one.ranked] == ["megatrain", "zero3", "fsdp2"]
    assert [one.system for one in standings if one.best] == ["megatrain"]


def test_sentence_names_winner_and_interval() -> None:
    text = sentence(comparison(h200_rows()))
    assert re.fullmatch(
        r"MegaTrain is the fastest: 1\.80x \(95% interval 1\.\d\d to 1\.\d\d\) as fast as ZeRO-3 "
        r"\(20,403 tokens/s against 11,338\)\.",
        text,
    )


def test_sentence_gives_the_ratio_of_the_table_and_names_a_faster_rival() -> None:
    """Faster presets of the baseline, and other systems, stand beside it and not in its place."""
    steps = {"megatrain": 1.0, "zero2": 1.25, "zero3": 2.0}
    rows = [row(system, [seconds, seconds * 1.01, seconds * 0.99], agrees=True) for system, seconds in steps.items()]
    rows.append(row("zero3", [1.5, 1.51, 1.49], agrees=True, preset="twinflow"))
    found = comparison(rows)
    assert [one.ratio.value for one in found.ranked if one.ratio] == pytest.approx([2.0, 1.6, 2 / 1.5, 1.0], rel=1e-3)
    assert re.fullmatch(
        r"MegaTrain is the fastest: 2\.00x \([^)]*\) as fast as ZeRO-3 \(32,\d{3} tokens/s against 16,\d{3}\) and 1\.25x \([^)]*\) "
        r"as fast as ZeRO-2, the fastest rival \(32,\d{3} tokens/s against 26,\d{3}\)\.",
        sentence(found),
    )
    rows[1] = row("zero2", [1.01, 1.0, 1.02], agrees=True)
    assert re.fullmatch(
        r"MegaTrain and ZeRO-2 cannot be told apart: 32,\d{3} tokens/s against 32,\d{3}, ratio 1\.01x \([^)]*\); "
        r"MegaTrain is 2\.00x \([^)]*\) as fast as ZeRO-3 \(.*\)\.",
        sentence(comparison(rows)),
    )


def test_what_is_to_be_known_of_a_measured_row_is_below_the_table() -> None:
    rows = [row("zero3", [2.0, 2.1]), row("megatrain", [1.0, 1.1], reason="the GPU was shared with 2 others")]
    assert "MegaTrain: the GPU was shared with 2 others" in notes(comparison(rows))


def test_sentence_is_honest_when_zero3_wins_or_nothing_can_be_told_apart() -> None:
    rows = [one for one in h200_rows() if one.system not in ("megatrain", "published_megatrain")]
    assert sentence(comparison(rows)).startswith("ZeRO-3 is the fastest: 1.4")
    assert "cannot be told apart" in sentence(comparison(cpu_rows()))
    assert sentence(comparison([rows[0]])).startswith("No system but the reference")
    assert sentence(comparison([row("zero3", [2.0])])) == "Only ZeRO-3 could be ranked: 16,384 tokens/s."


def test_notes_carry_the_caveats_of_measured_rows() -> None:
    rows = [replace(row, caveat="no clipping") if row.system == "zero3" else row for row in h200_rows()]
    assert "ZeRO-3: no clipping" in notes(comparison(rows))
    assert not any("no clipping" in line for line in notes(comparison(h200_rows())))


def test_notes_tell_what_was_kept_on_the_device() -> None:
    def placed(system: str, status: str = "ok", **placement: int) -> Row:
        return row(system, [1.0] if status == "ok" else [], status=status, plan={**plan(2, 2), "placement": placement})

    rows = [
        placed("megatrain", device_blocks=19, kept_layers=18, offloaded_layers=10, checkpoint_interval=1),
        placed("zero3", kept_layers=38),
        placed("fsdp2", kept_layers=0),
        placed("zero2", status="oom_device", kept_layers=3),
    ]
    told = [line for line in notes(comparison(rows)) if "layers" in line]
    blocks = "weights and optimizer state of 19 blocks on the device"
    assert told == [
        f"MegaTrain: {blocks}, activations of 18 layers kept, of 10 layers sent to the host and back.",
        "ZeRO-3: activations of 38 layers kept.",
    ]


def test_notes_give_reasons_and_the_cpu_line() -> None:
    told = notes(comparison(h200_rows()))
    assert "ZeRO-2: OOM (device): CUDA out of memory at step 0: 141 GB" in told
    assert any(line.startswith("MegaTrain (published): numerics differ") and "6.0e-01" in line for line in told)
    assert CPU_NOTE not in told
    assert CPU_NOTE in notes(comparison(cpu_rows()))


def test_cells() -> None:
    title, *body = tables.cells(comparison(h200_rows()))
    by_system = {row[0]: dict(zip(title, row, strict=True)) for row in body}
    best = by_system["★ MegaTrain"]
    assert (best["tokens/s"], best["ratio to\nZeRO-3"], best["TFLOPS\n6P"], best["MFU"]) == ("20,403", "1.80x", "416", "52.4%")
    assert (best["device\nGB"], best["host\nGB"], best["host\nB/param"]) == ("19.3", "47.2", "13.9")
    assert (best["final\nloss"], best["max\n|Δloss|"], best["agrees"]) == ("2.1433", "6.0e-04", "yes")
    assert by_system["in memory"]["agrees"] == "reference"
    assert by_system["MegaTrain (published)"]["agrees"] == "differs"
    assert by_system["ZeRO-2"]["tokens/s"] == "OOM (device)"
    assert set(list(by_system["ZeRO-2"].values())[2:]) == {"—"}


def test_cpu_table_has_neither_mfu_nor_device() -> None:
    titles = [column.title for column in tables.columns(comparison(cpu_rows()))]
    assert "MFU" not in titles
    assert "device\nGB" not in titles
    assert "host\nGB" in titles


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("rows", [h200_rows(), h200_rows()[:4], cpu_rows(), COMMITTED], ids=["h200", "four", "cpu", "committed"])
def test_terminal_never_wraps(rows: list[Row], width: int) -> None:
    lines = [line for line in printed(rows, width).split("\n") if line.strip()]
    assert len(lines) == 2 + 1 + len(rows)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert all(word in "".join(lines) for word in ("tokens/s", "agrees", "MegaTrain"))


def test_a_long_name_takes_a_line_more_and_no_column() -> None:
    text = printed(list(read_rows(RESULTS / "zero3_7b_huge_pages.jsonl")), 100)
    assert "…" not in text
    assert max(map(len, text.split("\n"))) <= 100
    assert all(word in text for word in ("tokens/s", "ratio to", "num_micro_batches=2", "device", "host"))


def test_everything_asked_for_fits_100_columns_for_the_four_systems() -> None:
    text = printed(h200_rows()[:4], 100)
    assert all(word in text for word in ("TFLOPS", "MFU", "device", "host", "B/param", "final", "|Δloss|", "agrees"))
    assert "interval" in printed(h200_rows()[:4], 120)
    narrow = printed(h200_rows()[:4], 80)
    assert "B/param" not in narrow
    assert "|Δloss|" in narrow


def test_the_interval_of_the_ratio_is_shown_in_both_tables() -> None:
    text, page = printed(COMMITTED, 120), tables.markdown(comparison(COMMITTED))
    for one in comparison(COMMITTED).standings:
        if one.ratio is not None and one.ratio.has_interval:
            told = f"{one.ratio.lo:.2f}–{one.ratio.hi:.2f}"
            assert told in text
            assert f"| {told} |" in page


def test_rows_of_one_system_are_numbered_in_the_order_shown() -> None:
    rows = [row("megatrain", [step], cell=preset, preset=preset) for preset, step in (("stream", 2.0), ("fast", 1.0))]
    shown = comparison([*rows, row("zero3", [3.0])]).standings
    assert [(one.label, one.variant) for one in shown] == [("MegaTrain fast", 0), ("MegaTrain stream", 1), ("ZeRO-3", 0)]


def test_markdown_and_latex() -> None:
    result = comparison(h200_rows())
    lines = tables.markdown(result).splitlines()
    assert lines[0].startswith("| system | tokens/s | ratio to ZeRO-3 |")
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "| **★ MegaTrain** | **20,403** | 1.80x |" in lines[3]
    tex = latex.as_latex(tables.sheet(result))
    assert "\\begin{tabular}{@{}lrrrrrrrrrl@{}}" in tex
    assert "\\textbf{MegaTrain} & \\textbf{20,403} & 1.80x" in tex
    assert "52.4\\%" in tex
    assert not set("★—–Δ_") & set(tex)
