"""Bytes striped over drives: a plain bytearray is what they must equal, and whatever goes wrong is
one line that stays."""

import contextlib
import ctypes
import errno
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import KernelError, disk
from engine.disk import Drives
from engine.sizes import PAGE
from engine.swap import MARKER, PREFIX, SwapFolder, free_bytes

FAILS, MOVES_LESS, IS_LATE = 1, 2, 3
"""Mirrors enum Wrong of csrc/disk.cpp."""
ALWAYS = 1 << 40
STRIPE = 2 * PAGE
NUM_BYTES = 23 * PAGE
"""No multiple of a stripe, nor of three."""
BUFFERED = pytest.mark.parametrize("direct", [True, False])


def inject(drives: Drives, wrong: int, value: int, *, after: int = 0, times: int = 1) -> None:
    drives._library.disk_fault(drives._pool, wrong, value, after, times)


def pages(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes at a page's address."""
    storage = torch.zeros(num_bytes + PAGE, dtype=torch.uint8)
    start = -storage.data_ptr() % PAGE
    return storage[start : start + num_bytes]


def patterned(num_bytes: int, seed: int = 0) -> torch.Tensor:
    found = pages(num_bytes)
    found.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(seed)))
    return found


def content(drives: Drives, offset: int = 0, num_bytes: int | None = None) -> torch.Tensor:
    into = pages(drives.num_bytes - offset if num_bytes is None else num_bytes)
    into.fill_(0xA5)
    drives.read(offset, into)
    return into


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b", "c")]
    for folder in found:
        folder.mkdir()
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., Drives]]:
    """As Drives, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(folders: list[Path], num_bytes: int = NUM_BYTES, **options) -> Drives:
            drives = Drives(folders, num_bytes, **{"stripe_bytes": STRIPE, **options})
            stack.callback(drives.close)
            return drives

        yield make


def everything(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*")]


RANGES = st.tuples(
    st.booleans(),
    st.integers(0, NUM_BYTES // PAGE),
    st.integers(0, NUM_BYTES // PAGE),
    st.integers(0, 1 << 16),
)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@BUFFERED
def test_any_sequence_gives_what_a_plain_array_gives(count, direct, folders, opened):
    drives = opened(folders[:count], NUM_BYTES - 5, direct=direct)
    assert drives.num_bytes == NUM_BYTES
    model = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    assert torch.equal(content(drives), model), "zero until written"
    moved = {"read_bytes": NUM_BYTES, "written_bytes": 0}

    @settings(max_examples=100, deadline=None, database=None)
    @given(st.lists(RANGES, max_size=20))
    def holds(steps: list[tuple[bool, int, int, int]]) -> None:
        for writes, one, other, seed in steps:
            start, end = sorted((one * PAGE, other * PAGE))
            if writes:
                source = patterned(end - start, seed)
                drives.write(start, source)
                model[start:end] = source
            else:
                assert torch.equal(content(drives, start, end - start), model[start:end])
            moved["written_bytes" if writes else "read_bytes"] += end - start
        assert torch.equal(content(drives), model)
        moved["read_bytes"] += NUM_BYTES

    holds()
    drives.sync()
    assert moved == {"read_bytes": drives.read_bytes, "written_bytes": drives.written_bytes}
    assert min(drives.read_s, drives.write_s) > 0


@pytest.mark.parametrize("num_bytes", [1, PAGE, STRIPE, STRIPE + PAGE, 3 * STRIPE, 5 * STRIPE + 1])
@pytest.mark.parametrize("count", [1, 3])
def test_files_are_no_larger_than_their_stripes_and_share_them_evenly(
    num_bytes, count, folders, opened
):
    drives = opened(folders[:count], num_bytes)
    drives.write(0, source := patterned(drives.num_bytes))
    assert torch.equal(content(drives), source)
    sizes = [path.stat().st_size for path in everything(*folders) if path.name == "state"]
    assert drives.num_bytes <= sum(sizes) <= drives.num_bytes + count * PAGE
    assert max(sizes) - min(sizes) <= STRIPE
    stored = [path.stat().st_blocks * 512 for path in everything(*folders) if path.name == "state"]
    assert sum(stored) >= sum(sizes), "preallocated"


def test_stripes_lie_on_the_drives_in_turn(folders, opened):
    drives = opened(folders)
    drives.write(0, source := patterned(NUM_BYTES))
    drives.sync()
    files = [next(folder.glob(f"{PREFIX}*/state")).read_bytes() for folder in folders]
    stripes = [source[at : at + STRIPE].numpy().tobytes() for at in range(0, NUM_BYTES, STRIPE)]
    assert [b"".join(stripes[i::3]) for i in range(3)] == files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_tensors_of_any_dtype_come_back_bit_for_bit(dtype, folders, opened):
    drives = opened(folders)
    drives.write(PAGE, source := patterned(4 * PAGE).view(dtype))
    drives.read(PAGE, into := pages(4 * PAGE).view(dtype))
    assert torch.equal(into.view(torch.uint8), source.view(torch.uint8))


@BUFFERED
def test_readers_and_writers_of_their_own_ranges_do_not_meet(direct, folders, opened):
    """Eight threads, each with its range, which it writes and reads again and again."""
    share, wrong = 11 * PAGE, []
    drives = opened(folders, 8 * share, direct=direct)

    def work(index: int) -> None:
        for turn in range(30):
            drives.write(index * share, source := patterned(share, 100 * index + turn))
            if not torch.equal(content(drives, index * share, share), source):
                wrong.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert drives.written_bytes == drives.read_bytes == 30 * 8 * share


def test_a_small_request_does_not_wait_for_a_large_one(folders, opened):
    """Each piece takes 5 ms: all of the large request's on one thread take a second."""
    drives = opened(folders[:1], 200 * STRIPE, num_threads=1)
    inject(drives, IS_LATE, 5000, times=ALWAYS)
    large = threading.Thread(target=content, args=(drives,))
    large.start()
    time.sleep(0.02)
    started = time.perf_counter()
    content(drives, 0, STRIPE)
    assert time.perf_counter() - started < 0.5
    assert large.is_alive()
    large.join()


def test_python_goes_on_while_bytes_are_moved(folders, opened):
    drives = opened(folders)
    inject(drives, IS_LATE, 300_000, times=ALWAYS)
    reading = threading.Thread(target=content, args=(drives, 0, PAGE))
    started, turns = time.perf_counter(), 0
    reading.start()
    while reading.is_alive():
        time.sleep(0.001)
        turns += 1
    assert time.perf_counter() - started >= 0.3
    assert turns > 20


@BUFFERED
@pytest.mark.parametrize("value", [PAGE, PAGE + 100, STRIPE - 1])
def test_what_a_call_left_over_is_moved_by_the_next(value, direct, folders, opened):
    drives = opened(folders, direct=direct)
    inject(drives, MOVES_LESS, value, times=ALWAYS)
    drives.write(0, source := patterned(NUM_BYTES))
    assert torch.equal(content(drives), source)
    inject(drives, 0, 0)
    assert torch.equal(content(drives), source)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_call_is_made_again(code, folders, opened):
    drives = opened(folders)
    inject(drives, FAILS, code, times=50)
    drives.write(0, source := patterned(NUM_BYTES))
    inject(drives, FAILS, code, after=1, times=50)
    assert torch.equal(content(drives), source)


ACTIONS: dict[str, Callable[[Drives], object]] = {
    "reading": content,
    "writing": lambda drives: drives.write(0, patterned(NUM_BYTES)),
    "syncing": lambda drives: drives.sync(),
}
REMEDIES = {
    errno.EIO: "see the kernel's log for the drive or name another folder",
    errno.ENOSPC: "free some of the disk or name another folder",
    errno.EDQUOT: "free some of the disk or name another folder",
    errno.ENODEV: "the drive is gone, mount it again or name another folder",
    errno.EBADF: "the drive is gone, mount it again or name another folder",
    errno.ENOENT: "the drive is gone, mount it again or name another folder",
}


@pytest.mark.parametrize("code", REMEDIES, ids=errno.errorcode.get)
@pytest.mark.parametrize("does", ACTIONS)
@pytest.mark.parametrize("after", [0, 2])
def test_an_error_is_one_line_and_every_later_call_fails_with_it(
    does, code, after, folders, opened
):
    drives = opened(folders)
    before = drives.read_bytes, drives.written_bytes
    inject(drives, FAILS, code, after=after)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        ACTIONS[does](drives)
    told = str(caught.value)
    assert "\n" not in told
    assert f"/state: {does}" in told
    assert told.endswith(f"; {REMEDIES[code]}, and resume from the last saved state")
    assert caught.value.errno == code
    for later in ACTIONS.values():
        with pytest.raises(OSError, match=os.strerror(code)) as again:
            later(drives)
        assert str(again.value) == told
    assert (drives.read_bytes, drives.written_bytes) == before


def test_after_an_error_no_byte_is_moved(folders, opened):
    """Neither of the call's other pieces nor of the next call's."""
    drives = opened(folders[:1], num_threads=1)
    drives.write(0, source := patterned(NUM_BYTES))
    inject(drives, FAILS, errno.EIO)
    for moves in (drives.write, drives.write, drives.read):
        with pytest.raises(OSError, match="Input/output"):
            moves(0, pages(NUM_BYTES))
    assert next(folders[0].glob(f"{PREFIX}*/state")).read_bytes() == source.numpy().tobytes()


def test_a_failed_call_returns_when_nothing_touches_its_memory_any_more(folders, opened):
    """The first drive is late with a piece of one call, and another call's piece waits behind it;
    meanwhile the second drive fails."""
    drives = opened(folders[:2], num_threads=1)
    memory, ended = [pages(STRIPE), pages(4 * STRIPE)], []

    def read(index: int) -> None:
        with contextlib.suppress(OSError):
            drives.read(index * 2 * STRIPE, memory[index])
        ended.append(time.perf_counter() - started)

    inject(drives, IS_LATE, 300_000)
    started = time.perf_counter()
    late = threading.Thread(target=read, args=(0,))
    late.start()
    time.sleep(0.05)
    inject(drives, FAILS, errno.EIO)
    read(1)
    late.join()
    assert min(ended) >= 0.3
    with pytest.raises(OSError, match="Input/output"):
        drives.sync()


@pytest.mark.parametrize(("does", "told"), [("read", "no longer its"), ("write", "Input/output")])
def test_a_call_that_moves_nothing_is_an_error(does, told, folders, opened):
    drives = opened(folders)
    inject(drives, MOVES_LESS, 100, times=ALWAYS)
    with pytest.raises(OSError, match=told):
        getattr(drives, does)(0, pages(NUM_BYTES))


@BUFFERED
@pytest.mark.parametrize("does", ACTIONS)
@pytest.mark.parametrize("left", [0, PAGE, PAGE + 100])
def test_a_file_that_was_cut_is_neither_read_nor_written(left, does, direct, folders, opened):
    drives = opened(folders, direct=direct)
    drives.write(0, patterned(NUM_BYTES))
    cut = next(folders[1].glob(f"{PREFIX}*/state"))
    os.truncate(cut, left)
    with pytest.raises(OSError, match=f"{cut}: {does}.*it has no longer its [0-9,]+ bytes; keep"):
        ACTIONS[does](drives)
    assert cut.stat().st_size == left


def test_a_folder_that_was_removed_goes_on_to_serve(folders, opened):
    """The open file lives until it is closed."""
    drives = opened(folders)
    drives.write(0, source := patterned(NUM_BYTES))
    for folder in folders:
        shutil.rmtree(folder)
    assert torch.equal(content(drives), source)
    drives.close()
    assert not any(folder.exists() for folder in folders)


def test_closing_removes_everything_and_ends_every_call(folders, opened):
    drives = opened(folders, 200 * STRIPE, num_threads=1)
    (folders[0] / "thesis").write_text("mine")
    inject(drives, IS_LATE, 5000, times=ALWAYS)
    told: list[str] = []

    def read() -> None:
        with pytest.raises(OSError, match="it is closed") as caught:
            content(drives)
        told.append(str(caught.value))

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(0.05)
    drives.close()
    drives.close()
    reading.join(timeout=5)
    assert len(told) == 1
    for action in ACTIONS.values():
        with pytest.raises(OSError, match="it is closed"):
            action(drives)
    assert everything(*folders) == [folders[0] / "thesis"]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_no_thread_and_no_descriptor_outlives_it(folders):
    threads, before = tasks(), descriptors()
    for _ in range(3):
        drives = Drives(folders, NUM_BYTES, num_threads=2)
        started = tasks() - threads
        assert len(started) == 6
        drives.close()
        deadline = time.monotonic() + 10  # one that was joined is listed for a moment still
        while started & tasks() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not started & tasks()
    assert descriptors() == before


def test_signals_are_left_to_the_threads_of_python(folders, opened):
    """Each of the twelve has a piece in hand before it is asked: a thread begins with all signals
    blocked."""
    before = tasks()
    drives = opened(folders, num_threads=4)
    inject(drives, IS_LATE, 100_000, times=ALWAYS)
    content(drives)
    started = tasks() - before
    assert len(started) == 12
    for thread in started:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        assert blocked & (1 << (signal.SIGTERM - 1))


def _be_killed(folders: list[Path]) -> None:
    drives = Drives(folders, NUM_BYTES)
    drives.write(0, patterned(NUM_BYTES))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_goes_at_the_next_start_and_nothing_else(folders, opened):
    others = folders[0] / f"{PREFIX}thesis"
    others.mkdir()
    (others / "state").write_text("mine")
    (others / f"like-{MARKER}").write_text("mine")
    (folders[1] / f"{PREFIX}file").write_text("mine")
    (folders[1] / f"{PREFIX}link").symlink_to(others)
    alive = opened(folders)
    kept = set(everything(*folders))
    child = multiprocessing.get_context("spawn").Process(target=_be_killed, args=(folders,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    left = set(everything(*folders)) - kept
    assert len([path for path in left if path.name == "state"]) == 3
    alive.write(0, source := patterned(NUM_BYTES))
    again = opened(folders)
    assert not left & set(everything(*folders))
    again.close()
    assert set(everything(*folders)) == kept
    assert torch.equal(content(alive), source), "the living one was left alone"


def test_what_folders_have_room_for_together(folders, monkeypatch):
    """Striped evenly: a disk is shared by its folders, the fullest decides, and what is left of
    dead processes counts as free, whichever system made it."""
    left = SwapFolder.new(folders[0])
    (left.path / "moments").write_bytes(b"1" * 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=9_000_000))
    disks = dict(zip(folders, (1, 1, 2), strict=True))
    stat = os.stat

    def on_its_disk(path, **how):
        mode, inode, _, *rest = found = stat(path, **how)
        return os.stat_result((mode, inode, disks[path], *rest)) if path in disks else found

    monkeypatch.setattr(os, "stat", on_its_disk)
    assert free_bytes(folders[2:]) == 9_000_000
    assert free_bytes(folders) == 3 * 4_500_000, "two folders share the first disk"
    held, _ = left.num_bytes(), left.release()
    assert held >= 1_000_000
    assert free_bytes(folders[:2]) == 2 * ((9_000_000 + held) // 2)
    assert free_bytes([folders[0], folders[2]]) == 2 * 9_000_000
    assert left.path.is_dir(), "nothing goes before it is used"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_what_another_users_killed_process_left_is_theirs(folders, opened):
    left = SwapFolder.new(folders[0])
    left.release()
    os.chown(left.path / MARKER, 65534, 65534)
    opened(folders).close()
    assert everything(*folders) == [left.path, left.path / MARKER]


@pytest.mark.parametrize(
    ("got", "told"),
    [
        ("missing", "No such file or directory"),
        ("file", "Not a directory"),
    ],
)
def test_a_folder_that_takes_no_file_is_one_line(got, told, folders):
    folder = folders[2] / got
    if got == "file":
        folder.write_text("no folder")
    before = everything(*folders)
    with pytest.raises(OSError, match=rf"^{folder}: [^\n]*{told}[^\n]*; name a folder [^\n]*$"):
        Drives([folders[0], folder], NUM_BYTES)
    assert everything(*folders) == before


def test_a_disk_without_locks_is_refused_and_left_clean(folders, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("engine.swap.fcntl.flock", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="No locks available"):
        Drives(folders, NUM_BYTES)
    assert everything(*folders) == []
    assert descriptors() == before


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={1 << 20}", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


ROOM = r": 2,097,152 bytes are needed and the disk has [0-9,]+ free; free some or name another"


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_full_disk_is_one_line_and_nothing_is_left(asked_first, small_disk, folders, monkeypatch):
    """The disk may fill between the question and the taking."""
    if not asked_first:
        monkeypatch.setattr(disk, "_require_room", lambda *_: None)
    with pytest.raises(OSError, match=f"^{small_disk}[^\n]*{ROOM} folder$") as caught:
        Drives([folders[0], small_disk], 4 << 20, stripe_bytes=STRIPE)
    assert ("/state: " in str(caught.value)) is not asked_first
    assert everything(small_disk, *folders) == []


@pytest.mark.parametrize("call", ["tempfile.mkdtemp", "fcntl.flock"])
def test_a_disk_that_takes_no_folder_is_one_line_and_nothing_is_left(call, folders, monkeypatch):
    """Out of inodes, while bytes are free; without locks, when the folder is there."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"engine.swap.{call}", refuses)
    with pytest.raises(OSError, match=f"^{folders[0]}: [^\n]* name another folder$"):
        Drives(folders, NUM_BYTES)
    assert everything(*folders) == []


def test_a_read_only_disk_is_refused_in_one_line(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=f"^{small_disk}: [^\n]*Read-only file system[^\n]*$"):
        Drives([small_disk], NUM_BYTES)


def test_two_folders_of_a_disk_need_the_room_of_both(small_disk):
    both = [small_disk / "a", small_disk / "b"]
    for folder in both:
        folder.mkdir()
    Drives(both, 900_000, stripe_bytes=PAGE).close()
    with pytest.raises(OSError, match="1,503,232 bytes are needed"):
        Drives(both, 1_500_000, stripe_bytes=PAGE)
    assert everything(*both) == []


def test_what_a_killed_run_left_is_no_lack_of_room(small_disk, opened):
    left = SwapFolder.new(small_disk)
    (left.path / "state").write_bytes(b"1" * 900_000)
    with pytest.raises(OSError, match="bytes are needed"):
        Drives([small_disk], 900_000)
    left.release()
    opened([small_disk], 900_000)
    assert not left.path.exists()


@pytest.mark.parametrize("refused", ["open", "preadv", "pwritev"])
def test_where_the_page_cache_cannot_be_avoided_it_says_so(refused, folders, opened, monkeypatch):
    real = getattr(os, refused)

    def refuse(target, second, *rest, **named):
        wants = refused != "open" or (
            str(target).startswith(str(folders[1])) and second & os.O_DIRECT
        )
        if wants:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(target, second, *rest, **named)

    assert opened(folders).caveat is None
    before = descriptors()
    monkeypatch.setattr(disk.os, refused, refuse)
    drives = opened(folders)
    monkeypatch.undo()
    assert len(descriptors() - before) == 6, "a file and a lock a folder"
    assert not drives.direct
    through = folders[1:2] if refused == "open" else folders
    told = ", ".join(map(str, through))
    assert drives.caveat == f"{told}: through the page cache, which copies every byte once more"
    drives.write(0, source := patterned(NUM_BYTES))
    assert torch.equal(content(drives), source)


def cached(path: Path) -> int:
    """Pages of a file that the page cache has."""
    size = path.stat().st_size
    count = -(-size // PAGE)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_char * size).from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(held))
        code = libc.mincore(address, ctypes.c_size_t(size), found)
        del held
    assert code == 0
    return sum(state & 1 for state in found)


@BUFFERED
def test_the_page_cache_keeps_none_of_it(direct, folders, opened):
    drives = opened(folders[:1], 64 * STRIPE, direct=direct)
    (path,) = folders[0].glob(f"{PREFIX}*/state")
    path.read_bytes()
    if not direct:
        os.posix_fadvise(drives._files[0].descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path) and not direct:
        pytest.skip("this file system is memory")
    drives.write(0, source := patterned(64 * STRIPE))
    assert cached(path) == 0
    assert torch.equal(content(drives), source)
    assert cached(path) == 0


@pytest.mark.parametrize(
    ("offset", "num_bytes", "shift"),
    [(1, PAGE, 0), (0, PAGE - 1, 0), (0, PAGE, 8), (NUM_BYTES, PAGE, 0), (-PAGE, PAGE, 0)],
)
def test_what_is_not_whole_pages_within_it_is_a_mistake_of_the_caller(
    offset, num_bytes, shift, folders, opened
):
    drives, memory = opened(folders), pages(2 * PAGE)[shift : shift + num_bytes]
    with pytest.raises(AssertionError, match=r"whole pages|beyond the end"):
        drives.read(offset, memory)
    with pytest.raises(AssertionError, match=r"whole pages|beyond the end"):
        drives.write(offset, memory)


def test_without_a_compiler_nothing_is_written(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk._native.cache_clear()
    try:
        with pytest.raises(KernelError) as caught:
            Drives(folders, NUM_BYTES)
    finally:
        disk._native.cache_clear()
    assert str(caught.value) == (
        "CXX: got no-such-compiler (there is none), allowed a C++ compiler with OpenMP, which disk "
        "I/O is built with; install g++, or leave the optimizer's state in host memory"
    )
    assert everything(*folders) == []


def test_where_threads_cannot_be_had_it_says_so(folders, monkeypatch):
    class Refusing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    monkeypatch.setattr(disk, "_native", Refusing)
    with pytest.raises(OSError, match=r"^[^\n]*: 12 threads [^\n]* cannot be had; raise the limit"):
        Drives(folders, NUM_BYTES, num_threads=4)
    assert everything(*folders) == []
