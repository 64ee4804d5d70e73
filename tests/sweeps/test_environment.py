"""Where a number came from: the commit in a row is this checkout's, whatever git is told."""

import subprocess
from pathlib import Path

import pytest

from sweeps import environment
from sweeps.groups import Machine


def repository(folder: Path, *, file: str = "file") -> str:
    """A new repository of one commit, and that commit."""
    folder.mkdir(exist_ok=True)
    (folder / file).write_text("text")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for command in (["init", "-q"], ["add", file], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    told = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRAIN_GIT_COMMIT", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path / "checkout")
    (tmp_path / "checkout").mkdir()
    return tmp_path / "checkout"


def test_variables_of_git_choose_no_commit(checkout, tmp_path, monkeypatch):
    mine = repository(checkout)
    other = tmp_path / "other"
    assert repository(other, file="another") != mine
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert environment.git_commit() == mine
    (checkout / "file").write_text("changed")
    assert environment.git_commit() == f"{mine}-dirty"


@pytest.mark.parametrize("path", ["baselines/mine.py", "conf/system/mine.yaml"])
def test_a_system_that_git_does_not_know_is_of_no_clean_checkout(path, checkout):
    mine = repository(checkout)
    (checkout / "outputs").mkdir()
    (checkout / "outputs" / "rows.jsonl").write_text("{}")
    assert environment.git_commit() == mine
    (checkout / path).parent.mkdir(parents=True)
    (checkout / path).write_text("name: mine")
    assert environment.git_commit() == f"{mine}-dirty"


def test_a_checkout_without_history_has_no_commit_whatever_it_lies_in(checkout, monkeypatch):
    repository(checkout.parent)
    assert environment.git_commit() is None
    monkeypatch.setenv("MEGATRAIN_GIT_COMMIT", "told")
    assert environment.git_commit() == "told"


def test_a_row_says_how_its_hosts_memory_is_laid_out(tmp_path, monkeypatch):
    """Its NUMA nodes, and when pages are huge; None where the kernel says neither."""
    monkeypatch.setattr(environment, "NODES", tmp_path)
    monkeypatch.setattr(environment, "HUGE_PAGES", tmp_path / "enabled")
    found = environment.machine(Machine(), None)
    assert (found["numa_nodes"], found["huge_pages"]) == (None, None)
    for name in ("node0", "node1", "node10", "has_cpu"):
        (tmp_path / name).mkdir()
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    found = environment.machine(Machine(), None)
    assert (found["numa_nodes"], found["huge_pages"]) == (3, "madvise")
    assert environment.numa_nodes() == [0, 1, 10]


def test_a_row_says_of_how_many_cores_its_process_had_some(monkeypatch):
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda process: set(range(16, 32)))
    found = environment.machine(Machine(), None)
    assert (found["num_cores"], found["host_cores"]) == (16, 64)
