"""A row names no path of its machine."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import pytest

from sweeps.config import Cell
from sweeps.environment import ROOT
from sweeps.identity import published
from sweeps.isolate import Outcome
from sweeps.places import named
from sweeps.study import row_of
from tests.sweeps.test_config import composed


@pytest.fixture
def cell(monkeypatch) -> Cell:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/alice/cache")
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/tmp of alice")
    monkeypatch.setattr(sys, "prefix", "/opt/alice/venv")
    return dataclasses.replace(
        composed("machine.nvme_path=/nvme", "machine.checkout='~/clone'"),
        output_dir=Path("/home/alice/my  out"),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("see /home/alice/my  out/logs/zero3-1.log", "see logs/zero3-1.log"),
        ("see /home/alice/my out/logs/zero3-1.log (all)", "see logs/zero3-1.log (all)"),
        ("no room in /home/alice/my  out: stop", "no room in output_dir: stop"),
        (
            "system.nvme_path: got /nvme, allowed",
            "system.nvme_path: got machine.nvme_path, allowed",
        ),
        (
            "the disk of /nvme/megatrain-disk-1 is full",
            "the disk of machine.nvme_path/megatrain-disk-1 is full",
        ),
        ("/nvmer is another", "/nvmer is another"),
        ("got ~/clone or /home/alice/clone/x", "got machine.checkout or machine.checkout/x"),
        ("[Errno 2] none: '/home/alice/.cache/x.so'", "[Errno 2] none: '~/.cache/x.so'"),
        ("/home/alice2/x.so", ".../x.so"),
        (
            "in /scratch/tmp of alice/y and /scratch/alice/cache/z",
            "in $TMPDIR/y and $XDG_CACHE_HOME/z",
        ),
        ("File /opt/alice/venv/lib/torch.py", "File sys.prefix/lib/torch.py"),
        ("File ROOT/engine/kernel.py", "File megatrain-bench/engine/kernel.py"),
        ("cannot open /mnt/lab/bob/libaio.so: none", "cannot open .../libaio.so: none"),
        ("file:///mnt/lab/x, key=/mnt/lab/y", ".../x, key=.../y"),
        ("/dev/shm has 64 free; /usr/bin/g++", "/dev/shm has 64 free; /usr/bin/g++"),
        (
            "1/2/3 tokens/s of github.com/a/b, https://a.org/b/c",
            "1/2/3 tokens/s of github.com/a/b, https://a.org/b/c",
        ),
        ("", ""),
    ],
)
def test_a_path_is_told_by_its_name(cell, text, told):
    assert named(text.replace("ROOT", str(ROOT)), cell) == told


def test_a_log_in_a_relative_folder_is_told_relative_to_it():
    cell = dataclasses.replace(composed(), output_dir=Path("tokens"))
    assert named("9 tokens/s; see tokens/logs/a.log", cell) == "9 tokens/s; see logs/a.log"


def test_no_path_of_reason_caveat_or_config_reaches_a_row(cell):
    told = [{"event": "plan", "caveat": "on the disk of /nvme"}]
    outcome = Outcome(status="timeout", reason="see /home/alice/my  out/logs/a.log", events=told)
    row = row_of(cell, outcome, started_at="", machine={})
    assert (row.reason, row.caveat) == ("see logs/a.log", "on the disk of machine.nvme_path")
    assert not any(secret in row.to_json() for secret in ("alice", "/nvme"))
    assert published({**cell.config, "output_dir": "/home/alice/out"})["output_dir"] == "out"
