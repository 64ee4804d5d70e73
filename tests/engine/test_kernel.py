"""AdamW's kernel in its cache: this user's alone, whole, built again where it is not, and refused
in one line."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

from baselines.deepspeed.setup import import_deepspeed, sole_builder
from engine import kernel
from engine.disk import DISK
from engine.kernel import KernelError, cache_directory, native

NOBODY = 65534
QUICK = tuple(flag.replace("-O3", "-O0") for flag in kernel.FLAGS)
"""The same library, compiled in a quarter of the time."""
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{ fclose(fopen("{flag}", "w")); }}
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def give_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make a file another user's")
    os.chown(path, NOBODY, NOBODY)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "FLAGS", QUICK)
        yield


@pytest.fixture(autouse=True)
def _nothing_remembered():
    native.cache_clear()
    kernel._tell.cache_clear()
    yield
    native.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of an empty cache, and no other temporary directory than one that goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "cache" / kernel.NAME


@pytest.fixture(scope="module")
def built(_quick, tmp_path_factory) -> Path:
    """A kernel as built under the most generous umask there is."""
    folder = tmp_path_factory.mktemp("built")
    native.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        before = os.umask(0)
        try:
            native()
        finally:
            os.umask(before)
    (library,) = (folder / "cache" / kernel.NAME).glob("*.so")
    return library


def test_whatever_the_umask_nobody_else_may_write_it(built):
    assert mode(built.parent) == mode(built.parent.parent) == 0o700
    assert {path.name: mode(path) for path in built.parent.iterdir()} == {
        built.name: 0o600,
        "building": 0o600,
    }


def test_it_is_found_again_without_a_compiler_at_work(built, cache, monkeypatch):
    cache.mkdir(parents=True)
    shutil.copy2(built, cache)
    monkeypatch.setattr(kernel.subprocess, "run", None)
    assert native().adamw_split


def test_each_source_is_a_library_of_its_own(built, cache):
    cache.mkdir(parents=True)
    shutil.copy2(built, cache)
    library = kernel.built(DISK)
    assert library.disk_move
    assert not hasattr(library, "adamw_split")
    assert native().adamw_split
    assert sorted(path.name.split("-")[0] for path in cache.glob("*.so")) == ["adamw", "disk"]


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped"])
def test_a_damaged_one_is_built_again(damage, built, cache):
    whole = built.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    cache.mkdir(parents=True)
    kept = cache / built.name
    kept.write_bytes({"empty": b"", "torn": whole[:middle], "flipped": flipped}[damage])
    assert native().adamw_split
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("sign", ["others may write it", "it is another's", "it is a link"])
def test_a_planted_library_is_never_loaded(sign, built, cache, tmp_path):
    flag, source = tmp_path / "flag", tmp_path / "planted.c"
    source.write_text(PLANTED.format(flag=flag))
    planted = tmp_path / "planted.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(planted)], check=True)
    content = planted.read_bytes()
    planted.write_bytes(content + hashlib.sha256(content).digest())
    cache.mkdir(parents=True)
    target = cache / built.name
    if sign == "it is a link":
        target.symlink_to(planted)
    else:
        shutil.copy(planted, target)
        target.chmod(0o666 if sign == "others may write it" else 0o600)
    if sign == "it is another's":
        give_away(target)
    assert native().adamw_split
    assert not flag.exists()
    assert target.read_bytes() == built.read_bytes()
    assert (mode(target), target.stat().st_uid) == (0o600, os.geteuid())


def _build_with(compiler: str) -> None:
    os.setsid()
    os.environ["CXX"] = compiler
    native()


def test_what_a_killed_builder_left_is_removed_and_its_lock_is_free(cache, tmp_path):
    """The compiler that was killed has written a file where compilers keep their own."""
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ntouch "$TMPDIR/of-the-compiler"\nexec sleep 60\n')
    slow.chmod(0o700)
    builder = multiprocessing.get_context("fork").Process(target=_build_with, args=(str(slow),))
    builder.start()
    deadline = time.monotonic() + 60
    while not list(cache.glob("tmp*/of-the-compiler")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.join()
    assert list(cache.glob("tmp*/of-the-compiler"))
    assert native().adamw_split
    assert list(cache.glob("tmp*")) == []


@pytest.mark.parametrize(
    ("compiler", "got"),
    [
        ("", "nothing (there is none)"),
        ("no-such-compiler", "no-such-compiler (there is none)"),
        ("/bin/false", "/bin/false (exit 1)"),
    ],
)
def test_without_a_compiler_it_is_refused_in_one_line(compiler, got, cache, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(KernelError) as caught:
        native()
    told = str(caught.value)
    assert told.startswith(f"CXX: got {got}, allowed a C++ compiler")
    assert "\n" not in told
    assert not list(cache.glob("*.so"))


def test_what_a_compiler_says_is_the_reason(cache, tmp_path, monkeypatch):
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'first line' >&2\necho 'no OpenMP here' >&2\nexit 3\n")
    failing.chmod(0o700)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(KernelError, match=r"\(no OpenMP here\), allowed a C\+\+ compiler"):
        native()


def elsewhere() -> Path:
    with pytest.warns(UserWarning, match="is not yours alone to write"):
        return cache_directory()


@pytest.mark.parametrize("home", [os.devnull, "/proc/none"])
def test_without_a_home_it_is_kept_in_a_private_temporary_folder(
    home, cache, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    found = elsewhere()
    assert found == tmp_path / "tmp" / f"{kernel.NAME}-{os.geteuid()}"
    assert mode(found) == 0o700
    assert cache_directory() == found, "the next cell finds what this one built"


def test_deepspeed_builds_there_too(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "to be restored")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    with pytest.warns(UserWarning, match="is not yours alone to write"):
        import_deepspeed(torch.device("cpu"))
    with sole_builder():
        assert Path(os.environ["TORCH_EXTENSIONS_DIR"]).parent.parent == tmp_path / "tmp"


def test_a_folder_that_others_may_write_is_closed_to_them(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert cache_directory() == cache
    assert mode(cache) == 0o700


def test_a_folder_that_others_may_replace_is_not_used(cache):
    cache.mkdir(parents=True)
    cache.parent.chmod(0o777)
    assert elsewhere() != cache
    cache.parent.chmod(0o1777)
    assert cache_directory() == cache


def test_a_folder_of_another_user_is_not_used(cache):
    cache.mkdir(parents=True)
    give_away(cache)
    assert elsewhere() != cache


def test_without_any_folder_the_remedy_is_named(cache, tmp_path):
    cache.parent.write_text("no folder")
    (tmp_path / "tmp" / f"{kernel.NAME}-{os.geteuid()}").write_text("no folder")
    with pytest.raises(
        ValueError, match=r"^XDG_CACHE_HOME: got [^\n]*, allowed a folder [^\n]*; name one$"
    ):
        cache_directory()
