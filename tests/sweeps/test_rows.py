"""No row is lost, no cell measured twice at once, no line taken for what it is not: with real
disks, locks and limits."""

import codecs
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import report
from analysis import rows as frames
from sweeps import auto, environment, lock, study, tuner, upload
from sweeps.command import Command, command_of
from sweeps.config import Cell
from sweeps.errors import one_line
from sweeps.isolate import Outcome
from sweeps.result import Row
from sweeps.rowfile import read_rows, row_of_line
from sweeps.rows import Rows
from sweeps.session import Session
from tests.e2e.test_sweeps_cli import SMALL
from tests.made_rows import framed, row, save

ROOT = Path(__file__).parents[2]
COMMITTED = (
    (ROOT / "analysis" / "results" / "double_buffering" / "2026-11-22_h200-16c_3fbbe9fd.jsonl")
    .read_text()
    .splitlines()
)
WINDOW = {"event": "losses", "first_step": 0, "seconds": 1.0, "num_tokens": 30, "losses": [7.0]}


def cell_in(folder: Path, *overrides: str) -> Cell:
    auto.register()
    (cell,) = (
        command_of(
            [
                "system=in_memory",
                "model=tiny",
                *SMALL,
                "logging=none",
                *overrides,
                f"output_dir={folder}",
            ]
        ).cells
        or []
    )
    return cell


def cells_of_file(path: Path) -> list[str]:
    return [one.cell for one in read_rows(path)]


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """The kernel lets this process write no byte of a file beyond that place: EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def bytes_read() -> int:
    """By this process, from files or their cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_last_row_without_its_newline_stays(tmp_path: Path, mark: bytes, before: int) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [row("zero3", [1.0], cell=name).to_json() for name in "ab"][: before + 1]
    path.write_bytes(mark + "\n".join(lines).encode())
    Rows().append(path, row("zero3", [1.0], cell="c"))
    assert cells_of_file(path) == [*"ab"[: before + 1], "c"]
    assert [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_is_cut_off_is_kept_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for torn in ('{"schema_version": 1, "cel', '{"schema_version": 1, "é'):
        with path.open("a", encoding="utf-8") as file:
            file.write(torn)
        Rows().append(path, row("zero3", [1.0], cell=torn[-1]))
    assert cells_of_file(path) == ["l", "é"]
    assert (tmp_path / "rows.jsonl.torn").read_text(encoding="utf-8").count(
        '{"schema_version": 1, "'
    ) == 2


def check_kept(path: Path, kept: Path, lost: Row, capsys: pytest.CaptureFixture[str]) -> None:
    """Appending fails in one line that names both files; the row is printed and kept, and the file
    is as it was."""
    before = path.read_bytes()
    with pytest.raises(OSError, match="the row of cell") as caught:
        Rows().append(path, lost)
    (file,) = kept.glob("row-*.jsonl")
    assert file.read_text() == capsys.readouterr().err == lost.to_json() + "\n"
    told = one_line(caught.value)
    assert str(path) in told
    assert str(file) in told
    assert "\n" not in told
    assert path.read_bytes() == before


def test_a_row_without_room_is_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "rows.jsonl", tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(kept))
    Rows().append(path, row("zero3", [1.0], cell="a", losses=[1.0] * 4000))
    with no_file_beyond(path.stat().st_size + 10):
        check_kept(path, kept, row("zero3", [1.0], cell="b"), capsys)
    Rows().append(path, row("zero3", [1.0], cell="c"))
    assert cells_of_file(path) == ["a", "c"]


def test_a_row_on_a_full_disk_is_printed_and_kept(
    tmp_path: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, kept = small_disk / "rows.jsonl", tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(kept))
    Rows().append(path, row("zero3", [1.0], cell="a", reason="x" * 59_000))
    check_kept(path, kept, row("zero3", [1.0], cell="b", losses=[1.0] * 4000), capsys)


def test_no_cell_starts_without_room_for_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "run_isolated", None)
    cell = cell_in(tmp_path / "out")
    with no_file_beyond(10_000), pytest.raises(OSError, match="no room for a row") as caught:
        study.run_cell(cell, "", Rows())
    assert str(cell.rows_path) in one_line(caught.value)
    study.tidy(cell.output_dir)
    assert not cell.output_dir.exists()


def test_a_file_that_is_damaged_meanwhile_costs_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_in(tmp_path)

    def damaging(*_: Any, **__: Any) -> Outcome:
        cell.rows_path.write_text("not a row\n")
        return Outcome(status="ok", events=[WINDOW])

    monkeypatch.setattr(study, "run_isolated", damaging)
    study.run_cell(cell, "", Rows())
    first, second = cell.rows_path.read_text().splitlines()
    assert first == "not a row"
    assert json.loads(second)["losses"] == [7.0]


HOLDER = """
import sys, time
from pathlib import Path
from sweeps import lock
with lock.held(Path(sys.argv[1]), time.monotonic(), print):
    print("held", flush=True)
    line = sys.stdin.readline()
    if line:
        time.sleep(0.3)
        Path(sys.argv[2]).write_text(line)
"""


@contextmanager
def holding(path: Path, rows: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of that file, until it has written the line on its stdin
    into `rows`."""
    command = [sys.executable, "-c", HOLDER, str(path), str(rows)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path, told = tmp_path / "lock", []
    with holding(path) as holder:
        with pytest.raises(lock.LockTimeoutError), lock.held(path, time.monotonic(), told.append):
            raise AssertionError("held twice")
        assert told[0].startswith(f"process {holder.pid} since 20")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lock.held(path, time.monotonic() + 60, told.append):
            assert path.read_text().startswith(f"process {os.getpid()} since ")
    assert not path.exists()


def test_a_cell_that_another_process_measures_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = cell_in(tmp_path)
    machine = environment.machine(cell.machine, None)
    theirs = study.row_of(
        cell, Outcome(status="ok", events=[WINDOW]), started_at="theirs", machine=machine
    )
    monkeypatch.setattr(study, "run_isolated", None)
    with holding(tmp_path / f".{cell.identity}.lock", cell.rows_path) as holder:
        assert holder.stdin is not None
        with pytest.raises(study.TimeIsUpError):
            study.run_cell(cell, "[1/1]", Rows(), time.monotonic())
        holder.stdin.write(theirs.to_json() + "\n")
        holder.stdin.close()
        assert study.run_cell(cell, "[1/1]", Rows()).started_at == "theirs"
        out = capsys.readouterr().out
        assert f"{cell.hash} is being measured by process {holder.pid} since 20" in out
        assert "skipped" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_two_rows_of_one_cell_are_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they were started in the same second, as those that have no room are."""
    cell = cell_in(tmp_path)
    refused = Outcome(status="wont_fit", reason="too large")
    rows = [study.run_cell(cell, "", Rows(), refused=refused) for _ in range(3)]
    assert len({upload.run_id(one) for one in rows}) == 3


def test_within_a_file_the_place_decides_and_not_the_clock(tmp_path: Path) -> None:
    late = row("zero3", status="timeout", reason="600 s", started_at="2026-11-23T08:00:00Z")
    stepped_back = [late, row("zero3", [2.9], started_at="2026-11-22T08:00:00Z")]
    first = save(tmp_path / "a.jsonl", stepped_back)
    assert list(frames.frame(first)["status"]) == ["ok"]
    other = save(tmp_path / "b.jsonl", [row("zero3", [3.1], started_at="2026-11-22T09:00:00Z")])
    files = list(frames.every_row(first, other)["file"])
    assert [files.index(one) for one in files] == [0, 1, 1]


def mutated(path: str, value: Any) -> str:
    """A committed row with another value at a dotted path; without the field where the value is
    `...`."""
    record = json.loads(COMMITTED[0])
    *parents, last = path.split(".")
    place = record
    for parent in parents:
        place = place[parent]
    place[last] = value
    if value is ...:
        del place[last]
    return json.dumps(record)


WRONG: list[tuple[str, Any]] = [
    *(
        (name, None)
        for name in (
            "losses",
            "step_s",
            "started_at",
            "config",
            "machine",
            "plan",
            "dtypes",
            "experiment",
        )
    ),
    *(
        (name, "text")
        for name in (
            "config",
            "machine",
            "plan",
            "losses",
            "num_params",
            "agrees",
            "counters",
            "window_counters",
        )
    ),
    *(
        (name, ...)
        for name in (
            "experiment",
            "cell",
            "config.measure",
            "config.system",
            "config.machine",
            "config.system.dtype",
        )
    ),
    *(
        (name, 1 << 63)
        for name in ("num_params", "batch_size", "peak_host_bytes", "plan.host.master")
    ),
    *((name, -1) for name in ("tokens_per_s", "num_params", "mfu", "peak_host_bytes", "tflops_6p")),
    *((name, 0) for name in ("tokens_per_s", "batch_size", "seq_len")),
    ("step_s", [0.0]),
    ("step_s", [1.0, "nan"]),
    ("tokens_per_s", 10**400),
    ("tokens_per_s", "100"),
    ("agrees", "yes"),
    ("preset", 1),
    ("schema_version", "1"),
    ("schema_version", True),
    ("status", ["ok"]),
    ("tokens_per_s", "nan"),
    ("config.system.depth", [1]),
    ("machine.num_cores", "many"),
    ("plan.device", [1]),
    ("config.measure.steps_per_window", "3"),
    ("counters", {"h2d_bytes": None}),
]


@pytest.mark.parametrize(
    ("path", "value"), WRONG, ids=[f"{path}={str(value)[:9]}" for path, value in WRONG]
)
def test_a_row_of_wrong_types_is_one_line_with_its_place(
    tmp_path: Path, path: str, value: Any
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{COMMITTED[1]}\n\n{mutated(path, value)}\n")
    with pytest.raises(ValueError, match="allowed") as caught:
        read_rows(file)
    told = str(caught.value)
    assert told.startswith(f"{file}: line 3 has ")
    assert path.split(".")[0] in told
    assert "\n" not in told
    assert len(told) < 600 + len(str(file))
    for read in (frames.frame, lambda source: upload.rows_in(source, "")):
        with pytest.raises(ValueError, match="line 3 has "):
            read(file)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        "ä".encode("latin-1"),
        b'{"a": "\\ud800"}',
    ],
    ids=["bytes", "deep", "long", "latin", "half a character"],
)
def test_a_line_that_is_no_json_is_one_line_with_its_place(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(COMMITTED[0].encode() + b"\n" + line + b"\n")
    with pytest.raises(
        ValueError, match=r"line 2 (is not (JSON|UTF-8)|has half a character)"
    ) as caught:
        read_rows(file)
    assert str(file) in str(caught.value)


def test_what_is_read_can_be_reported() -> None:
    """Every field of a row replaced by values of each kind: the file is refused, or the report is
    made of it."""
    accepted, refused = [], []
    for name in json.loads(COMMITTED[0]):
        for value in (None, "text", "nan", -1, 0, 5, True, [], {}, ...):
            try:
                accepted.append(row_of_line(mutated(name, value).encode(), "here"))
            except ValueError as error:
                refused.append(str(error))
    assert all(line.startswith("here has ") for line in refused)
    assert min(len(accepted), len(refused)) > 80
    for part in report.sections(framed(accepted)):
        assert report.markdown(*part)


def test_a_row_without_a_config_is_nobody_s_trial_and_tells_no_rates(tmp_path: Path) -> None:
    cell = cell_in(tmp_path, "system=megatrain")
    machine = environment.machine(cell.machine, None)
    known = study.row_of(cell, Outcome(), started_at="", machine=machine)
    save(cell.rows_path, [replace(known, config={}, plan={"rates": {"adamw_params": 1.0}})])
    assert study.known_rates(cell, Rows()) is None
    assert tuner.trials(cell, Rows()) == []


def test_every_committed_row_is_read_and_written_as_it_was() -> None:
    for file in sorted((ROOT / "analysis" / "results").rglob("*.jsonl")):
        for line, one in zip(file.read_text().splitlines(), read_rows(file), strict=True):
            record = json.loads(line)
            assert record.items() <= json.loads(one.to_json()).items()


def test_a_preset_that_is_a_number_is_text_in_its_row(tmp_path: Path) -> None:
    cell = cell_in(tmp_path)
    one = study.row_of(
        replace(cell, options={**cell.options, "preset": 1}), Outcome(), started_at="", machine={}
    )
    save(tmp_path / "rows.jsonl", [one])
    assert read_rows(tmp_path / "rows.jsonl")[0].preset == "1"


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks at it and appends to it; what others append, or change, is seen all the
    same."""
    cell = cell_in(tmp_path)
    machine = environment.machine(cell.machine, None)
    mine = study.row_of(
        cell, Outcome(status="error", events=[WINDOW]), started_at="", machine=machine
    )
    line = replace(mine, reason="x" * 20_000).to_json() + "\n"
    cell.rows_path.write_text(line * 100)
    monkeypatch.setattr(
        study, "run_isolated", lambda *_, **__: Outcome(status="error", events=[WINDOW])
    )
    before, rows = bytes_read(), Rows()
    for _ in range(5):
        study.run_cell(cell, "", rows)
    assert bytes_read() - before < 2 * len(line) * 100
    assert len(rows.of(cell)) == 105
    with cell.rows_path.open("a") as file:
        file.write(replace(mine, cell="theirs").to_json())
    assert rows.of(cell)[-1].cell == "theirs"
    cell.rows_path.write_text(line * 2)
    assert len(rows.of(cell)) == 2
    with cell.rows_path.open("r+") as file:
        file.write(line.replace("xx", "yy"))
    os.utime(cell.rows_path, ns=(1, 1))
    assert rows.of(cell)[0].reason.startswith("yy")
    assert rows.of(cell) == read_rows(cell.rows_path)


def test_a_report_that_fails_is_an_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cells = [cell_in(tmp_path), cell_in(tmp_path, "system=megatrain")]  # one alone has no picture
    machine = environment.machine(cells[0].machine, None)
    outcome = Outcome(status="ok", events=[WINDOW])
    for one in cells:
        row = study.row_of(one, outcome, started_at="", machine=machine)
        Rows().append(one.rows_path, row)
    (tmp_path / "report.png").write_text("the last report's")
    session = Session(began=0.0)
    session.cells = cells
    with no_file_beyond(20_000):
        assert session.finish(Command()) == 1
    assert (tmp_path / "report.png").read_text() == "the last report's"
    errors = capfd.readouterr().err.splitlines()
    assert any(line.startswith("error: ") and "report.png" in line for line in errors), errors
    assert (
        f"report: not made; make it again with python -m analysis report {cells[0].rows_path}"
        in errors
    )
