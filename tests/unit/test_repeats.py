"""Repeats: the order in which they are measured, how their rows are pooled, and intervals that hold what they promise."""

import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from omegaconf import OmegaConf

from analysis import load, stats, tables
from analysis.compare import Comparison, compare, notes
from sweeps import auto, check, run
from sweeps.config import Cell, cell_from
from sweeps.errors import parse
from sweeps.identity import configuration
from sweeps.result import Row
from tests.unit.test_analysis_load import curve, row
from tests.unit.test_sweeps_config import composed

HEADLINE = sorted(path.stem for path in (auto.CONF / "experiment").glob("zero3_*.yaml"))


def measured(repeat: int, system: str, step_s: list[float], **fields: object) -> Row:
    """A row of one repeat."""
    config = composed(f"system={system}", f"measure.repeat={repeat}").config
    return row(system, step_s, cell=f"{system}-{repeat}", config=config, losses=curve(10), **fields)


def told(cells: list[Cell]) -> list[tuple[int, str]]:
    return [(cell.measure.repeat, cell.system) for cell in cells]


def test_a_repeat_is_a_cell_of_its_own_and_the_first_is_the_cell_without_repeats() -> None:
    first, second = composed(), composed("measure.repeat=2")
    before = {**first.config, "measure": {key: first.config["measure"][key] for key in ("warmup_steps", "windows")}}
    before["measure"] |= {"steps_per_window": first.measure.steps_per_window, "trace": False}
    assert cell_from(before).hash == first.hash != second.hash
    assert configuration(first.config) == configuration(second.config) != configuration(composed("seed=1").config)


@pytest.mark.parametrize("axes", [["system=zero3,fsdp2", "measure.repeat=1,2,3"], ["measure.repeat=1,2,3", "system=zero3,fsdp2"]])
def test_repeats_go_in_rounds_wherever_they_stand(axes: list[str]) -> None:
    auto.register()
    command = run.command_of(["--multirun", *axes])
    assert told(command.cells or []) == [(repeat, system) for repeat in (1, 2, 3) for system in ("zero3", "fsdp2")]
    given = [argument for argument in command.argv if argument != "--multirun" and not argument.startswith("hydra.")]
    jobs = BasicSweeper.split_arguments(parse(given), None)[0]
    assert jobs[0] == ["measure.repeat=1", "system=zero3"]
    assert jobs[1] == ["measure.repeat=1", "system=fsdp2"]


def test_the_headline_runs_every_system_and_repeats_three() -> None:
    auto.register()
    cells = run.command_of([f"+experiment={HEADLINE[0]}", "model=tiny"]).cells
    assert cells is not None
    assert len({cell.hash for cell in cells}) == len(cells)
    first = [cell for cell in cells if cell.measure.repeat == 1]
    assert cells[: len(first)] == first
    assert {cell.system for cell in first} >= {"in_memory", "zero3", "zero2", "fsdp2", "megatrain"}
    again = [(repeat, system) for repeat in (2, 3) for system in ("zero3", "zero3", "megatrain")]  # ZeRO-3 eager and compiled
    assert told(cells[len(first) :]) == again
    compiled = {cell.system for cell in first if cell.options.get("compile")}
    assert compiled == {"in_memory", "zero3", "zero2", "superoffload", "zenflow", "fsdp2", "torchao_offload", "megatrain"}
    assert {cell.recipe.total_steps for cell in cells} == {21}


def test_the_headline_is_the_same_at_every_size() -> None:
    files: list[Any] = [OmegaConf.to_container(OmegaConf.load(auto.CONF / "experiment" / f"{name}.yaml")) for name in HEADLINE]
    assert files == [
        {"defaults": ["common/headline", {"override /model": f"qwen2.5-{size}"}, "_self_"], "experiment": f"zero3_{size}"}
        for size in ("14b", "3b", "7b")
    ]


def test_a_system_to_repeat_that_does_not_exist_is_one_line() -> None:
    auto.register()
    with pytest.raises(ValueError, match=r"measure\.repeated: got 'zero33', allowed fsdp2, fsdp2_compiled, fsdp2_grad_op"):
        run.command_of(["--multirun", "measure.repeat=1,2", "measure.repeated=[zero33]"])


def comparison() -> Comparison:
    """ZeRO-3 and the engine three times, FSDP2 once; one of the engine's repeats failed."""
    rows = [measured(1, "in_memory", [1.0, 1.0, 1.0]), measured(1, "fsdp2", [4.0, 4.1, 4.2], agrees=True)]
    for repeat, (zero3, megatrain) in enumerate([(3.0, 1.50), (3.1, 1.52), (3.2, 1.48), (3.1, 1.55)], 1):
        rows.append(measured(repeat, "zero3", [zero3, zero3 + 0.01, zero3 - 0.01], agrees=True, max_loss_difference=1e-4 * repeat))
        ran = {"status": "timeout", "reason": "killed"} if repeat == 4 else {"agrees": True, "peak_host_bytes": repeat * 10**9}
        rows.append(measured(repeat, "megatrain", [] if repeat == 4 else [megatrain, megatrain, megatrain + 0.02], **ran))
    return compare(load.from_rows(rows))


def test_repeats_of_one_configuration_are_one_standing() -> None:
    by_system = {one.system: one for one in comparison().standings}
    assert {system: one.num_repeats for system, one in by_system.items()} == {
        "in_memory": 1,
        "megatrain": 3,
        "zero3": 4,
        "fsdp2": 1,
    }
    zero3, megatrain = by_system["zero3"], by_system["megatrain"]
    assert (zero3.label, megatrain.label, megatrain.status) == ("ZeRO-3", "MegaTrain", "ok")
    assert zero3.speed is not None
    assert zero3.speed.value == pytest.approx(32 * 1024 * 12 / sum(zero3.step_s))
    assert (zero3.speed.num_samples, zero3.speed.degrees) == (4, 3)
    assert zero3.max_loss_difference == 4e-4
    assert megatrain.host_bytes == 3 * 10**9
    assert megatrain.ratio is not None
    assert megatrain.ratio.has_interval
    assert megatrain.ratio.excludes(1.9)
    assert megatrain.tflops == pytest.approx(6 * 3_397_103_616 * megatrain.speed.value / 1e12 if megatrain.speed else 0)


def test_ratios_are_to_zero3_itself_and_not_to_another_preset_of_it() -> None:
    optimizer = row("zero3", [2.0, 2.0, 2.0], cell="o", preset="optimizer", agrees=True)
    whole = [
        row("zero3", [second] * 3, cell=str(second), preset=preset, agrees=True) for second, preset in ((3.0, None), (2.5, "tuned"))
    ]
    found = compare(load.from_rows([optimizer, *whole]))
    assert found.baseline is not None
    assert found.baseline.preset == "tuned"
    assert {one.preset: one.ratio.value for one in found.standings if one.ratio} == {
        "tuned": 1.0,
        "optimizer": 1.25,
        None: pytest.approx(2.5 / 3),
    }
    assert compare(load.from_rows([optimizer])).baseline is not None


def test_the_table_shows_repeats_and_their_interval_and_the_notes_what_failed() -> None:
    found = comparison()
    title, *body = tables.cells(found)
    column = title.index("repeats")
    assert {line[0].removeprefix("★ "): line[column] for line in body} == {
        "in memory": "—",
        "MegaTrain": "3",
        "ZeRO-3": "4",
        "FSDP2": "—",
    }
    assert "–" in body[1][title.index("tokens/s\n95% interval")]
    listed = notes(found)
    assert "MegaTrain: 1 of 4 repeats failed (timed out)" in listed
    assert any(note.startswith("Intervals of what was measured once") for note in listed)
    assert {"repeats", "MFU of\ndata sheet"}.isdisjoint(
        tables.cells(compare(load.from_rows([measured(1, "zero3", [1.0, 1.1, 1.2])])))[0]
    )
    sheet = tables.cells(compare(load.from_rows([measured(1, "zero3", [1.0, 1.1, 1.2], mfu_datasheet=0.31)])))
    assert sheet[1][sheet[0].index("MFU of\ndata sheet")] == "31.0%"


def test_rows_that_differ_in_their_timing_alone_have_short_labels() -> None:
    brief = composed("system=zero3", "measure=brief").config
    rows = [measured(1, "zero3", [1.0]), row("zero3", [1.1], cell="brief", config=brief), measured(2, "zero3", [1.2])]
    assert list(load.from_rows(rows)["label"]) == ["ZeRO-3", "ZeRO-3 (2)", "ZeRO-3"]
    linear = composed("system=zero3", "recipe.schedule=linear", "recipe.total_steps=99").config
    rows[1] = row("zero3", [1.1], cell="linear", config=linear)
    assert "total_steps=99" in load.from_rows(rows)["label"][1]


def test_the_standard_error_is_that_of_the_hierarchical_bootstrap() -> None:
    """The closed form against twenty thousand two-stage resamples of four unlike repeats."""
    drawn = random.Random(3)
    logs = [[0.1 * repeat + drawn.gauss(0, 0.05 * repeat) for _ in range(3)] for repeat in (1, 2, 3, 4)]
    means = []
    for _ in range(20_000):
        repeats = drawn.choices(logs, k=len(logs))
        means.append(statistics.fmean(statistics.fmean(drawn.choices(windows, k=len(windows))) for windows in repeats))
    estimate = stats.throughput(1.0, *[[math.exp(value) for value in windows] for windows in logs])
    assert estimate is not None
    assert estimate.error is not None
    assert estimate.error**2 * 3 / 4 == pytest.approx(statistics.pvariance(means), rel=0.03)


@pytest.mark.parametrize(("between", "within"), [(0.02, 0.005), (0.005, 0.02), (0.01, 0.01)])
def test_intervals_of_three_repeats_cover_the_truth(between: float, within: float) -> None:
    """Of 2000 draws of three repeats of three windows, at least 93% of the intervals hold the true speed 1 and ratio 2."""
    generator = np.random.default_rng(11)
    held = [0, 0]
    for _ in range(2000):
        pools = []
        for scale in (1.0, 2.0):
            starts = generator.normal(0, between, (3, 1))
            windows = scale * np.exp(starts + generator.normal(0, within, (3, 3)))
            pools.append(stats.pooled([(1 / float(repeat.mean()), repeat.tolist()) for repeat in windows]))
        quotient = stats.quotient(*pools)
        assert pools[0] is not None
        assert quotient is not None
        held[0] += not pools[0].excludes(1.0)
        held[1] += not quotient.excludes(2.0)
    assert min(held) >= 0.93 * 2000


def test_intervals_of_three_paired_rounds_cover_the_truth() -> None:
    """What a round does to both, however large, neither widens the interval nor moves it."""
    generator = np.random.default_rng(12)
    held, widths = 0, []
    for _ in range(2000):
        rounds = []
        for met in generator.normal(0, 0.3, 3):
            starts = generator.normal(met, 0.01, (2, 1))
            both = np.array([[1.0], [2.0]]) * np.exp(starts + generator.normal(0, 0.005, (2, 3)))
            rounds.append(tuple((1 / float(windows.mean()), windows.tolist()) for windows in both))
        found = stats.paired(rounds)
        assert found is not None
        assert found.lo is not None
        assert found.hi is not None
        held += not found.excludes(2.0)
        widths.append(found.hi / found.lo)
    assert held >= 0.93 * 2000
    assert statistics.median(widths) < 1.2
    assert stats.paired([]) is None
    one = ((1.0, [1.0, 1.1, 1.2]), (0.5, [2.0, 2.1, 2.2]))
    assert stats.paired([one]) == stats.ratio(*one[0], *one[1])


def test_two_repeats_have_no_interval() -> None:
    two = stats.pooled([(10.0, [1.0, 1.1, 1.2]), (12.0, [1.0, 1.1, 1.2])])
    assert two is not None
    assert (two.value, two.has_interval) == (pytest.approx(120 / 11), False)
    assert stats.pooled([]) is None


@pytest.mark.parametrize(("system", "kind"), [("in_memory", "device"), ("zero3", "host"), ("fsdp2", "host")])
def test_what_has_no_room_on_a_gpu_is_known_without_one(system: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "device", lambda: "cuda")
    machine = ["machine.host_bytes=137438953472", "machine.device_bytes=150754820096"]
    seen: list[dict[str, Any]] = []

    def look(*overrides: str, predict: bool = True) -> dict[str, Any] | None:
        check.look(composed(*overrides, "shape=b32x1024", *machine), {}, lambda event, **told: seen.append(told), predict=predict)
        return seen.pop() if seen else None

    found = look(f"system={system}", "model=qwen2.5-14b")
    assert found is not None
    assert f"bytes of {kind} memory, allowed" in found["refusal"]
    assert found["told"][0]["num_params"] == pytest.approx(14.77e9, rel=1e-3)
    small = look(f"system={system}", "model=qwen2.5-3b")
    assert small is not None
    assert (small["refusal"], small["told"], small["step_s"]) == (None, [], None)
    assert look("system=megatrain", "model=qwen2.5-32b", predict=False) is None  # its placement needs the GPU's rates


def test_committed_tables_are_as_they_were() -> None:
    """Rows without repeats give the same Markdown as before there were any."""
    results = Path(load.__file__).parent / "results"
    for name in ("h200_3b", "h200_7b"):
        (part,) = load.groups(load.latest(load.load(results / f"{name}.jsonl")))
        assert tables.markdown(compare(part)) in (results / f"{name}.md").read_text()
