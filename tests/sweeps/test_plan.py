"""`sweeps.plan`: what it prints is what the engine plans and predicts, for this machine and for one
that is not here."""

import dataclasses
import itertools
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.planner.placement import usable
from engine.timeline import Interval, Timeline
from sweeps import plan
from sweeps.outlook import built
from sweeps.plan import WIDTH, compose_plan, main, memory_lines, report, timeline_lines

pytestmark = pytest.mark.slow

ELSEWHERE = ["model=qwen2.5-7b", "+rates=h200_16cores"]
RATES_OF_A_DRIVE = ["+rates.disk_read_bytes=1e9", "+rates.disk_write_bytes=1e9"]


def planned(cell, machine):
    system = built(cell, machine=machine)
    return system.plan(), system


def test_a_machine_that_is_not_here_gets_its_placement_and_its_step():
    cell, machine = compose_plan(["system=megatrain_fast", *ELSEWHERE])
    assert (cell.machine.device, cell.shape.batch_size, cell.shape.seq_len) == ("cuda", 32, 1024)
    plan, engine = planned(cell, machine)
    assert engine is not None
    assert engine.blocks.device_optimizer > 0
    assert engine.blocks.keep_activations > 0
    assert 0.8 * machine.device_memory < plan.device_bytes < machine.device_memory
    text = "\n".join(report(cell, machine))
    assert f"predicted step {engine.predict().step_s:.3f} s" in text
    assert f"{plan.device_bytes / 1e9:.2f} of 150.1 GB" in text
    letters = re.search(r"\n  (\S) (\S+) (\S)   \(embed, 28 layers, head\)", text)
    assert letters
    assert (
        sum(letter in "DBP" for letter in "".join(letters.groups()))
        == engine.blocks.device_optimizer
    )
    assert sum(letter in "KB" for letter in letters[2]) == engine.blocks.keep_activations
    assert sum(letter in "OP" for letter in letters[2]) == engine.blocks.offload_activations


def test_a_given_placement_is_not_refused_for_what_a_slow_probe_says_of_evictions():
    """What ran with 2 forwards to an eviction runs where a probe says 3: the forward waits."""
    given = ["device_optimizer=7", "keep_activations=6", "reload_weights=1"]
    visits, device = [], []
    for gb_per_s, offloaded in (("55", 24), ("45", 24), ("45", 16)):
        cell, machine = compose_plan(
            [
                "system=megatrain_fast",
                "model=qwen2.5-14b",
                "+rates=h200_64cores",
                f"rates.evict_bytes={gb_per_s}e9",
                "rates.device_memory=85520809984",
                *(f"system.{option}" for option in (*given, f"offload_activations={offloaded}")),
            ]
        )
        plan, engine = planned(cell, machine)
        visits.append(engine.blocks.evict_visits)
        device.append(plan.device_bytes)
    assert visits == [2, 2, 3], "with 3 there is room for fewer layers alone"
    assert device[0] == device[1] < 85520809984


def test_the_paper_preset_is_predicted_slower_than_streaming_and_fast_faster():
    seconds = []
    for system in ("megatrain_paper", "megatrain", "megatrain_fast"):
        engine = planned(*compose_plan([f"system={system}", *ELSEWHERE]))[1]
        assert engine is not None
        seconds.append(engine.predict().step_s)
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize(("model", "wasted"), [("7b", 0.15), ("14b", 0.95), ("32b", 0.10)])
def test_pinning_through_torch_wastes_what_a_power_of_two_is_larger_than_a_layer(model, wasted):
    """As the published code does: one buffer a layer, from torch's pinned allocator."""
    plans = {}
    for pinned in ("exact", "torch", "none"):
        cell, machine = compose_plan(
            [f"model=qwen2.5-{model}", "+rates=h200_64cores", f"system.pinned={pinned}"]
        )
        engine = planned(cell, machine)[1]
        assert engine is not None
        plans[pinned] = engine.plan().host
        spec = engine._planner.store_spec(engine.blocks)
    layer = spec.buffers()[1]
    assert (1 << (layer - 1).bit_length()) / layer - 1 == pytest.approx(wasted, abs=0.01)
    rounding = plans["torch"].pop("rounding")
    assert plans["torch"] == plans["exact"] == plans["none"]
    num_layers = engine.blocks.num_layers
    assert rounding > 2 * num_layers * wasted * 0.9 * layer  # weights and gradient slabs


def test_every_system_and_this_machine_without_a_gpu(capsys, monkeypatch):
    for system in ("in_memory", "megatrain", "fsdp2"):
        monkeypatch.setattr("sys.argv", ["plan", f"system={system}"])
        assert main() == 0
        assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["system=megatrain", "model=qwen2.5-32b", "+rates=h200_16cores"],
            1,
            "does not fit: model: got qwen2.5-32b, which needs",
        ),
        (
            ["+rates=h300"],
            2,
            "rates: got 'h300', allowed h200_16cores, h200_64cores, hgx_h200_8; choose one of these",
        ),
        (
            ["+rates=h200_16cores", "model=auto"],
            2,
            "model: got 'auto', allowed the name of a model where rates are given",
        ),
        (["+rates.matmul_flops=1e12"], 2, "rates.name: got nothing, allowed a value"),
        (
            ["+rates=h200_16cores", "+rates.foo=1"],
            2,
            "rates.foo: got 1, allowed fields name, device_memory",
        ),
        (
            ["+rates=h200_16cores", "rates.h2d_bytes=0"],
            2,
            "rates.h2d_bytes: got 0, allowed a number from 1 to 1e24",
        ),
        (
            ["+rates=h200_16cores", "rates.h2d_bytes=fast"],
            2,
            "rates.h2d_bytes: got 'fast', allowed a number from 1 to 1e24",
        ),
        (["+rates=h200_16cores", "~recipe"], 2, "recipe: got nothing, allowed a value"),
        (["system.depth=0"], 2, "system.depth: got 0, allowed an integer >= 1"),
        (
            ["+tune=zero3"],
            2,
            "tune: got 'zero3', allowed with sweeps.run, for a plan is of one cell; give "
            "system=NAME",
        ),
        (["system=superoffload"], 2, "SuperOffload runs on NVIDIA GPUs alone"),
        (
            ["system=zero3,fsdp2"],
            2,
            "system: got 'zero3,fsdp2', allowed one value, for a plan is of one cell; ask for one",
        ),
        (
            ["--multirun", "system=zero3"],
            2,
            "command line: got --multirun, allowed key=value, for a plan is of one cell; remove it",
        ),
    ],
)
def test_what_does_not_fit_or_is_mistyped_is_one_line(arguments, code, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plan", *arguments])
    assert main() == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert len(captured.err.splitlines()) == (code == 2)


def test_a_device_too_small_for_every_input_is_told_the_options_that_fit(capsys, monkeypatch):
    """And they do; on one that nothing fits they are not named."""
    small = ["model=qwen2.5-7b", "shape=b32x1024", "shape.num_micro_batches=8"]
    small += ["system=megatrain_fast", "+rates=h200_16cores", "machine.host_bytes=135000000000"]

    def said(*more: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["plan", *small, *more])
        code = main()
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, refused = said("system.loss_chunk=1024", "machine.device_bytes=16000000000")
    assert (code, "which needs 17," in refused) == (1, True)
    _, _, told = refused.partition("; or set ")
    options, _, rest = told.partition(", ")
    assert rest.strip() == "with which it fits"
    code, fits = said(
        "system.loss_chunk=1024", "machine.device_bytes=16000000000", *options.split()
    )
    assert (code, "\nfits\n" in fits) == (0, True)
    assert "or set" not in said("system.loss_chunk=1024", "machine.device_bytes=8000000000")[1]


def test_a_plan_says_what_windows_will_read(capsys, monkeypatch):
    """The headline's own: two rows have 5.17 and 5.13 s in windows of four, with 40 and 32 threads
    of AdamW (vs_zero3_14b, 28 November 2026)."""
    study = [
        "model=qwen2.5-14b",
        "system=megatrain_fast",
        "shape=b32x1024",
        "measure.steps_per_window=5",
    ]
    monkeypatch.setattr("sys.argv", ["plan", *study, "+rates=h200_64cores"])
    assert main() == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "qwen2.5-14b (14.77B parameters), 32 x 1024 tokens, megatrain fast compiled\n"
    )
    steady, windows = (
        float(re.search(form, said)[1])
        for form in (r"predicted step ([\d.]+) s", r"  ([\d.]+) s in windows of 5 steps")
    )
    assert steady < windows == pytest.approx(5.15, rel=0.1)


@pytest.mark.parametrize(("batch_size", "passes"), [(2, "one pass"), (32, "two passes")])
def test_one_pass_of_adamw_where_the_cpu_is_all_that_a_step_waits_for(
    batch_size, passes, monkeypatch, capsys
):
    """It moves fewer bytes; two passes hide behind more work of the device."""
    study = ["model=qwen2.5-7b", "shape.seq_len=1024", f"shape.batch_size={batch_size}"]
    monkeypatch.setattr("sys.argv", ["plan", *study, "+rates=h200_16cores"])
    assert main() == 0
    assert f"AdamW on the host in {passes}" in capsys.readouterr().out


def test_a_plan_without_a_gpu_says_what_it_lacks_and_what_is_on_disk(monkeypatch, capsys, tmp_path):
    for away, told in ((0, None), (3, "optimizer state of 3 of these blocks on disk"), (-2, "one")):
        asked = ["model=tiny", "system=megatrain", f"system.disk_blocks={away}"]
        monkeypatch.setattr("sys.argv", ["plan", *asked, f"machine.nvme_path={tmp_path}"])
        assert main() == 0
        out = capsys.readouterr().out
        assert "no speed on a CPU; +rates=h200_16cores plans for a GPU" in out
        assert (told or "AdamW on the host in two passes") in out
        assert ("AdamW on the host in one pass" in out) is (away == -2)


@pytest.mark.parametrize("machine", [[], ["+rates=h200_16cores", *RATES_OF_A_DRIVE]])
def test_a_plan_knows_what_the_drives_of_this_machine_have_free(
    machine, monkeypatch, capsys, tmp_path
):
    asked = ["model=tiny", "system=megatrain", "system.disk_blocks=-2", *machine]
    monkeypatch.setattr("sys.argv", ["plan", *asked, f"machine.nvme_path={tmp_path}"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2_000_000))
    assert main() == (0 if machine else 1)
    *_, verdict = (lines := capsys.readouterr().out.splitlines())
    assert any(" of 0.0 GB free, which every step" in line for line in lines) is not bool(machine)
    if not machine:
        told = (
            r"^does not fit: machine\.nvme_path: got room for 2,000,000 bytes there, allowed "
            r"at least [\d,]+ for tiny; free some, or name another folder$"
        )
        assert re.match(told, verdict)


def test_the_largest_model_of_this_machine_has_room_on_its_drives(monkeypatch, tmp_path):
    """Where they are named; those of other machines are as large as they must be."""
    monkeypatch.setattr(plan, "WIDTHS", ("qwen2.5-7b",))
    monkeypatch.setattr(plan, "ELSEWHERE", ((24 * plan.GB, 64 * plan.GB),))
    monkeypatch.setattr(plan, "host_bytes", lambda: 64 * plan.GB)
    monkeypatch.setattr(plan.environment, "gpu", lambda: {"device_bytes": 24 * plan.GB})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=50 * plan.GB))
    shape = ["shape.batch_size=32", "shape.seq_len=1024", "shape.num_micro_batches=32"]
    head, here, there, _ = plan.largest([*shape, f"machine.nvme_path={tmp_path}"])
    assert head.startswith("device + host")
    sizes, away = zip(*(told(line) for line in (here, there)), strict=True)
    assert sizes[0] < sizes[1]
    assert 40 < away[0] <= 50 < away[1]
    (layers,) = re.findall(r"\((\d+) layers of [^)]*\), ", here)
    assert has_room(int(layers), shape, tmp_path)
    assert not has_room(int(layers) + 1, shape, tmp_path), "whatever is on the drive"
    unnamed, same, _ = plan.largest(shape)[1:]
    assert unnamed == same == there


def test_the_largest_model_has_as_little_on_drives_as_may_be(monkeypatch):
    """With as many blocks on the device as fit there; the embedding and the head stay, if they
    can."""
    monkeypatch.setattr(plan, "WIDTHS", ("dense-120b",))
    monkeypatch.setattr(plan, "ELSEWHERE", ((141 * plan.GB, 512 * plan.GB),))
    monkeypatch.setattr(plan.environment, "gpu", lambda: {})
    _, line, *_ = plan.largest(shape := ["shape=b32x1024"])
    (layers,) = re.findall(r"\((\d+) layers of [^)]*\), ", line)
    limits = [f"machine.device_bytes={141 * plan.GB}", f"machine.host_bytes={512 * plan.GB}"]
    model = ["model=dense-120b", f"model.config.num_hidden_layers={layers}", "system=megatrain"]
    every = f"system.checkpoint_interval={math.isqrt(int(layers))}"
    asked = [*shape, *limits, *model, every, "+rates=h200_16cores", "system.late_moments=false"]
    cell, machine = compose_plan(asked)
    engine = built(cell, machine=machine)
    on_device = [
        dataclasses.replace(engine.blocks, device_optimizer=number)
        for number in range(int(layers) + 3)
    ]
    fit = [one for one in on_device if engine._planner._device_total(one) <= usable(141 * plan.GB)]
    left = engine.blocks.num_blocks - fit[-1].device_optimizer
    placed = [dataclasses.replace(fit[-1], disk_blocks=number) for number in range(left + 1)]
    least = min(
        sum(engine._planner.plan(one).disk.values()) for one in placed if engine._planner._fits(one)
    )
    assert told(line)[1:] == (float(f"{least / 1e9:.0f}"),)


def has_room(layers: int, shape: list[str], folder: Path) -> bool:
    """Of 24 + 64 GB and a drive of 50 GB, wherever each block's state lies."""
    limits = [f"machine.device_bytes={24 * plan.GB}", f"machine.host_bytes={64 * plan.GB}"]
    rates = ["+rates=h200_16cores", *RATES_OF_A_DRIVE, "system.late_moments=false"]
    model = ["model=qwen2.5-7b", "system=megatrain", f"model.config.num_hidden_layers={layers}"]
    every = max(1, math.isqrt(layers))
    placed = [f"machine.nvme_path={folder}", f"system.checkpoint_interval={every}"]
    asked = [*shape, *limits, *rates, *model, *placed, "system.disk_blocks=1"]
    cell, machine = compose_plan(asked)
    engine = built(cell, machine=machine)
    planner = engine._planner
    placements = (
        dataclasses.replace(engine.blocks, device_optimizer=here, disk_blocks=away)
        for here, away in itertools.product(range(layers + 3), repeat=2)
        if here + away <= layers + 2
    )
    return any(
        planner._fits(blocks) and sum(planner.plan(blocks).disk.values()) <= 50 * plan.GB
        for blocks in placements
    )


def told(line: str) -> tuple[float, float]:
    """Billions of parameters and GB on disk of the largest."""
    return float(re.findall(r"([\d.]+)B \(", line)[1]), float(
        re.findall(r", ([\d,]+) GB", line)[0].replace(",", "")
    )


def test_fast_loads_kept_layers_again_where_room_is_scarce(monkeypatch, capsys):
    study = ["model=qwen2.5-7b", "shape=b32x1024", "system=megatrain_fast", "+rates=h200_16cores"]
    for option, again in (([], True), (["system.reload_weights=0"], False)):
        monkeypatch.setattr("sys.argv", ["plan", *study, *option])
        assert main() == 0
        assert ("loaded again for" in capsys.readouterr().out) is again


def test_bars_are_to_scale():
    bars = {
        line.split()[0]: line.count("█")
        for line in memory_lines({"weights": 10**9, "moments": 3 * 10**9}, 8 * 10**9)
    }
    assert (bars["weights"], bars["moments"]) == (round(WIDTH / 8), round(3 * WIDTH / 8))
    intervals = (
        Interval(lane="compute", label="compute embed 0", start_s=0.0, end_s=0.5),
        Interval(lane="cpu", label="step 0", start_s=0.25, end_s=1.0),
    )
    compute, cpu = timeline_lines(Timeline(step_s=1.0, intervals=intervals))
    assert (compute.count("█"), cpu.count("█")) == (WIDTH // 2, 3 * WIDTH // 4)
    assert cpu.endswith("0.750 s, 33% hidden")
