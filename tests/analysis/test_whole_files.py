"""Figures and pages are there whole, or as they were: on a full disk, after a kill at the worst
moment."""

import os
import resource
import signal
from pathlib import Path

import pytest

from analysis import record


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    record.write(tmp_path / "figure.png", b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            record.write(tmp_path / "figure.png", b"after" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "figure.png") in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "figure.png": b"before"
    }


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_leaves_the_file_that_was_there(tmp_path: Path, call: str) -> None:
    """SIGKILL in the child as it is about to make that call."""
    record.write(tmp_path / "page.md", b"before")
    child = os.fork()
    if not child:
        setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        record.write(tmp_path / "page.md", b"after" * 10_000)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert (tmp_path / "page.md").read_bytes() == b"before"
    assert not [path for path in tmp_path.glob("[!.]*") if path.name != "page.md"]


def test_writers_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    children = []
    for letter in b"abcd":
        child = os.fork()
        if not child:
            for _ in range(20):
                record.write(tmp_path / "page.md", bytes([letter]) * 50_000)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() in [bytes([letter]) * 50_000 for letter in b"abcd"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "page.md").symlink_to(tmp_path / "elsewhere" / "page.md")
    record.write(tmp_path / "page.md", b"text")
    assert (tmp_path / "page.md").is_symlink()
    assert (tmp_path / "elsewhere" / "page.md").read_bytes() == b"text"
