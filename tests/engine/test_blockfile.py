"""Files of blocks past the page cache: plain safetensors, whatever the file system refuses."""

import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine import blockfile
from engine.state import _like

CHUNK = 2 * mmap.PAGESIZE
SIZES = [1, 2, 5, 700, CHUNK // 2, CHUNK // 2 + 1, 5 * CHUNK]
"""Elements: less than a page, about a chunk of one of the tensors, and several chunks."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(blockfile, "CHUNK", CHUNK)


def tensors_of(numel: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(numel)
    return {
        "weight": numbers.bfloat16(),
        "extra": numbers.short(),
        "exp_avg": numbers.float(),
        "exp_avg_sq": -numbers.float(),
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_a_file_is_what_safetensors_reads(tmp_path, numel, in_pages):
    """Wherever what is written lies: a tensor that begins at a page may come after half a page."""
    path, tensors = tmp_path / "block-0007.safetensors", tensors_of(numel)
    if in_pages:
        pages = _like(tensors)
        tensors = {name: pages[name].copy_(tensor) for name, tensor in tensors.items()}
    num_bytes, sha256 = blockfile.write(path, tensors, "block-0007")
    data = path.read_bytes()
    assert (num_bytes, sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert blockfile.sha256_of(path) == sha256
    assert_equal(load_file(path), tensors)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"block": "block-0007"}


@pytest.mark.parametrize("numel", SIZES)
def test_a_part_is_read_and_where_it_can_be_in_place(tmp_path, numel):
    path, tensors = tmp_path / "block.safetensors", tensors_of(numel)
    blockfile.write(path, tensors, "block")
    for part in (slice(0, numel), slice(numel // 3, numel // 2 + 1), slice(numel, numel)):
        expected = {name: tensor[part] for name, tensor in tensors.items()}
        count = len(expected["weight"])
        places = {"exp_avg": torch.full((count,), -1.0), "extra": torch.full((count,), -1.0)}
        found = blockfile.read(path, part, places)
        assert_equal(found, expected)
        assert found["exp_avg"] is places["exp_avg"]
        assert (places["extra"] == -1).all()  # of another dtype than the file's


def direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_all_but_a_rest_of_less_than_a_page_goes_past_the_cache(tmp_path, monkeypatch):
    written, write = list[tuple[bool, int]](), os.write

    def watched(descriptor: int, data: memoryview) -> int:
        done = write(descriptor, data)
        written.append((direct(descriptor), done))
        return done

    monkeypatch.setattr(os, "write", watched)
    num_bytes, _ = blockfile.write(tmp_path / "block", tensors_of(700), "block")
    whole = num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    if not written[0][0]:
        pytest.skip("this file system has no O_DIRECT")
    assert sum(done for past, done in written if past) == whole
    assert [done for past, done in written if not past] == [num_bytes - whole]


def test_what_lies_in_whole_pages_is_written_from_there(tmp_path, monkeypatch):
    """And nothing of it is copied: as a state's copies lie, whose files begin with pages too."""
    copied = list[int]()
    monkeypatch.setattr(blockfile, "_copy", lambda source, _: copied.append(len(source)))
    tensors = _like(tensors_of(5 * CHUNK))
    num_bytes, _ = blockfile.write(tmp_path / "block", tensors, "block")
    assert sum(copied) == num_bytes - sum(t.nbytes for t in tensors.values()) == mmap.PAGESIZE


@pytest.mark.parametrize("refused", ["opened", "moved", "moved in part"])
def test_a_file_system_may_refuse_and_may_move_less(tmp_path, monkeypatch, refused):
    opened, write, preadv = os.open, os.write, os.preadv

    def no_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    def no_write(descriptor: int, data: memoryview) -> int:
        if direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    def no_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        if refused == "opened":
            patched.setattr(os, "open", no_open)
        elif refused == "moved":
            patched.setattr(os, "write", no_write)
            patched.setattr(os, "preadv", no_read)
        else:
            patched.setattr(os, "write", lambda file, data: write(file, data[:1000]))
            patched.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:5000]], at))
        path, tensors = tmp_path / "block", tensors_of(5 * CHUNK)
        _, sha256 = blockfile.write(path, tensors, "block")
        assert blockfile.sha256_of(path) == sha256
        assert_equal(
            blockfile.read(path, slice(3, 3000)), {k: t[3:3000] for k, t in tensors.items()}
        )
    assert_equal(load_file(path), tensors)


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    path = tmp_path / "block"
    blockfile.write(path, tensors_of(5 * CHUNK), "block")
    os.truncate(path, 3 * CHUNK)
    with pytest.raises(OSError, match="shorter"):
        blockfile.read(path, slice(0, 5 * CHUNK))


def test_an_error_that_is_not_of_o_direct_is_raised(tmp_path, monkeypatch):
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        blockfile.write(tmp_path / "block", tensors_of(5), "block")
