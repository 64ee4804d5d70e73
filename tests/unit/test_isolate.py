"""A cell in a process of its own: how it ends, what memory it and others on the device are seen to hold."""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import NonFiniteLossError
from sweeps import auto, memory, study
from sweeps.isolate import Outcome, run_isolated, verdict
from sweeps.memory import NoDevice, Sampler, host_bytes
from sweeps.result import read_rows
from sweeps.run import command_of


def isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout_s: float = 20.0, starter: Sequence[str] = ()
) -> Outcome:
    (tmp_path / "fake_cell.py").write_text(f"import os, sys, time, signal\nfd = int(sys.argv[2])\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log, device = tmp_path / "log", NoDevice()
    return run_isolated("fake_cell", {}, log=log, timeout_s=timeout_s, device=device, on_event=lambda event: None, starter=starter)


STARTERS = [
    (("env", "ASKED=1"), "os.environ['ASKED'] == '1'"),
    pytest.param(
        ("numactl", "--cpunodebind=0", "--preferred=0"),
        "'prefer' in open('/proc/self/numa_maps').readline()",
        marks=pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed"),
    ),
]


@pytest.mark.parametrize(("starter", "seen"), STARTERS)
def test_a_cell_can_be_started_through_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starter: tuple[str, ...], seen: str
) -> None:
    body = f"os.write(fd, b'{{\"event\": \"done\"}}\\n' if {seen} else b'')"
    assert isolated(tmp_path, monkeypatch, body, starter=starter).status == "ok"
    assert isolated(tmp_path, monkeypatch, body, starter=("env", "ASKED=0")).status == "error"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ('os.write(fd, b\'{"event": "done"}\\n\')', "ok", ""),
        (
            'os.write(fd, b\'{"event": "done"}\\n{"event": "failed", "status": "error", "reason": "no trace"}\\n\'); sys.exit(1)',
            "ok",
            "after the measurement: no trace",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "oom_host", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "error", "SIGSEGV"),
        ("print('last words'); sys.exit(3)", "error", "exit 3: last words"),
        ("raise RuntimeError('boom')", "error", "RuntimeError: boom"),
    ],
)
def test_every_end_has_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, reason: str) -> None:
    outcome = isolated(tmp_path, monkeypatch, body)
    assert outcome.status == status
    assert reason in outcome.reason


def test_a_hanging_cell_and_its_children_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen('%s', 'w').write(str(child.pid))\ntime.sleep(600)"
    outcome = isolated(tmp_path, monkeypatch, body % (tmp_path / "pid"), timeout_s=3.0)
    assert outcome.status == "timeout"
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    deadline = time.monotonic() + 10
    while (left := _read_or_empty(status)) and "Z (zombie)" not in left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left or "Z (zombie)" in left


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process is gone
        return ""


def test_what_was_measured_before_the_time_was_up_counts_and_the_row_says_what_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'os.write(fd, b\'{"event": "done"}\\n\'); time.sleep(30)'
    found = isolated(tmp_path, monkeypatch, body, timeout_s=2.0)
    assert (found.status, found.reason.split(";")[0]) == ("ok", "after the measurement: killed after measure.timeout_s = 2 s")


def test_memory_is_sampled_once_training_has_touched_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rarely a process so large that each look at it takes long is sampled otherwise."""
    monkeypatch.setattr("sweeps.memory.BACKOFF", 1e6)
    body = """
time.sleep(1)
held = b'1' * 300_000_000
os.write(fd, b'{"event": "losses", "first_step": 0}\\n')
time.sleep(1)
os.write(fd, b'{"event": "done"}\\n')
"""
    assert (isolated(tmp_path, monkeypatch, body).peak_host_bytes or 0) > 300_000_000


def test_verdicts() -> None:
    assert verdict(torch.OutOfMemoryError("CUDA out of memory. Tried"))[0] == "oom_device"
    assert verdict(MemoryError())[0] == "oom_host"
    assert verdict(NonFiniteLossError("nan"))[0] == "nonfinite"
    assert verdict(KeyError("a\nb")) == ("error", "KeyError: 'a\\nb'")


def test_sampler_sees_a_known_allocation() -> None:
    code = "import time; block = bytearray(b'x' * (256 << 20)); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        sampler = Sampler(child.pid, NoDevice())
        seen = sampler.poll()
        child.kill()
    assert seen is not None
    assert seen["device_bytes"] is None
    assert 256 << 20 <= (sampler.peak_host_bytes or 0) < (256 << 20) + (64 << 20)
    assert sampler.peak_host["pss_anon_bytes"] >= 256 << 20
    assert host_bytes() > 256 << 20


def fake_nvml(used: Sequence[int], pids: Sequence[int] = ()) -> SimpleNamespace:
    """pynvml with a device on which `used` bytes are in use, look after look, by processes with these pids as far as it tells."""
    looks = itertools.chain(used, itertools.repeat(used[-1]))
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=next(looks)),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids],
    )


def crowd_of(monkeypatch: pytest.MonkeyPatch, *found: Any) -> memory.Crowd | None:
    monkeypatch.setattr(memory, "PATIENCE_S", 0.0 if len(found[0]) == 1 else 1.0)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*found))
    return memory.device_sampler("cuda").crowd()


def test_others_on_the_device_are_seen_whether_or_not_their_pids_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowd_of(monkeypatch, [600 << 20]) is None
    assert crowd_of(monkeypatch, [600 << 20], [os.getpid()]) is None
    assert crowd_of(monkeypatch, [20 << 30, 20 << 30, 600 << 20]) is None  # an earlier cell's process, on its way out
    assert crowd_of(monkeypatch, [600 << 20], [1]) == memory.Crowd(num_bytes=600 << 20, num_processes=1)
    hidden = crowd_of(monkeypatch, [20 << 30])
    assert str(hidden) == (
        "the GPU was shared with a process that is hidden from here, 21,474,836,480 bytes of it in use beside this cell; end what "
        "runs there, or choose another one with CUDA_VISIBLE_DEVICES"
    )
    assert "with 2 others, " in str(crowd_of(monkeypatch, [20 << 30], [1, 2]))
    assert memory.device_sampler("cpu").crowd() is None


def test_what_a_cell_asks_of_its_process_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto.register()
    asked = ["+system.omp_num_threads=3", "+system.huge_pages=true"]
    (cell,) = command_of(["model=tiny", "logging=none", f"output_dir={tmp_path}", *asked]).cells
    sent: dict[str, Any] = {}
    monkeypatch.setattr(study, "run_isolated", lambda *_, **given: sent.update(given) or Outcome(status="error", reason="x"))
    study.run_cell(cell, "")
    assert (sent["env"]["OMP_NUM_THREADS"], sent["env"]["THP_MEM_ALLOC_ENABLE"]) == ("3", "1")


@pytest.mark.parametrize("used", [[600 << 20], [20 << 30], [600 << 20, 600 << 20, 20 << 30]], ids=["alone", "before", "later"])
@pytest.mark.parametrize("status", ["ok", "oom_device"])
def test_memory_that_ran_out_beside_others_is_tried_again(
    used: list[int], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row says so; a number, or no room on a device of its own, stands."""
    auto.register()
    (cell,) = command_of(["model=tiny", "logging=none", f"output_dir={tmp_path}"]).cells
    monkeypatch.setattr(memory, "PATIENCE_S", 0.0)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(used))
    monkeypatch.setattr(study, "device_sampler", lambda device: memory.Nvml())
    losses = {"event": "losses", "losses": [1.0], "seconds": 1.0, "num_tokens": 18}
    outcome = Outcome(status=status, reason="" if status == "ok" else "CUDA out of memory", events=[losses])
    monkeypatch.setattr(study, "run_isolated", lambda *_, **__: dataclasses.replace(outcome))
    row = study.run_cell(cell, "[1]")
    crowded = max(used) > 1 << 30 and (status == "oom_device" or len(used) == 1)
    assert row.crowd_device_bytes == (20 << 30 if crowded else None)
    assert ("the GPU was shared with" in row.reason) is crowded
    assert row.reason.startswith(outcome.reason)
    assert ("  machine.device: the GPU was shared" in capsys.readouterr().out) is (used == [20 << 30])
    assert read_rows(tmp_path / "rows.jsonl") == [row]
    assert study.stands(cell) is not (crowded and status == "oom_device")
