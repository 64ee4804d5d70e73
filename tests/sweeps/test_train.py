"""One long run: stopped and gone on from, evaluated, mirrored; its states; and against a trainer
that nobody here wrote."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import blockfile
from engine.disk import Drives
from sweeps import train
from sweeps.generations import Generations, Position
from sweeps.training import duration

pytestmark = pytest.mark.slow

SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_attention_heads=2",
    "shape=quick",
    "shape.seq_len=16",
    "recipe.warmup_steps=5",
    "recipe.schedule=cosine",
    "data.max_bytes=65536",
    "logging=none",
    "train.export_dtype=float32",
]
STEPS = 24
SYSTEMS = ("megatrain", "in_memory", "zero3", "zero2", "fsdp2")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would become another process, which pytest would not see the end of."""
    monkeypatch.setenv(train.STARTED, "1")


def trained(folder: Path, *overrides: str) -> int:
    weights = f"train.export={folder / 'weights'}"
    return train.main([*SMALL, f"output_dir={folder}", weights, *overrides])


def logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log, without what a clock says."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith(("seconds", "_s"))} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights" / "model.safetensors")


def terminate_after(folder: Path, num_lines: int) -> threading.Thread:
    """Sends this process SIGTERM once the log has so many lines."""

    def watch() -> None:
        path, deadline = folder / "log.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists() and path.read_bytes().count(b"\n") >= num_lines:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_that_is_stopped_goes_on_bit_for_bit(system, tmp_path, capfd):
    given = [f"system={system}", f"train.steps={STEPS}", "train.save_every=7"]
    given += ["train.evaluate_every=6", "train.evaluate_tokens=64"]
    assert trained(tmp_path / "whole", *given) == 0
    watcher = terminate_after(tmp_path / "parts", 3)
    assert trained(tmp_path / "parts", *given) == train.STOPPED
    watcher.join()
    stopped = logged(tmp_path / "parts")[-1]["step"]
    assert 2 <= stopped < STEPS
    assert f"stopped (SIGTERM) and saved at step {stopped}" in capfd.readouterr().err
    assert trained(tmp_path / "parts", *given) == 0
    assert f"going on after step {stopped}" in capfd.readouterr().out
    lines = logged(tmp_path / "whole")
    assert logged(tmp_path / "parts") == lines
    assert [line["step"] for line in lines if "heldout_loss" in line] == [0, 6, 12, 18, 24]
    assert all(line["gradient_norm"] > 0 for line in lines if "loss" in line)
    one, other = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    states = sorted(path.name for path in (tmp_path / "parts" / "states").iterdir())
    assert states == ["step-00000021", "step-00000024"]
    assert trained(tmp_path / "parts", *given) == 0  # there is nothing left to do
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run that took its steps, with two states."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    os.environ[train.STARTED] = "1"
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=6", "train.save_every=3"]) == 0
    return folder


def copied(ended: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(ended), str(to)], check=True)
    return to


@pytest.mark.parametrize(
    "file", ["position.json", "state/state.json", "state/block-0001.safetensors"]
)
def test_a_torn_state_is_named_and_the_one_before_is_gone_on_from(file, ended, tmp_path, capfd):
    folder = copied(ended, tmp_path / "run")
    torn = folder / "states" / "step-00000006" / file
    torn.write_bytes(torn.read_bytes()[:-3])
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=6", "train.save_every=3"]) == 0
    told = capfd.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("not used: ")
    assert "step-00000006" in line
    assert "going on after step 3" in told.out
    assert logged(folder) == logged(ended)
    assert len(list((folder / "states").iterdir())) == 2
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=6"]) == 0
    told = capfd.readouterr()
    assert "going on after step 6" in told.out
    assert not told.err


class Saved:
    """A system whose state is a word."""

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "word").write_text("whole")

    def resume(self, folder: Path) -> None:
        if (folder / "word").read_text() != "whole":
            raise ValueError(f"{folder} is torn")


def test_torn_states_take_no_place_of_those_that_are_kept(tmp_path):
    """As many as are kept were torn: the one that is gone on from stays beside the next."""
    system: Any = Saved()
    states = Generations(tmp_path, keep=3)
    for step in (6, 9, 12):
        states.begin(system, Position(step=step), room=0)
    for step in (9, 12):
        (tmp_path / f"step-{step:08}" / "state" / "word").write_text("torn")
    states = Generations(tmp_path, keep=2)
    place = states.resume(system)
    assert place is not None
    assert place.step == 6
    states.begin(system, Position(step=8), room=0)
    assert [path.name for path in states.found()] == ["step-00000008", "step-00000006"]


def test_a_place_that_was_changed_is_not_gone_on_from(ended, tmp_path, capfd):
    folder = copied(ended, tmp_path / "run")
    place = folder / "states" / "step-00000006" / "position.json"
    place.write_text(place.read_text().replace('"sequence": 12', '"sequence": 11'))
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=6"]) == 0
    assert f"{place} is not as it was written" in capfd.readouterr().err


def test_a_changed_state_of_a_rival_is_named_too(tmp_path, capfd):
    given = [*SMALL, f"output_dir={tmp_path}", "system=in_memory", "train.save_every=3"]
    assert train.main([*given, "train.steps=6"]) == 0
    changed = tmp_path / "states" / "step-00000006" / "state" / "state.pt"
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    before = logged(tmp_path)
    assert train.main([*given, "train.steps=6"]) == 0
    assert f"{changed} is not the file that was saved" in capfd.readouterr().err
    assert logged(tmp_path) == before


def test_what_a_killed_run_left_half_written_goes(ended, tmp_path):
    folder = copied(ended, tmp_path / "run")
    states = folder / "states"
    (states / "step-00000003").rename(states / ".step-00000003")
    (states / "step-00000009" / ".state-abc").mkdir(parents=True)
    (states / "mine").mkdir()
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=6", "train.save_every=3"]) == 0
    assert sorted(path.name for path in states.iterdir()) == ["mine", "step-00000006"]


def test_the_log_says_what_was_done(ended):
    lines, (cell, _) = logged(ended), train.compose_train([*SMALL, "train.steps=6"])
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["lr"] for line in lines] == [cell.recipe.lr_at(step) for step in range(6)]
    assert [line["tokens"] for line in lines] == [32 * step for step in range(1, 7)]
    told = [json.loads(line) for line in (ended / "log.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in told]
    assert 0 < seconds[0] < seconds[-1], "a step's own time with it"
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("step_s", "watts", "told"),
    [
        (None, 700.0, ""),
        (3.6, None, ", about 1 h 0 min"),
        (36.0, 700.0, ", about 10 h 0 min and at most 7.00 kWh of the device"),
    ],
)
def test_time_and_energy_are_told_where_they_are_known(step_s, watts, told):
    assert train.time_and_energy(1000, step_s, watts) == told


def test_memory_is_told_before_the_first_step(tmp_path, capfd):
    """All of it is the host's where there is no device."""
    assert trained(tmp_path, "train.steps=6", "machine.host_bytes=4000000000") == 0
    assert " of 4.0 GB on the host\n" in capfd.readouterr().out
    plan = {"host": {"a": 10**9, "b": 10**9}, "device": {"c": 5 * 10**8}}
    told = train.memory_use(plan, {"host_bytes": 4 * 10**9, "device_bytes": 10**9})
    assert told == "2.00 of 4.0 GB on the host, 0.50 of 1.0 GB on the device"


def test_what_drives_hold_is_told_and_what_goes_wrong_there_names_the_file(
    tmp_path, capfd, monkeypatch
):
    """And the same command then goes on, to the losses of a run that nothing happened to."""
    (tmp_path / "drive").mkdir()
    plain = ["system=megatrain", "train.steps=8", "train.save_every=4"]
    tier = ["system.disk_blocks=-2", f"machine.nvme_path={tmp_path / 'drive'}"]
    assert trained(tmp_path / "plain", *plain) == 0
    capfd.readouterr()
    write, calls = Drives.write, list[int]()

    def cut(drives: Drives, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 5 * 4:  # blocks
            os.truncate(next((tmp_path / "drive").glob("*/state")), 4096)
        write(drives, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Drives, "write", cut)
        assert trained(tmp_path / "run", *plain, *tier) == 2
    out, err = capfd.readouterr()
    assert "GB of optimizer state; the run writes" in out
    last = err.splitlines()[-1]
    assert str(tmp_path / "drive") in last
    assert "output_dir" not in last, "that is not what is wrong"
    assert last.endswith("; the same command goes on from the last saved state, if there is one")
    assert trained(tmp_path / "run", *plain, *tier) == 0
    losses = [
        [line["loss"] for line in logged(tmp_path / name) if "loss" in line]
        for name in ("plain", "run")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_a_run_without_a_usable_state_is_not_begun_anew(ended, tmp_path, capfd):
    folder = copied(ended, tmp_path / "run")
    for path in folder.glob("states/*/position.json"):
        path.write_text("{}")
    before = (folder / "log.jsonl").read_bytes()
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=6"]) == 2
    assert "2 states" in capfd.readouterr().err.splitlines()[-1]
    assert (folder / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        "seed=1",
        "shape.seq_len=8",
        "system=in_memory",
        "system.dtype=float32",
        "data.heldout_fraction=0.3",
        "model.config.rms_norm_eps=0.1",
    ],
)
def test_a_folder_with_another_run_is_refused(other, ended, tmp_path, capfd):
    folder = copied(ended, tmp_path / "run")
    assert train.main([*SMALL, f"output_dir={folder}", "train.steps=9", other]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"output_dir: got {folder}, which has states of a run with ")
    assert logged(folder) == logged(ended)


def test_a_finished_run_can_be_made_longer(ended, tmp_path):
    folder = copied(ended, tmp_path / "run")
    assert (
        train.main([*SMALL, f"output_dir={folder}", "train.steps=8", "recipe.total_steps=6"]) == 0
    )
    assert [line["step"] for line in logged(folder)] == list(range(1, 9))


def test_weights_of_a_shorter_run_are_not_taken_for_those_of_a_longer_one(tmp_path, capfd):
    assert trained(tmp_path, "train.steps=6") == 0
    before = weights(tmp_path)["model.norm.weight"]
    assert trained(tmp_path, "train.steps=6") == 0  # done already, and written by itself
    assert trained(tmp_path, "train.steps=8") == 2
    assert "which exists, allowed a new folder" in capfd.readouterr().err.splitlines()[-1]
    assert len(logged(tmp_path)) == 6
    (tmp_path / "weights").rename(tmp_path / "shorter")
    assert trained(tmp_path, "train.steps=8") == 0
    assert not torch.equal(weights(tmp_path)["model.norm.weight"], before)


def test_a_run_by_epochs_is_not_gone_on_with_in_other_batches(tmp_path, capfd):
    given = [*SMALL, f"output_dir={tmp_path}", "train.epochs=0.01", "train.save_every=0"]
    assert train.main(given) == 0
    assert train.main([*given, "shape.batch_size=4"]) == 2
    told = "a run with shape.batch_size 2, allowed shape.batch_size 4"
    assert told in capfd.readouterr().err


def test_a_folder_that_another_run_is_in_is_refused(ended, capfd):
    command = [sys.executable, "-c", HOLD, str(ended / ".train.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        assert train.main([*SMALL, f"output_dir={ended}", "train.steps=9"]) == 2
        holder.communicate()
    assert f"where process {holder.pid} since" in capfd.readouterr().err


HOLD = """
import sys, math
from sweeps import lock
with lock.held(__import__("pathlib").Path(sys.argv[1]), math.inf, print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_signal_before_the_first_step_leaves_nothing(tmp_path, monkeypatch, capfd):
    def interrupted(self: train._Run, stop: train.Stop) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    monkeypatch.setattr(train._Run, "go", interrupted)
    assert train.main([*SMALL, f"output_dir={tmp_path / 'run'}", "train.steps=9"]) == train.STOPPED
    assert "nothing new was saved" in capfd.readouterr().err


def test_a_signal_that_a_library_swallows_is_still_one(tmp_path, monkeypatch, capfd):
    """As OmegaConf's do when it comes while a config is composed."""

    def interrupted(overrides: list[str]) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            raise AttributeError from None

    monkeypatch.setattr(train, "compose_train", interrupted)
    assert trained(tmp_path) == train.STOPPED
    assert "nothing new was saved" in capfd.readouterr().err


def test_time_that_is_up_saves(tmp_path, capfd):
    given = ["train.steps=100000", "time_limit_s=4", "train.save_every=0"]
    assert trained(tmp_path, *given) == train.STOPPED
    steps = logged(tmp_path)[-1]["step"]
    assert (tmp_path / "states" / f"step-{steps:08}" / "state").is_dir()
    assert "time_limit_s is up" in capfd.readouterr().err


def test_a_step_is_evaluated_once_and_the_time_of_a_state_is_kept_free(tmp_path, monkeypatch):
    """Though the time is up after an evaluation, and a state is being written beside training all
    the time, which takes seconds."""
    write = blockfile.write

    written = []

    def slow(*given: Any) -> tuple[int, str]:
        time.sleep(0.6)
        found = write(*given)
        written.append(time.monotonic())
        return found

    monkeypatch.setattr(blockfile, "write", slow)
    began = time.monotonic()
    given = ["train.steps=100000", "train.save_every=10", "train.evaluate_every=1"]
    assert trained(tmp_path, *given, "train.evaluate_tokens=16", "time_limit_s=15") == train.STOPPED
    assert written[-1] - began < 15.8
    evaluated = [line["step"] for line in logged(tmp_path) if "heldout_loss" in line]
    assert len(set(evaluated)) == len(evaluated)
    assert max(evaluated) == logged(tmp_path)[-1]["step"] > 10


def test_epochs_are_counted_in_sequences(tmp_path):
    assert trained(tmp_path, "train.epochs=0.01", "train.save_every=0") == 0
    cell, asked = train.compose_train([*SMALL, "train.epochs=0.01"])
    sequences = math.floor(65536 * 0.98) // 17
    assert cell.recipe.total_steps == math.ceil(0.01 * sequences / 2) == len(logged(tmp_path))
    assert (asked.steps, asked.epochs) == (None, 0.01)


def test_the_log_is_mirrored_to_wandb(tmp_path):
    """Offline, of two starts, the second of which has the whole log."""
    given = ["train.steps=9", "train.save_every=0", "logging=wandb"]
    assert trained(tmp_path, "train.steps=6", "recipe.total_steps=9", *given[1:]) == 0
    (tmp_path / "weights").rename(tmp_path / "shorter")
    assert trained(tmp_path, *given) == 0
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    done = subprocess.run(command, capture_output=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert len(history) == 9
    for item, line in zip(history, logged(tmp_path), strict=True):
        assert str(line["loss"]) in json.dumps(item)


def test_a_disk_without_room_costs_a_state_and_not_the_run(tmp_path, monkeypatch, capfd):
    """No write succeeds but those of the last one."""
    write = blockfile.write

    def full(path: Path, *given: Any) -> tuple[int, str]:
        if "step-00000009" not in str(path):
            raise OSError(28, "No space left on device")
        return write(path, *given)

    monkeypatch.setattr(blockfile, "write", full)
    assert trained(tmp_path, "train.steps=9", "train.save_every=2") == 0
    assert "not saved: " in capfd.readouterr().err
    assert (tmp_path / "states" / "step-00000009" / "state").is_dir()


def test_a_last_state_that_is_not_saved_is_no_success(tmp_path, monkeypatch, capfd):
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blockfile, "write", full)
    assert trained(tmp_path, "train.steps=6") == 1
    assert "the last state was not saved" in capfd.readouterr().err
    assert weights(tmp_path)  # for which there was room
    assert not list((tmp_path / "states").glob("*/state"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (90061, "1 d 1 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
