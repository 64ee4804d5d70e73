"""The command line where it is right: flags in any order, Hydra's sweeps, streams of any kind; and
what is refused in time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweeps import auto, ceilings, run
from sweeps.command import command_of as asked
from sweeps.command_line import mend_streams
from sweeps.isolate import verdict
from sweeps.rowfile import read_rows
from tests.e2e.test_sweeps_cli import ENVIRONMENT, ROOT, SMALL, command_of, sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_flags_stand_anywhere_and_hydra_gets_them_first() -> None:
    auto.register()
    command = asked(["system=megatrain", "--multirun", "system.depth=1,2", "seed=3"])
    assert [cell.options["depth"] for cell in command.cells or ()] == [1, 2]
    assert command.argv == ["--multirun", "system=megatrain", "system.depth=1,2", "seed=3"]


def test_a_glob_is_the_files_it_matches() -> None:
    auto.register()
    command = asked(["--multirun", "system=glob(in_memory*,exclude=*kept)"])
    assert [(cell.system, cell.options["compile"]) for cell in command.cells or ()] == [
        ("in_memory", False),
        ("in_memory", True),
    ]


def test_a_cell_alone_is_what_a_sweep_makes_of_it() -> None:
    auto.register()
    alone, swept = (asked([*flag, "system=zero3", "seed=2"]).cells for flag in ([], ["--multirun"]))
    assert alone == swept


def test_nonsense_in_a_model_is_refused_before_the_first_cell_of_a_sweep(tmp_path: Path) -> None:
    heads = "model.config.num_attention_heads=2,7"
    done = sweep(tmp_path / "out", "--multirun", *SMALL[:-3], heads, "system=in_memory")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("model.config: got {")
    assert "transformers says RuntimeError" in done.stderr
    assert done.stdout == "adhoc: looking at 2 cells\n"
    assert not (tmp_path / "out").exists()


def test_a_cell_alone_with_nonsense_in_its_model_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    done = sweep(
        tmp_path / "out", "system=in_memory", "model.config.rope_parameters.rope_type=spiral"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith("model.config: got {")
    assert not (tmp_path / "out").exists()


def test_a_cell_is_measured_where_no_stream_is_open(tmp_path: Path) -> None:
    """The next files and pipes that are opened would take the descriptors 0, 1 and 2, and prints
    would go into them."""
    command = subprocess.list2cmdline(
        command_of(tmp_path, "system=in_memory", *SMALL, "logging=none")
    )
    done = subprocess.run(
        ["sh", "-c", f"{command} <&- >&- 2>&-"], cwd=ROOT, env=ENVIRONMENT, timeout=280, check=False
    )
    assert done.returncode == 0
    assert [row.status for row in read_rows(tmp_path / "rows.jsonl")] == ["ok"]


def test_a_terminal_without_the_characters_gets_others() -> None:
    command = [sys.executable, "-m", "sweeps.plan", "system=in_memory"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "fits"
    assert "??" in done.stdout


def test_streams_that_are_open_stay_what_they_are() -> None:
    before = sys.stdout
    mend_streams()
    assert sys.stdout is before


def test_a_report_that_cannot_be_made_is_said_before_the_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in (("HYDRA_FULL_ERROR", "0"), ("MEGATRAIN_FULL_ERROR", "0")):
        monkeypatch.setenv(name, value)  # main sets them
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["run", f"output_dir={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as stop:
        run.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("command line: got no package matplotlib")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"x"', '{"matrix_peak_tflops": "fast"}', "\udcff"]
)
def test_broken_ceilings_are_one_line_and_measured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "ceilings.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    told = '{"gpu": null, "boot": null, "matrix_peak_tflops": 7.0, "matrix_sustained_tflops": 6.0}'
    monkeypatch.setattr(
        ceilings.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, told),
    )
    assert ceilings.cached_peaks(tmp_path, "cuda")["matrix_peak_tflops"] == 7.0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: got no ceilings")
    assert path.read_text().startswith("{")


def test_what_is_not_installed_is_unsupported() -> None:
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    lacking = ImportError("cannot import name 'fully_shard' from 'torch.distributed.fsdp'")
    assert verdict(lacking)[0] == "unsupported"
    assert "fully_shard" in verdict(lacking)[1]
    assert verdict(InductorError(InvalidCxxCompiler(), None))[0] == "unsupported"
    assert verdict(RuntimeError("something else"))[0] == "error"


def test_many_cells_are_refused_at_once() -> None:
    auto.register()
    started = time.process_time()
    with pytest.raises(ValueError, match="which makes more than 1000 cells"):
        asked(["--multirun", "seed=range(100000000)", "recipe.warmup_steps=range(100000000)"])
    assert time.process_time() - started < 20  # composing them takes months


def test_reading_runs_leaves_no_log(tmp_path: Path) -> None:
    from sweeps import runfile

    (tmp_path / "tmp").mkdir()
    broken = tmp_path / "run-x.wandb"
    broken.write_bytes(b"nothing")
    code = f"from analysis import rows\ntry:\n    rows.frame({str(broken)!r})\nexcept ValueError as error:\n    print(error)"
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert runfile.AGAIN.encode() in done.stdout
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_campaign_begins_every_study_and_ends_where_its_time_does(tmp_path: Path) -> None:
    """The loop of the Makefile; its `python` notes what it is asked for, and fails as told."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked; exit $(cat {tmp_path}/code)\n')
    python.chmod(0o755)

    def campaign(code: int, time_s: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / "asked").write_text("")
        (tmp_path / "code").write_text(str(code))
        given = [f"BIN={tmp_path}", f"TIME={time_s}", "SET=seed=7", "-o", ".venv/.installed"]
        command = ["make", "--no-print-directory", "campaign", *given]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def begun() -> list[str]:
        return (tmp_path / "asked").read_text().splitlines()

    assert campaign(0, 1000).returncode == 0
    assert begun()[0].startswith("-m sweeps.run +experiment=headline ")
    studies = {line.split("+ablation=")[1].split()[0] for line in begun()[1:]}
    elsewhere = {"ranks", "ranks_weak", "tier"}
    known = {path.stem for path in (ROOT / "conf/ablation").glob("*.yaml")}
    assert studies == known - elsewhere
    assert all("time_limit_s=" in line and line.endswith("seed=7") for line in begun())
    assert campaign(75, 1000).returncode == 0
    assert len(begun()) == 1 + len(studies)
    failed = campaign(2, 1000)
    assert failed.returncode
    assert "without an answer: experiment=headline ablation=" in failed.stdout
    assert len(begun()) == 1 + len(studies)
    assert campaign(130, 1000).returncode
    assert len(begun()) == 1
    late = campaign(0, 0)
    assert late.returncode == 0
    assert begun() == []
    assert late.stdout.startswith("TIME=0: it was up before experiment=headline")


@pytest.mark.parametrize("name", ["plan", "train", "upload"])
def test_a_command_that_reads_overrides_says_what_it_does(name: str) -> None:
    command = [sys.executable, "-m", f"sweeps.{name}", "model=nope", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n    python -m sweeps.{name} " in done.stdout
