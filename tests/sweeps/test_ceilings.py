"""The ceilings' command, the arithmetic of bytes and speed, and rows that say why they did not run;
all on tiny arrays."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from sweeps import adamw_speed, ceilings, environment, host_memory
from sweeps.host_memory import Kernel, Speed
from sweeps.memory import Look, NoDevice, Pace

pytestmark = pytest.mark.slow

TINY = ("--num-elements", "20000", "--threads", "1", "--rounds", "2")
ENGINE = tuple(name for name in adamw_speed.BYTES_PER_PARAM if name.startswith("engine"))


def command(*arguments: str, **environment: str) -> tuple[list[str], dict]:
    """Lines of the tables, and the last line of stdout read as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "sweeps.ceilings", *arguments, *TINY],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


@pytest.fixture
def no_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)


def moved(kernel: Kernel) -> int:
    return 2 * sum(t.itemsize for t in kernel.updated) + sum(t.itemsize for t in kernel.passed)


def held(kernel: Kernel) -> int:
    return sum(t.itemsize for t in (*kernel.updated, *kernel.passed))


def test_quick_measures_the_streams_and_imports_no_deepspeed():
    program = "import sys; from sweeps import ceilings; ceilings.main(sys.argv[1:]); sys.exit('deepspeed' in sys.modules)"
    arguments = [sys.executable, "-c", program, "--quick", *TINY]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["adamw"] is None
    assert found["num_threads"] == 1
    assert "matrix_peak_tflops" in found
    assert len(found["streams"]) == 5
    best = max(found["streams"], key=lambda row: row["gb_per_s"])
    assert (found["host_kernel"], found["host_gb_per_s"]) == (best["name"], best["gb_per_s"])


def test_the_peak_of_a_folder_is_that_of_this_boot_of_this_machine(tmp_path, monkeypatch):
    peaks = {"matrix_peak_tflops": 7.0, "matrix_sustained_tflops": 6.0}
    told = {"gpu": None, "boot": environment.boot(), **peaks}
    monkeypatch.setattr(
        ceilings.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, json.dumps(told)),
    )
    older = {
        "gpu": None,
        "boot": environment.boot(),
        "matrix_peak_tflops": 5.0,
    }  # before products were held
    for other in (told | {"boot": "another", "matrix_peak_tflops": 5.0}, older):
        (tmp_path / "ceilings.json").write_text(json.dumps(other))
        assert ceilings.cached_peaks(tmp_path, "cuda") == peaks
    monkeypatch.setattr(ceilings.subprocess, "run", None)
    assert ceilings.cached_peaks(tmp_path, "cuda") == peaks
    assert ceilings.cached_peaks(tmp_path, "cpu") == {}


def test_what_counts_is_what_runs_after_the_settling_and_its_pace_alone(monkeypatch):
    """Four runs of 0.25 s settle it; from then on they take 0.5 s, at a third of the clock."""
    now = 0.0

    class Slowing(NoDevice):
        def look(self) -> Look:
            return Look(at_s=now, sm_mhz=1500 if now <= 1.0 else 500, energy_mj=None, reasons=None)

    def work() -> None:
        nonlocal now
        now += 0.25 if now < 1.0 else 0.5

    monkeypatch.setattr(ceilings, "time", SimpleNamespace(perf_counter=lambda: now))
    assert ceilings.held(work, lambda: None, Slowing(), settle_s=1.0, held_s=2.0) == (
        2.0,
        Pace(sm_mhz=500),
    )
    assert ceilings.held(work, lambda: None, NoDevice(), settle_s=0.0, held_s=0.0) == (2.0, Pace())


def test_without_a_compiler_every_row_that_needs_one_says_so_and_the_rest_goes_on():
    lines, found = command(CXX="no-such-compiler")
    rows = {row["name"]: row for row in found["adamw"]}
    assert list(rows) == list(adamw_speed.BYTES_PER_PARAM)
    for name, row in rows.items():
        line = next(line for line in lines if line.startswith(name))
        if name.startswith("torch"):
            assert row["reason"] is None
            assert line.endswith(f"{row['gb_per_s'] / found['host_gb_per_s']:.0%}")
        else:
            assert "ompiler" in row["reason"]
            assert line.endswith(row["reason"])
            assert row["gb_per_s"] is None
    assert "native" not in " ".join(row["name"] for row in found["streams"])


def test_without_deepspeed_its_rows_say_so_in_one_line(no_deepspeed):
    streams, rows = adamw_speed.measure(1000, 1, rounds=1)
    assert [row.name for row in rows] == list(adamw_speed.BYTES_PER_PARAM)
    assert len(streams) == 5
    missing = [row for row in rows if row.reason is not None]
    assert [row.name.split(",")[0] for row in missing] == ["DeepSpeed", "DeepSpeed"]
    assert all(
        row.reason == "deepspeed is not installed; pip install 'deepspeed>=0.19.8'"
        for row in missing
    )


def test_bytes_are_those_of_the_tensors_and_every_step_updates_what_it_says(no_deepspeed):
    kernels = [row for row in adamw_speed.contestants(1000, 1) if isinstance(row, Kernel)]
    assert [kernel.name for kernel in kernels] == [*ENGINE, "torch fused, fp32 weight"]
    for kernel in kernels:
        assert kernel.bytes_per_element == moved(kernel) == adamw_speed.BYTES_PER_PARAM[kernel.name]
        before = [tensor.clone() for tensor in kernel.updated]
        gradient = kernel.passed[0].clone()
        for _ in range(100):  # a single step is less than half a step of the bf16 weight
            kernel.run()
        assert not any(
            torch.equal(old, new) for old, new in zip(before, kernel.updated, strict=True)
        ), kernel.name
        assert torch.equal(kernel.passed[0], gradient)
    for kernel in host_memory.streams(1000, 1):
        assert kernel.bytes_per_element == moved(kernel)


def test_streams_compute_what_their_names_say():
    scale, axpy, copy, add, native = host_memory.streams(1000, 2)
    whole = scale.updated[0]
    a, b, c = whole.chunk(3)
    whole.copy_(torch.arange(whole.numel(), dtype=torch.float32))
    expected = whole.clone()
    for kernel in (scale, native):  # s is 1
        kernel.run()
        assert torch.equal(whole, expected)
    copy.run()
    assert torch.equal(c, b)
    axpy.run()
    assert torch.equal(a, expected.chunk(3)[0] + 0.5 * b)
    add.run()
    assert torch.equal(c, a + b)


def test_the_native_stream_scales_all_of_every_array():
    library = host_memory.native()
    arrays = [torch.arange(100_007, dtype=torch.float32) + offset for offset in range(4)]
    expected = [array * 3 for array in arrays]
    kernel = host_memory.scale_four(library, arrays, 3.0, num_threads=3)
    kernel()
    assert all(torch.equal(array, wanted) for array, wanted in zip(arrays, expected, strict=True))


def test_a_turn_is_two_runs_and_the_speed_is_that_of_the_second():
    calls = []

    def run() -> None:
        calls.append(None)
        time.sleep(0.2 if len(calls) % 2 else 0.01)

    kernel = Kernel(
        name="k", bytes_per_element=10, run=run, updated=[torch.empty(1_000_000)], passed=[]
    )
    (speed,) = host_memory.in_turns([kernel], rounds=3)
    assert len(calls) == 6
    assert 1e6 / 0.2 < speed.g_elements_per_s * 1e9 <= 1e6 / 0.01
    assert speed == Speed(
        name="k",
        bytes_per_element=10,
        g_elements_per_s=speed.g_elements_per_s,
        gb_per_s=10 * speed.g_elements_per_s,
    )


def test_arrays_shrink_where_memory_is_short():
    assert host_memory.affordable(12, 1000) == 1000
    assert host_memory.affordable(1 << 30, 1 << 26) < 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)  # DeepSpeedCPUAdam is compiled on its first use
def test_deepspeed_takes_its_turn_and_all_held_bytes_are_counted():
    kernels = adamw_speed.contestants(1000, 2)
    assert not any(isinstance(kernel, Speed) for kernel in kernels), kernels
    assert [kernel.bytes_per_element for kernel in kernels] == [moved(kernel) for kernel in kernels]
    assert list(map(moved, kernels)) == [26, 18, 18, 28, 28, 28, 28, 22]
    assert sum(map(held, kernels)) + 3 * 4 == adamw_speed.HELD_BYTES
    before = kernels[-2].updated[0].clone()
    kernels[-2].run()
    assert not torch.equal(kernels[-2].updated[0], before)
