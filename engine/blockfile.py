"""Safetensors files that go past the page cache: written with their SHA-256, checked and read.

A virtual machine's memory may grow as it is touched, and then a new page of the cache is slower
than the disk. Where a file system refuses O_DIRECT the cache is used, and given back.

What lies in whole pages is written from where it lies: saving beside training costs what its bytes
take of the memory that the optimizer is waiting for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

CHUNK = 16 << 20
"""Bytes that are moved at a time; whole pages, as O_DIRECT needs."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I16": torch.int16}
"""What a state has, by the names of a header."""
NUMBER = 8
"""Bytes of the number that a file begins with: those of its header."""


def write(path: Path, tensors: Mapping[str, torch.Tensor], block: str) -> tuple[int, str]:
    """Write flat tensors of the CPU, and in the header `block`; the bytes and the SHA-256 of the
    file, once it is on the disk. OSError where that takes no more."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"block": block}}
    end, sha256 = 0, hashlib.sha256()
    # the widest first, so that each begins at a multiple of its elements
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(NUMBER + len(text)) % mmap.PAGESIZE)  # tensors begin at a page
    first = bytearray(len(text).to_bytes(NUMBER, "little") + text)
    sources = [_view_of(tensor) for _, tensor in ordered]
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as (file, pages):
        for piece in _joined([memoryview(first), *sources], pages):
            sha256.update(piece)
            _put(file, piece)
        os.fsync(file)
    return len(first) + end, sha256.hexdigest()


def sha256_of(path: Path) -> str:
    """Of a whole file, as hex digits."""
    sha256 = hashlib.sha256()
    with _opened(path, os.O_RDONLY) as (file, pages):
        for piece in _read(file, pages, 0, os.fstat(file).st_size):
            sha256.update(piece)
    return sha256.hexdigest()


def read(
    path: Path, part: slice, places: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """These elements of every tensor of a file that is known to be whole, on the CPU.

    places: flat tensors to read into, by name, where they are there and of the file's dtype.
    """
    with path.open("rb") as head:
        size = int.from_bytes(head.read(NUMBER), "little")
        header = json.loads(head.read(size))
    found = {}
    with _opened(path, os.O_RDONLY) as (file, pages):
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop, _ = part.indices(*entry["shape"])
            dtype, tensor = DTYPES[entry["dtype"]], places.get(name)
            if tensor is None or tensor.dtype != dtype or tensor.is_cuda:
                tensor = torch.empty(stop - start, dtype=dtype)
            assert tensor.numel() == stop - start, f"{name}: {tensor.numel()}, not {stop - start}"
            begin = NUMBER + size + entry["data_offsets"][0] + start * tensor.itemsize
            target = _view_of(tensor)
            for piece in _read(file, pages, begin, begin + tensor.nbytes):
                _copy(piece, target)
                target = target[len(piece) :]
            found[name] = tensor
    return found


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, memoryview]]:
    """A descriptor, past the page cache where that can be, and whole pages of memory."""
    try:
        file = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file, memoryview(mmap.mmap(-1, CHUNK))
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _joined(sources: list[memoryview], pages: memoryview) -> Iterator[memoryview]:
    """The bytes of all in pieces of whole pages, but for the last, and of as many as `pages` has at
    most: where they lie, or copied into `pages` where that is not at the beginning of one."""
    filled = 0
    for source in sources:
        while source:
            count = min(len(pages) - filled, len(source))
            in_place = count // mmap.PAGESIZE * mmap.PAGESIZE
            if not filled and in_place and not _address(source) % mmap.PAGESIZE:
                yield source[:in_place]
                source = source[in_place:]
                continue
            _copy(source[:count], pages[filled:])
            source, filled = source[count:], filled + count
            if filled % mmap.PAGESIZE == 0:
                yield pages[:filled]
                filled = 0
    yield pages[:filled]


def _put(file: int, piece: memoryview) -> None:
    """Write it all; only a rest of less than a page goes through the cache."""
    while piece:
        whole = len(piece) // mmap.PAGESIZE * mmap.PAGESIZE or len(piece)
        piece = piece[_past_cache(file, partial(os.write, file, piece[:whole])) :]


def _read(file: int, pages: memoryview, begin: int, end: int) -> Iterator[memoryview]:
    """The bytes from `begin` to before `end` in pieces. OSError where the file is shorter."""
    while begin < end:
        skipped = begin % mmap.PAGESIZE
        got = _past_cache(file, partial(os.preadv, file, [pages], begin - skipped))
        piece = pages[skipped : min(got, skipped + end - begin)]
        if not piece:
            raise OSError(errno.EIO, "the file has become shorter")
        yield piece
        begin += len(piece)


def _past_cache(file: int, move: Callable[[], int]) -> int:
    """What `move` returns; through the cache from here on where the file system wants that."""
    try:
        return move()
    except OSError as error:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return move()


def _view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU, which must outlive them."""
    assert tensor.is_contiguous(), "only what lies in one piece has one view"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _copy(source: memoryview, target: memoryview) -> None:
    """By this thread alone, which lets others run."""
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(view: memoryview) -> int:
    """Of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
