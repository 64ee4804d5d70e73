"""A cell in a process of its own: how it ends, what memory it and others on the device are seen to
hold."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import NonFiniteLossError
from sweeps import auto, memory, outlook, study
from sweeps.command import command_of
from sweeps.isolate import Event, Outcome, run_isolated, verdict
from sweeps.memory import DeviceSampler, Look, NoDevice, Pace, Sampler, host_bytes
from sweeps.rowfile import read_rows
from sweeps.rows import Rows

pytestmark = pytest.mark.slow

WINDOW = {
    "event": "losses",
    "first_step": 0,
    "losses": [1.0],
    "seconds": 1.0,
    "num_tokens": 9,
    "counters": {},
}
DONE = {"event": "done", "counters": {}, "allocated_bytes": None, "reserved_bytes": None}
FAILED = {"event": "failed", "status": "error", "reason": "no trace"}


def says(*events: Any) -> str:
    """A line of a cell that sends these."""
    return (
        f"os.write(fd, {b''.join(json.dumps(event).encode() + bytes([10]) for event in events)!r})"
    )


def isolated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    timeout_s: float = 20.0,
    wrapper: Sequence[str] = (),
    device: DeviceSampler | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    (tmp_path / "fake_cell.py").write_text(
        f"import os, sys, time, signal\nfd = int(sys.argv[2])\n{body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log, device = tmp_path / "log", device or NoDevice()
    return run_isolated(
        "fake_cell",
        {},
        log=log,
        timeout_s=timeout_s,
        device=device,
        on_event=on_event,
        wrapper=wrapper,
    )


STARTERS = [
    (("env", "ASKED=1"), "os.environ['ASKED'] == '1'"),
    pytest.param(
        ("numactl", "--cpunodebind=0", "--preferred=0"),
        "'prefer' in open('/proc/self/numa_maps').readline()",
        marks=pytest.mark.skipif(
            shutil.which("numactl") is None, reason="numactl is not installed"
        ),
    ),
]


@pytest.mark.parametrize(("wrapper", "seen"), STARTERS)
def test_a_cell_can_be_started_through_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: tuple[str, ...], seen: str
) -> None:
    body = f"if {seen}: {says(WINDOW, DONE)}"
    assert isolated(tmp_path, monkeypatch, body, wrapper=wrapper).status == "ok"
    assert isolated(tmp_path, monkeypatch, body, wrapper=("env", "ASKED=0")).status == "error"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (says(WINDOW, DONE), "ok", ""),
        (says(WINDOW, DONE, FAILED) + "; sys.exit(1)", "ok", "after the measurement: no trace"),
        (says(DONE), "error", "exit 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "oom_host", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "error", "SIGSEGV"),
        ("os.kill(os.getpid(), 40)", "error", "the cell ended with signal 40: no output"),
        ("print('last words'); sys.exit(3)", "error", "exit 3: last words"),
        ("raise RuntimeError('boom')", "error", "RuntimeError: boom"),
    ],
)
def test_every_end_has_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, reason: str
) -> None:
    outcome = isolated(tmp_path, monkeypatch, body)
    assert outcome.status == status
    assert reason in outcome.reason


PLAN = {
    "event": "plan",
    "plan": {"device": {}, "host": {"weights": 4}},
    "dtypes": {"weights": "float32"},
    "caveat": None,
    "num_params": 1,
    "flops_per_token": {"6p": 6.0, "paper": None},
    "tokens_per_step": 9,
}
NO_EVENTS = {
    "bytes": b"\xff\xfe plain \x00",
    "text": b"Traceback (most recent call last):",
    "nested": b"[" * 100_000,
    "digits": b"9" * 10_000,
    "surrogate": json.dumps({"event": "phase", "name": "\ud800"}).encode(),
    "list": b"[]",
    "nameless": b"{}",
    "numbered": b'{"event": 3}',
    "unknown": b'{"event": "rumour"}',
    "failed-fields": b'{"event": "failed"}',
    "failed-status": json.dumps(FAILED | {"status": "ok"}).encode(),
    "invalid-fields": b'{"event": "invalid"}',
    "invalid-type": b'{"event": "invalid", "reason": ["seed: got 3"]}',
    "losses-text": json.dumps(WINDOW | {"losses": ["1.0"]}).encode(),
    "losses-none": json.dumps(WINDOW | {"losses": []}).encode(),
    "seconds-zero": json.dumps(WINDOW | {"seconds": 0}).encode(),
    "seconds-nan": json.dumps(WINDOW | {"seconds": float("nan")}).encode(),
    "tokens-huge": json.dumps(WINDOW | {"num_tokens": 10**400}).encode(),
    "counters-list": json.dumps(DONE | {"counters": []}).encode(),
    "done-fields": b'{"event": "done"}',
    "plan-null": json.dumps(PLAN | {"plan": None}).encode(),
    "plan-text": json.dumps(PLAN | {"plan": {"device": {}, "host": {"weights": "4"}}}).encode(),
    "flops-text": json.dumps(PLAN | {"flops_per_token": {"6p": "6"}}).encode(),
    "prediction": b'{"event": "predicted", "prediction": {"step_s": 1.0}}',
    "told": b'{"event": "seen", "cell": "x", "told": [{}], "refusal": null, "step_s": null}',
}


@pytest.mark.parametrize("sent", NO_EVENTS.values(), ids=NO_EVENTS)
def test_what_is_no_event_is_the_cells_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    outcome = isolated(
        tmp_path, monkeypatch, f"os.write(fd, {sent!r} + bytes([10])); time.sleep(60)"
    )
    assert outcome.status == "error"
    assert outcome.reason.startswith("the cell sent ")
    assert "\n" not in outcome.reason


def test_what_is_no_event_costs_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"{says(PLAN, WINDOW, DONE)}; os.write(fd, b'gibberish' + bytes([10])); time.sleep(60)"
    outcome = isolated(tmp_path, monkeypatch, body)
    said = "after the measurement: the cell sent no JSON: b'gibberish'"
    assert (outcome.status, outcome.reason) == ("ok", said)


def test_a_refusal_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = says({"event": "invalid", "reason": "seed: got 3"})
    with pytest.raises(ValueError, match="seed: got 3"):
        isolated(tmp_path, monkeypatch, body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("os.write(fd, b'gibberish' + bytes([10]))", "error"),
        ("os.kill(os.getpid(), 40)", "error"),
        (says(PLAN, DONE), "error"),
        (says(PLAN, WINDOW, DONE), "ok"),
    ],
    ids=["gibberish", "signal", "nothing", "measured"],
)
def test_every_end_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str
) -> None:
    (tmp_path / "fake_cell.py").write_text(f"import os, sys\nfd = int(sys.argv[2])\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        study, "run_isolated", lambda _, *a, **b: run_isolated("fake_cell", *a, **b)
    )
    auto.register()
    (cell,) = command_of(["model=tiny", "logging=none", f"output_dir={tmp_path}"]).cells
    row = study.run_cell(cell, "[1]", Rows())
    assert row.status == status
    assert read_rows(tmp_path / "rows.jsonl") == [row]


def test_a_look_at_a_cell_nobody_asked_about_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"event": "outlook", "cell": "nobody's", "events": [], "refusal": None}
    monkeypatch.setattr(outlook, "run_isolated", lambda *_, **__: Outcome(events=[seen]))
    auto.register()
    assert outlook.outlooks(command_of(["model=tiny"]).cells) == {}


def test_what_was_measured_before_the_time_was_up_counts_and_the_row_says_what_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = says(WINDOW, DONE) + "; time.sleep(30)"
    found = isolated(tmp_path, monkeypatch, body, timeout_s=2.0)
    assert (found.status, found.reason.split(";")[0]) == (
        "ok",
        "after the measurement: killed after process.timeout_s = 2 s",
    )


def test_memory_is_sampled_once_training_has_touched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rarely a process so large that each look at it takes long is sampled otherwise."""
    monkeypatch.setattr("sweeps.memory.BACKOFF", 1e6)
    held = "held = b'1' * 300_000_000"
    body = "\n".join(("time.sleep(1)", held, says(WINDOW), "time.sleep(1)", says(DONE)))
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
    """pynvml with a device on which `used` bytes are in use, look after look, by processes with
    these pids as far as it tells."""
    looks = itertools.chain(used, itertools.repeat(used[-1]))
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=next(looks)),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids
        ],
    )


def crowd_of(monkeypatch: pytest.MonkeyPatch, *found: Any) -> memory.Crowd | None:
    monkeypatch.setattr(memory, "PATIENCE_S", 0.0 if len(found[0]) == 1 else 1.0)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*found))
    return memory.device_sampler("cuda").crowd()


def test_others_on_the_device_are_seen_whether_or_not_their_pids_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert crowd_of(monkeypatch, [600 << 20]) is None
    assert crowd_of(monkeypatch, [600 << 20], [os.getpid()]) is None
    assert (
        crowd_of(monkeypatch, [20 << 30, 20 << 30, 600 << 20]) is None
    )  # an earlier cell's process, on its way out
    assert crowd_of(monkeypatch, [600 << 20], [1]) == memory.Crowd(
        num_bytes=600 << 20, num_processes=1
    )
    hidden = crowd_of(monkeypatch, [20 << 30])
    assert str(hidden) == (
        "the GPU was shared with a process that is hidden from here, 21,474,836,480 bytes of it in "
        "use beside this cell; end what "
        "runs there, or choose another one with CUDA_VISIBLE_DEVICES"
    )
    assert "with 2 others, " in str(crowd_of(monkeypatch, [20 << 30], [1, 2]))
    assert memory.device_sampler("cpu").crowd() is None


def test_a_device_that_does_not_tell_of_its_memory_has_no_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And costs no row."""

    def silent(handle: int) -> None:
        raise RuntimeError("Not Supported")

    nvml = fake_nvml([5 << 30, 7 << 30])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    device = memory.Nvml()
    nvml.nvmlDeviceGetComputeRunningProcesses = silent
    assert device.sample(os.getpid()) == 2 << 30
    nvml.nvmlDeviceGetMemoryInfo = silent
    assert device.sample(os.getpid()) is None
    assert device.crowd() is None
    assert memory.Nvml().sample(os.getpid()) is None


@pytest.mark.parametrize("told", [True, False])
def test_the_pace_of_a_device_is_that_of_what_its_driver_tells(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Two looks two seconds apart; the energy counter stood at 9 J."""
    clocks, energy, reasons = iter((1980, 1400)), iter((9000, 1_009_000)), iter((0x1, 0x24))

    def answer(values: Iterator[int]) -> int:
        if not told:
            raise RuntimeError("not supported")
        return next(values)

    nvml = fake_nvml([0])
    nvml.NVML_CLOCK_SM = 1
    nvml.nvmlDeviceGetClockInfo = lambda handle, which: answer(clocks)
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: answer(energy)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: answer(reasons)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    device, times = memory.Nvml(), iter((5.0, 7.0))
    looks = [dataclasses.replace(device.look(), at_s=at_s) for at_s in times]
    shares = {"gpu_idle": 0.5, "sw_power_cap": 0.5, "sw_thermal": 0.5}
    known = Pace(sm_mhz=1690.0, power_w=500.0, throttle_reasons=shares)
    assert memory.pace(looks) == (known if told else Pace())
    assert memory.pace(looks[:1]).power_w is None
    assert (
        memory.pace([dataclasses.replace(look, reasons=0) for look in looks]).throttle_reasons == {}
    )


def test_a_cells_pace_is_that_of_its_windows_and_reaches_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, looked = [], tmp_path / "looked"

    class Device(NoDevice):
        def look(self) -> Look:
            seen.append("look")
            looked.touch()
            return Look(at_s=0.0, sm_mhz=1410, energy_mj=None, reasons=0x4)

    body = "\n".join(
        (
            says({"event": "phase", "name": "warm-up"}),
            "time.sleep(0.2)",
            says({"event": "phase", "name": "windows"}),
            f"while not os.path.exists({str(looked)!r}): time.sleep(0.01)",
            says(WINDOW, DONE),
            "time.sleep(0.2)",
        )
    )
    outcome = isolated(
        tmp_path,
        monkeypatch,
        body,
        device=Device(),
        on_event=lambda event: seen.append(event["event"]),
    )
    first, last = (seen.index("look"), len(seen) - 1 - seen[::-1].index("look"))
    assert [event for event in seen[:first] if event != "memory"] == ["phase", "phase"]
    assert last < seen.index("done")
    assert outcome.pace == Pace(sm_mhz=1410.0, throttle_reasons={"sw_power_cap": 1.0})
    assert isolated(tmp_path, monkeypatch, body).pace == Pace()
    auto.register()
    (cell,) = command_of(["model=tiny", "logging=none"]).cells
    row = study.row_of(cell, outcome, started_at="", machine={})
    assert (row.sm_mhz, row.power_w, row.throttle_reasons) == (1410.0, None, {"sw_power_cap": 1.0})


def test_what_a_cell_asks_of_its_process_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto.register()
    asked = ["process.omp_num_threads=3", "process.huge_pages=true"]
    (cell,) = command_of(["model=tiny", "logging=none", f"output_dir={tmp_path}", *asked]).cells
    sent: dict[str, Any] = {}
    monkeypatch.setattr(
        study,
        "run_isolated",
        lambda *_, **given: sent.update(given) or Outcome(status="error", reason="x"),
    )
    study.run_cell(cell, "", Rows())
    assert (sent["env"]["OMP_NUM_THREADS"], sent["env"]["THP_MEM_ALLOC_ENABLE"]) == ("3", "1")


@pytest.mark.parametrize(
    "used",
    [[600 << 20], [20 << 30], [600 << 20, 600 << 20, 20 << 30]],
    ids=["alone", "before", "later"],
)
@pytest.mark.parametrize("status", ["ok", "oom_device"])
def test_memory_that_ran_out_beside_others_is_tried_again(
    used: list[int],
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The row says so; a number, or no room on a device of its own, stands."""
    auto.register()
    (cell,) = command_of(["model=tiny", "logging=none", f"output_dir={tmp_path}"]).cells
    monkeypatch.setattr(memory, "PATIENCE_S", 0.0)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(used))
    monkeypatch.setattr(study, "device_sampler", lambda *_: memory.Nvml())
    losses = {"event": "losses", "losses": [1.0], "seconds": 1.0, "num_tokens": 18}
    outcome = Outcome(
        status=status, reason="" if status == "ok" else "CUDA out of memory", events=[losses]
    )
    monkeypatch.setattr(study, "run_isolated", lambda *_, **__: dataclasses.replace(outcome))
    row = study.run_cell(cell, "[1]", Rows())
    crowded = max(used) > 1 << 30 and (status == "oom_device" or len(used) == 1)
    assert row.crowd_device_bytes == (20 << 30 if crowded else None)
    assert ("the GPU was shared with" in row.reason) is crowded
    assert row.reason.startswith(outcome.reason)
    assert ("  machine.device: the GPU was shared" in capsys.readouterr().out) is (
        used == [20 << 30]
    )
    assert read_rows(tmp_path / "rows.jsonl") == [row]
    assert Rows().standing(cell) is not (crowded and status == "oom_device")
