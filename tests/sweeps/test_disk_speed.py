"""Drives against the simplest loop: all bytes are moved, nothing is left, and what cannot be
measured says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import disk
from engine.disk import STRIPE_BYTES
from engine.swap import PREFIX
from sweeps import ceilings, disk_speed
from sweeps.disk_speed import DiskSpeed, measure

NUM_BYTES = 2 * STRIPE_BYTES + 5


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for folder in found:
        folder.mkdir()
    return found


def test_each_folder_and_all_together_have_a_speed_each_way_and_nothing_is_left(folders):
    rows = measure(folders, NUM_BYTES, rounds=1)
    a, b = map(str, folders)
    names = [f"{name}, {does}" for name in (a, b, f"{a} + {b}") for does in ("write", "read")]
    assert [row.name for row in rows] == names
    assert all(
        row.reason is None and min(row.loop_gb_per_s, row.drives_gb_per_s) > 0 for row in rows
    )
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    assert len(measure(folders[:1], NUM_BYTES, rounds=1)) == 2
    assert measure([], NUM_BYTES) == []


def test_the_loop_moves_every_byte_of_every_file(folders):
    memory = memoryview(bytearray(os.urandom(5 * STRIPE_BYTES)))
    files = [os.open(folder / "file", os.O_RDWR | os.O_CREAT) for folder in folders]
    disk_speed._loop(files, memory, os.pwritev, 3)
    assert all((folder / "file").read_bytes() == memory for folder in folders)
    again = memoryview(bytearray(len(memory)))
    disk_speed._loop(files[:1], again, os.preadv, 3)
    assert again == memory
    os.truncate(files[0], STRIPE_BYTES + 1)
    with pytest.raises(OSError, match=f"^1 bytes were moved and not {STRIPE_BYTES}$"):
        disk_speed._loop(files[:1], again, os.preadv, 1)
    for file in files:
        os.close(file)


def test_the_first_round_does_not_count_and_the_fastest_loop_is_the_ceiling(folders, monkeypatch):
    """A second each in the first round; then 1, 2 and 4 ms for the drives and the two loops; read,
    the other loop is the faster."""
    written, read = [0.001, 0.002, 0.004], [0.001, 0.004, 0.002]
    taken = iter([*3 * [1.0], *3 * written, *3 * [1.0], *3 * read])
    monkeypatch.setattr(disk_speed, "_seconds", lambda work: (work(), next(taken))[1])
    whole = NUM_BYTES // STRIPE_BYTES * STRIPE_BYTES
    rows = measure(folders[:1], NUM_BYTES, rounds=3)
    for row in rows:
        assert row.drives_gb_per_s == pytest.approx(whole / 0.001 / 1e9)
        assert row.loop_gb_per_s == pytest.approx(whole / 0.002 / 1e9)
    assert tuple(row.at_a_time for row in rows) == disk_speed.IN_FLIGHT


def test_a_folder_that_cannot_be_measured_says_why_and_the_others_are(folders, monkeypatch):
    missing = folders[0] / "missing"
    first, *rest = measure([missing, folders[1]], NUM_BYTES, rounds=1)
    assert first.name == str(missing)
    assert "No such file" in first.reason
    assert [row.reason is None for row in rest] == [True, True, False]
    monkeypatch.setattr(disk, "_open", lambda path, _: (os.open(path, os.O_RDWR), False))
    (cached,) = measure(folders[:1], NUM_BYTES, rounds=1)
    assert (
        cached.reason == f"{folders[0]}: through the page cache, which copies every byte once more"
    )
    lines = ceilings._disk_lines([vars(row) for row in (first, cached)])
    assert [line.endswith(row.reason) for line, row in zip(lines[2:], (first, cached), strict=True)]


def test_the_table_has_the_share_of_the_loops_speed():
    row = DiskSpeed(name="/data, read", loop_gb_per_s=4.0, at_a_time=16, drives_gb_per_s=3.0)
    assert ceilings._disk_lines([vars(row)])[-1].split() == [
        "/data,",
        "read",
        "4.00",
        "16",
        "3.00",
        "75%",
    ]
    assert ceilings._disk_lines([]) == []


@pytest.mark.slow
def test_the_command_measures_the_folders_that_are_named(folders):
    tiny = ["--quick", "--num-elements", "20000", "--threads", "1", "--rounds", "1"]
    command = [sys.executable, "-m", "sweeps.ceilings", *tiny]
    (folders[0] / f"{PREFIX}thesis").write_text("mine")
    for more, count in ([], 0), (["--disk", *map(str, folders), "--disk-mib", "8"], 6):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        *lines, last = done.stdout.splitlines()
        assert len(json.loads(last)["disks"]) == count
        assert sum(line.endswith("%") and str(folders[0].parent) in line for line in lines) == count
        assert any("drives, in turns" in line for line in lines) == bool(count)
    assert [path.name for folder in folders for path in folder.iterdir()] == [f"{PREFIX}thesis"]
