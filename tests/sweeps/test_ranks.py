"""A cell of several ranks: what becomes of it when one of them dies, hangs or has no memory, what it
measures, what it is known by, and which numbers are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine import Machine
from sweeps import auto, cell, environment, outlook, ranks, train
from sweeps.command import command_of
from sweeps.config import cell_from
from sweeps.identity import digest, hashed, in_force
from sweeps.isolate import Outcome, run_isolated
from sweeps.memory import Look, NoDevice, Several
from sweeps.outlook import refusal_of
from sweeps.rowfile import read_rows
from sweeps.rows import Rows
from sweeps.study import row_of, run_cell
from tests.models import H200
from tests.sweeps.test_config import composed
from tests.sweeps.test_isolate import isolated, says

pytestmark = pytest.mark.slow

RANK = """
import os, signal, sys, time
from sweeps import ranks
from sweeps.events import Emitter
from sweeps.isolate import guarded

def work():
    import torch
    import torch.distributed as dist
    with ranks.joined("cpu", 60.0, emit):
        say("phase", name="setup")
        at(0)
        for step in (1, 2):
            dist.all_reduce(torch.ones(1))
            at(step)
        dist.all_reduce(torch.ones(1))
        say("losses", first_step=0, losses=[1.0], seconds=1.0, num_tokens=9, counters={})
        say("done", counters={}, allocated_bytes=None, reserved_bytes=None)

def at(step):
    if (ranks.rank(), step) == (%d, %d):
        %s

emit = Emitter(os.open(sys.argv[2], os.O_WRONLY))
say = ranks.heard(emit)
sys.exit(guarded(work, ranks.naming(emit)))
"""
"""A rank that joins the others, trains two steps, and does something in one of them."""


def ran(tmp_path: Path, rank: int, step: int, does: str, timeout_s: float = 60.0) -> Outcome:
    """What becomes of two such ranks, under the launcher that cells have."""
    config = {"process": {"num_gpus": 1, "num_cpu_ranks": 2}}
    return launched(tmp_path, RANK % (rank, step, does), config, timeout_s)


def launched(tmp_path: Path, text: str, config: Mapping[str, Any], timeout_s: float) -> Outcome:
    """What becomes of a cell whose two ranks run `text`; no process is left."""
    (tmp_path / "fake_rank.py").write_text(text)
    path = os.pathsep.join((str(tmp_path), *sys.path))
    before = set(psutil.Process().children(recursive=True))  # of other tests in this process
    with ranks.started(2, timeout_s, "fake_rank") as (module, variables):
        folder = Path(variables["TMPDIR"])
        outcome = run_isolated(
            module,
            config,
            log=tmp_path / "log",
            timeout_s=timeout_s,
            device=NoDevice(),
            on_event=lambda event: None,
            env={**variables, "PYTHONPATH": path},
            num_ranks=2,
        )
    assert not folder.exists()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, "no process is left behind"
    return outcome


@pytest.mark.parametrize(
    ("rank", "step", "does", "status", "reason"),
    [
        (
            1,
            0,
            "os.kill(os.getpid(), signal.SIGKILL)",
            "oom_host",
            "rank 1 was killed with SIGKILL",
        ),
        (
            0,
            2,
            "os.kill(os.getpid(), signal.SIGKILL)",
            "oom_host",
            "rank 0 was killed with SIGKILL",
        ),
        (
            1,
            1,
            "raise torch.OutOfMemoryError('CUDA out of memory')",
            "oom_device",
            "rank 1: CUDA out of memory",
        ),
    ],
    ids=["killed-in-setup", "killed-in-a-step", "no-memory"],
)
def test_a_rank_that_ends_is_the_cells_status(
    rank: int, step: int, does: str, status: str, reason: str, tmp_path: Path
) -> None:
    does = does.replace("raise torch.", "import torch; raise torch.")
    outcome = ran(tmp_path, rank, step, does)
    assert (outcome.status, outcome.timed_out) == (status, False)
    assert outcome.reason.startswith(reason), outcome.reason
    assert "\n" not in outcome.reason


def test_who_ended_without_a_word_was_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others raise then comes of it; of those that spoke the first counts."""
    words = {"event": "failed", "status": "error", "reason": "rank 0: no peer", "rank": 0}
    first = {**words, "status": "oom_device", "reason": "rank 1: full", "rank": 1}
    ended = [{"event": "rank_ended", "rank": number, "exit_code": code} for number, code in ENDS]
    body = f"print('last words'); {says(words, *ended)}; sys.exit(1)"
    outcome = isolated(tmp_path, monkeypatch, body)
    assert outcome.status == "error"
    assert outcome.reason.startswith("rank 1 ended with exit 3: last words (all of it in ")
    outcome = isolated(tmp_path, monkeypatch, f"{says(first, words, *ended)}; sys.exit(1)")
    assert (outcome.status, outcome.reason) == ("oom_device", "rank 1: full")


ENDS = ((0, 1), (1, 3))
"""Ranks and their exit codes."""


def test_a_rank_that_hangs_is_named_when_time_is_up(tmp_path: Path) -> None:
    outcome = ran(tmp_path, 1, 1, "time.sleep(600)", timeout_s=20.0)
    assert (outcome.status, outcome.timed_out) == ("timeout", True)
    assert outcome.reason.startswith(
        "rank 1 of 2 hung, and the others waited for it; killed after process.timeout_s = 20 s"
    ), outcome.reason


KILLED = """
import os, signal, sys
from engine import state
from sweeps import cell, ranks

write = state._write_block

def killed(path, tensors):
    if ranks.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, tensors)

state._write_block = killed
sys.exit(cell.main())
"""
"""A cell whose second rank dies when it writes its part of a state."""


def test_a_rank_that_is_killed_while_it_saves_is_the_cells_status(tmp_path: Path) -> None:
    auto.register()
    asked = ["system=megatrain", *SMALL, *SAVING, f"output_dir={tmp_path}"]
    one = command_of([*asked, "process.num_cpu_ranks=2"]).cells[0]
    outcome = launched(tmp_path, KILLED, one.config, timeout_s=120.0)
    assert (outcome.status, outcome.timed_out) == ("oom_host", False)
    assert outcome.reason.startswith("rank 1 was killed with SIGKILL"), outcome.reason
    assert not list(tmp_path.glob(".state-*/state.json")), "no state is whole"


SMALL = [
    "model=tiny",
    "shape=quick",
    "measure=brief",
    "logging=none",
    "machine.device=cpu",
    "model.config.num_hidden_layers=1",
]


def test_a_cell_is_trained_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """One row, of the whole batch's losses and norms; the engine saves a state beside its steps."""
    auto.register()
    asked = [*SMALL, "measure.heldout_tokens=128", f"output_dir={tmp_path}"]
    alone = command_of([*asked, "system=in_memory"]).cells[0]
    two = [*asked, "process.num_cpu_ranks=2"]
    plain = command_of([*two, "system=in_memory"]).cells[0]
    saving = command_of([*two, "system=megatrain", *SAVING]).cells[0]
    one, *rows = (run_cell(each, "", Rows()) for each in (alone, plain, saving))
    for row in rows:
        assert [row.status, one.status] == ["ok", "ok"], (row.reason, one.reason)
        assert row.agrees
        assert row.max_loss_difference, "with the row of one rank, not with itself"
        assert row.losses == pytest.approx(one.losses, abs=2e-3)
        assert row.gradient_norms == pytest.approx(one.gradient_norms, rel=2e-2)
        assert (row.num_ranks, one.num_ranks, one.rank_host_bytes) == (2, 1, None)
        assert row.tokens_per_s is not None
        assert 0 < (row.rank_host_bytes or 0) < (row.peak_host_bytes or 0)
    assert rows[0].heldout_loss == pytest.approx(one.heldout_loss, abs=2e-2)
    assert read_rows(tmp_path / "rows.jsonl") == [one, *rows]
    assert rows[1].counters["saved_bytes"] > 12 * (one.num_params or 0)
    assert rows[1].counters["resume_s"] > 0
    assert rows[1].counters["resumed_difference"] == 0
    assert not list(tmp_path.glob(".state-*"))


def test_a_rank_that_raises_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the others; `ranks.joined` ends its process."""
    for is_rank, raises, closed in ((True, True, 0), (True, False, 1), (False, True, 1)):
        monkeypatch.setattr(ranks, "is_rank", lambda is_rank=is_rank: is_rank)
        calls: list[str] = []
        system = SimpleNamespace(close=lambda calls=calls: calls.append("close"))
        with contextlib.suppress(MemoryError), cell.given_back(system):
            if raises:
                raise MemoryError
        assert len(calls) == closed


def test_one_rank_is_the_cell_that_it_was_and_more_are_others() -> None:
    alone, two = composed("system=zero3"), composed("system=zero3", "process.num_cpu_ranks=2")
    config = {**alone.config, "process": dict(alone.config["process"])}
    for name in ("num_gpus", "num_cpu_ranks"):
        del config["process"][name]
    assert digest(hashed(config)) == alone.hash != two.hash
    assert in_force(config) == in_force(alone.config) != in_force(two.config)
    assert two.spec().num_ranks == 2


SAVING = ["measure.save=true", "measure.windows=1", "measure.steps_per_window=2"]
TWO = ("system=zero3", "process.num_cpu_ranks=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("system=zero3", "process.num_cpu_ranks=3"),
            "process.num_cpu_ranks: got 3, allowed a divisor of the 2 sequences of a micro-batch "
            "(shape.batch_size / num_micro_batches); change one of them",
        ),
        (
            (*TWO, "shape.num_micro_batches=2"),
            "process.num_cpu_ranks: got 2, allowed a divisor of the 1 sequences",
        ),
        (
            ("system=torchao_offload", "process.num_cpu_ranks=2"),
            "process.num_cpu_ranks: got 2, allowed 1 with system torchao_offload, which trains in "
            "one process; leave it out or choose among in_memory, megatrain, zero3, zero2, fsdp2",
        ),
        (
            ("system=zero3", "process.num_gpus=2"),
            "process.num_gpus: got 2, allowed 1 with machine.device=cpu; give "
            "process.num_cpu_ranks",
        ),
        (
            (*TWO, *SAVING),
            "measure.save: got true with process.num_cpu_ranks=2, allowed with one process or with "
            "system megatrain, for several of zero3 write no state; leave one of them out",
        ),
        (("process.num_gpus=0",), "process.num_gpus: got 0, allowed >= 1; give a larger number"),
        (("process.num_cpu_ranks=-1",), "process.num_cpu_ranks: got -1, allowed >= 1"),
        (("process.num_gpus=two",), "process.num_gpus: got 'two', allowed a value of type int"),
        (("process.num_gpus=1.5",), "process.num_gpus: got 1.5, allowed a value of type int"),
        (("process.num_gpus=true",), "process.num_gpus: got True, allowed a value of type int"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_number_of_ranks_that_cannot_be_is_one_line(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        composed("shape=quick", *overrides)
    assert "\n" not in str(error.value)


def test_a_machine_with_fewer_gpus_or_other_processes_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(auto, "device", lambda: "cuda")
    many = ("system=zero3", "machine.device=cuda", "shape=b32x1024")
    for there, asked, allowed in (
        (4, 16, "1 to 8, of which torch sees 4 here"),
        (16, 32, "1 to 16, of which torch sees 16 here"),
        (1, 2, "1"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        said = f"^process.num_gpus: got {asked}, allowed {allowed}; give fewer$"
        with pytest.raises(ValueError, match=said):
            composed(*many, f"process.num_gpus={asked}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for asked in (4, 8):
        assert composed(*many, f"process.num_gpus={asked}").spec().num_ranks == asked
    said = "process.num_cpu_ranks: got 2, allowed 1 with machine.device=cuda; give process.num_gpus"
    with pytest.raises(ValueError, match=said):
        composed("system=zero3", "machine.device=cuda", "process.num_cpu_ranks=2")


@pytest.mark.parametrize("system", ["megatrain_fast", "zero3"])
def test_what_more_gpus_would_do_is_predicted_and_not_run(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of two, whose rates are known; of rivals there is no prediction."""
    card = {"gpu": "NVIDIA H200", "num_gpus": 2, "device_bytes": 150 << 30}
    monkeypatch.setattr(environment, "gpu", lambda: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # it may ask for the number
    monkeypatch.setattr(auto, "device", lambda: "cuda")
    told = {}
    for num in (2, 8):
        one = composed(
            f"system={system}",
            "model=qwen2.5-3b",
            "machine.device=cuda",
            f"machine.host_bytes={1 << 40}",
            "shape=b32x1024",
            f"process.num_gpus={num}",
        )
        machine = Machine(rates=NODE, device_memory=150 << 30, host_memory=1 << 40)
        told[num] = outlook.outlook_of(outlook.built(one, machine=machine), one)
    assert told[2].refusal is None
    assert told[8].refusal == (
        "process.num_gpus: got 8, which is more than the 2 of this machine: such a cell is "
        "predicted, where its system is the engine, and not run"
    )
    if system == "zero3":
        assert told[8].prediction is None
        return
    steps = [told[num].prediction["step_s"] for num in (2, 8)]
    assert 2 < steps[0] / steps[1] < 4
    row = row_of(one, told[8].outcome, started_at="2026", machine=card)
    assert (row.status, row.plan["step_s"], row.num_ranks) == ("wont_fit", steps[1], 8)


NODE = dataclasses.replace(H200, peer_bytes=3.6e11)


def test_a_study_of_ranks_goes_beyond_the_gpus_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are several, or nothing would be known of what they say to each other."""
    for there, asked in ((1, "1"), (2, "1,2,4,8"), (8, "1,2,4,8")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        assert auto.ranks("cuda") == asked


def test_a_run_of_days_is_of_one_process() -> None:
    said = "process.num_cpu_ranks: got 2, allowed 1, for a run trains in one process; leave it out"
    with pytest.raises(ValueError, match=f"^{said}$"):
        train.require_one_process(composed(*TWO))
    train.require_one_process(composed())


def test_ranks_share_the_host() -> None:
    """What each plans to hold there counts as often as there are ranks."""
    from baselines.registry import build

    cells = [composed("system=zero3", f"process.num_cpu_ranks={num}") for num in (1, 2)]
    plans = [build(each.system, each.spec()).plan() for each in cells]
    config = {**cells[1].config}
    room = plans[1].host_bytes + plans[1].device_bytes
    for has, fits in ((2 * room, True), (2 * room - 1, False)):
        config["machine"] = {**config["machine"], "host_bytes": has}
        assert (refusal_of(plans[1], cell_from(config)) is None) is fits


def test_the_devices_of_ranks_are_looked_at_together() -> None:
    class Device(NoDevice):
        def __init__(self, used: int) -> None:
            self.used = used

        def look(self) -> Look:
            return Look(at_s=1.0, sm_mhz=self.used, energy_mj=5 * self.used, reasons=self.used)

        def sample(self, pid: int) -> int:
            return self.used

    devices = Several([Device(1000), Device(2000)])
    assert devices.sample(1) == 2000
    assert devices.look() == Look(at_s=1.0, sm_mhz=1500, energy_mj=15000, reasons=1000 | 2000)
    assert devices.crowd() is None
    assert Several([NoDevice()]).look() is Several([NoDevice()]).sample(1) is None
