"""The training state on disk: copied and written beside training (engine/resuming.py reads it).

Invariants: a directory appears whole or not at all, and it is the state of one step. A state does
not depend on placement, depth or lanes.

One safetensors file a block with its weight, remainder or master, and moments; state.json with what
must match and the size and SHA-256 of every file; COMMIT, written last, with the SHA-256 of
state.json. All are on the disk before the directory has its name.

Of several ranks each writes a file a block, its part of it, and the first commits when all have;
any number of ranks resumes what any other wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import blockfile
from engine.lanes import CopyStream, hold_until
from engine.layout import round_up
from engine.master import BlockState
from engine.recipe import Recipe
from engine.saving import digest, sync, whole_directory
from engine.sizes import PAGE
from engine.store import Arena, Store, staged_state

FORMAT = 3
STATE, COMMIT = "state.json", "COMMIT"
COPIERS = max(1, len(os.sched_getaffinity(0)) // 4)
"""Blocks that are copied at a time, each by one thread. What is copied while the optimizer rests,
which with clipping is a whole forward and backward, no update waits for."""
WRITERS = max(2, min(COPIERS, 4))
"""Some blocks are digested while others are written."""
REFUSED = "refused: "
"""Before what the first rank says in place of a path."""
ON_DISK = "on disk"
"""Among the copies of a block, all that is not in memory, in one piece."""
FAILED = ".failed"
"""Suffix of what a rank leaves that wrote nothing."""
LOOK_S = 0.02
"""How often a rank looks whether the others have written."""
Tensors = dict[str, torch.Tensor]
"""What a block's file has, by name."""
Write = Future[tuple[str, dict[str, Any]]]
"""The name of a file and its entry in the manifest, once it is on the disk."""


class Taking:
    """The state of one moment, copied block by block: in turn by the saver, and before its turn by
    whoever is about to change a block."""

    def __init__(self, store: Store, copies: dict[int, Tensors]) -> None:
        """copies: those of an earlier state, to be written over; what is not there is made."""
        self._store, self._states, self._copies = store, store.states, copies
        self._left = {block: threading.Lock() for block in range(len(store.states))}
        self._events: dict[int, torch.cuda.Event] = {}
        """Block on a GPU -> when its copy is there."""
        self._error: BaseException | None = None

    def begin(self, block: int, stream: CopyStream) -> None:
        """Enqueue the copy of a block on a GPU."""
        tensors = tensors_of(self._states[block])
        copies = self._copies.get(block) or _like(tensors)

        def copy() -> None:
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)

        self._copies[block] = copies
        self._events[block] = stream.enqueue(copy)
        del self._left[block]

    def copied(self, block: int) -> Tensors:
        """The block's copy, in its turn: by one thread, for the others' are the optimizer's."""
        self._once(block, _move)
        if block in self._events:
            self._events[block].synchronize()
        if self._error is not None:
            raise self._error
        return self._copies[block]

    def lacks(self, block: int) -> bool:
        """Whether the block must still be copied, or is being copied."""
        return block in self._left or block in self._events

    def before(self, block: int) -> None:
        """Return when the block may change, or on a GPU have the current stream wait until it may.
        Raises nothing: errors are those of the saver."""
        if block in self._events:
            hold_until(self._events[block])
        self._once(block, torch.Tensor.copy_)

    def give_up(self) -> None:
        """Nothing more need be copied."""
        self._left.clear()

    def _once(self, block: int, copy: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        lock = self._left.get(block)
        if lock is None:
            return
        with lock:
            if block not in self._left:
                return
            try:
                tensors = tensors_of(self._states[block])
                if block not in self._copies:
                    self._copies[block] = _copies_for(self._store, block)
                if block in self._store.spec.on_disks:
                    self._store.on_disk.copy(block, self._copies[block][ON_DISK])
                    tensors = {"weight": tensors["weight"]}
                for name, tensor in tensors.items():
                    copy(self._copies[block][name], tensor)
            except Exception as error:  # without which training goes on
                self._error = error
                self.give_up()
            self._left.pop(block, None)


class Saver:
    """Writes states of a store, one after another, in threads of its own."""

    def __init__(self, store: Store) -> None:
        self._store, self._ranks = store, store.ranks
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(WRITERS + 1, thread_name_prefix="save")
        self._copiers = ThreadPoolExecutor(COPIERS, thread_name_prefix="copy")
        self._last: Future[None] | None = None
        self._scratch: Path | None = None
        """Folder that `_last` writes in, which is gone when it has ended."""
        self._taking: Taking | None = None
        self._copies: dict[int, Tensors] = {}
        """Block -> where it is copied to: kept, so that its pages are touched once."""
        self._arena: Arena | None = None
        """Pinned memory of the copies of blocks on a GPU."""
        self._stream: CopyStream | None = None
        """Which copies them."""
        self._counting = threading.Lock()
        self.counters: dict[str, float] = {}
        """Once something was saved: saved_bytes, save_s, from the beginning to the end of each, and
        save_wait_s, how long training waited for it."""

    def reserve(self, room: int) -> None:
        """Take the memory of copies now, where `room` bytes are enough, and touch its pages: at the
        first save training would wait for that. MemoryError where there is none."""
        if not self._has_room(room) or self._copies:
            return
        states = self._store.states
        ours = [t for state in states for t in tensors_of(state).values() if t.is_cuda]
        self._arena = Arena(
            [round_up(t.nbytes, PAGE) for t in ours], pinned=self._store.spec.pinned
        )
        pieces = iter(self._arena.pieces)
        for block, state in enumerate(states):
            self._copies[block] = (
                _laid(tensors_of(state), pieces)
                if state.weight.is_cuda
                else _copies_for(self._store, block)
            )

    def _has_room(self, room: int) -> bool:
        return sum(map(_num_bytes, self._store.states)) <= room

    def save(self, directory: Path, step: int, recipe: Recipe, *, room: int) -> None:
        """Take the state as it is, and return; it is copied and written afterwards, until `finish`.

        step: optimizer steps taken so far. room: bytes that copies may take, which are kept for the
        next state; where they need more, this copies the state itself, waits for the disk between
        and keeps nothing. One block is copied in any case. The store must not change until this
        returns, and a block of it not before `before`. ValueError where `directory` exists; what
        goes wrong later is raised by `finish` or the next `save`.
        """
        self.finish()
        started = time.perf_counter()
        known = {"parts": self._ranks.count, "step": step, "recipe": asdict(recipe)}
        description = describe(self._store) | known
        whole: Path | None = None
        try:
            with contextlib.ExitStack() as unfinished:
                whole = unfinished.enter_context(self._directory_of_all(directory))
                if self._has_room(room):
                    work: Callable[..., None] = partial(self._take, self._begin())
                else:
                    self._forget()
                    work = partial(self._commit, self._copy(whole, room))
                rest = unfinished.pop_all()
        except OSError as error:
            if whole is None or self._ranks.count == 1:
                raise
            self._scratch, self._last = whole.parent, Future()
            self._last.set_exception(error)  # `finish` tells all ranks, which ask each other there
            return
        self._scratch = whole.parent
        self._last = self._threads.submit(work, rest, whole, description, started)
        self._count(save_wait_s=time.perf_counter() - started)

    def _begin(self) -> Taking:
        """What is to be copied from now on; copies of blocks on the device are enqueued."""
        taking = Taking(self._store, self._copies)
        for block in range(self._store.spec.on_device):
            device = self._store.states[block].weight.device
            if device.type == "cuda":
                self._stream = self._stream or CopyStream(device)
                taking.begin(block, self._stream)
            else:
                taking.before(block)
        self._taking = taking
        return taking

    def before(self, block: int) -> None:
        """`Taking.before`, if a state is being copied; called on the lane that changes the
        block."""
        taking = self._taking
        if taking is not None and taking.lacks(block):
            started = time.perf_counter()
            taking.before(block)
            self._count(save_wait_s=time.perf_counter() - started)

    def _take(
        self,
        taking: Taking,
        unfinished: contextlib.ExitStack,
        whole: Path,
        description: dict[str, Any],
        started: float,
    ) -> None:
        """Copy block after block, and have each written: first those that the host updates, for
        what copies the others works by itself."""
        writes: list[Write] = []
        first = self._store.spec.on_device
        blocks = [*range(first, len(self._store.states)), *range(first)]
        with unfinished:
            copies = [self._copiers.submit(taking.copied, block) for block in blocks]
            try:
                for block, copy in zip(blocks, copies, strict=True):
                    tensors = copy.result()
                    if any(write.done() and write.exception() for write in writes):
                        break  # which `_commit` raises
                    path = file_of(whole, block, self._ranks.index, self._ranks.count)
                    writes.append(self._threads.submit(_write_block, path, tensors))
            finally:
                taking.give_up()
                self._taking = None
                wait(copies)
                wait(writes)  # the directory goes when nobody writes into it any more
            self._commit(writes, unfinished.pop_all(), whole, description, started)

    def _copy(self, whole: Path, room: int) -> list[Write]:
        """Copy everything here, and wait for the disk where copies would take more than `room`."""
        writes: list[Write] = []
        copied: deque[tuple[int, Write]] = deque()
        try:
            for block, state in enumerate(self._store.states):
                self._store.fetch(block)
                num_bytes = _num_bytes(state)
                while copied and sum(size for size, _ in copied) + num_bytes > room:
                    copied.popleft()[1].result()
                # a copy: the next step changes the store
                tensors = {k: t.to("cpu", copy=True) for k, t in tensors_of(state).items()}
                path = file_of(whole, block, self._ranks.index, self._ranks.count)
                write = self._threads.submit(_write_block, path, tensors)
                writes.append(write)
                copied.append((num_bytes, write))
                del tensors
        except BaseException:
            for write in writes:
                write.cancel()
            wait(writes)  # the directory goes when nobody writes into it any more
            raise
        return writes

    def _commit(
        self,
        writes: list[Write],
        unfinished: contextlib.ExitStack,
        whole: Path,
        description: dict[str, Any],
        started: float,
    ) -> None:
        with unfinished:
            wait(writes)  # where one failed, until the others write no more
            files = dict(write.result() for write in writes)
            if self._ranks.index == 0:
                files = self._of_all(whole, files)
                (whole / STATE).write_text(json.dumps(description | {"files": files}))
                sync(whole / STATE)
                (whole / COMMIT).write_text(digest(whole / STATE))
                sync(whole / COMMIT)
                sync(whole)
            else:
                partial = _said(whole, self._ranks.index).with_suffix(".partial")
                partial.write_text(json.dumps(files))
                partial.rename(_said(whole, self._ranks.index))
        num_bytes = sum(entry["bytes"] for entry in files.values())
        self._count(saved_bytes=num_bytes, save_s=time.perf_counter() - started)

    def _of_all(self, whole: Path, files: dict[str, Any]) -> dict[str, Any]:
        """Files by name with those of the other ranks, once they are there. OSError where one has
        failed."""
        for index in range(1, self._ranks.count):
            said = _said(whole, index)
            while not said.exists():
                if said.with_suffix(FAILED).exists() or self._closing.wait(LOOK_S):
                    raise OSError(f"save: rank {index} did not write its part; look for its error")
            files |= json.loads(said.read_text())
            said.unlink()
        return files

    @contextlib.contextmanager
    def _directory_of_all(self, directory: Path) -> Iterator[Path]:
        """`whole_directory` of the first rank, where the others write too; what it raises all
        raise."""
        ranks, told, refused = self._ranks, "", None
        with contextlib.ExitStack() as stack:
            if ranks.index == 0:
                try:
                    told = str(stack.enter_context(whole_directory(directory)))
                except (OSError, ValueError) as error:
                    refused, told = error, f"{REFUSED}{error}"
            told = ranks.texts(told)[0] if ranks.count > 1 else told
            if told.startswith(REFUSED):
                raise refused or ValueError(told.removeprefix(REFUSED))
            try:
                yield Path(told)
            except BaseException:
                if ranks.index:
                    with contextlib.suppress(OSError):
                        _said(Path(told), ranks.index).with_suffix(FAILED).touch()
                raise

    def finish(self) -> None:
        """Wait for the state that is being written, if there is one, and raise what went wrong: on
        all ranks what went wrong on one."""
        last, self._last = self._last, None
        if last is None:
            return
        started, error = time.perf_counter(), last.exception()
        if self._ranks.count > 1 and not self._closing.is_set():
            # the first rank took the folder away while this one wrote: its error says why
            gone = isinstance(error, FileNotFoundError) and self._ranks.index > 0
            said = list(filter(None, self._ranks.texts("" if gone else str(error or ""))))
            error = OSError(said[0]) if said and (gone or error is None) else error
            if error is not None and self._scratch is not None:
                # a rank may have written after the first gave up
                shutil.rmtree(self._scratch, ignore_errors=True)
        self._count(save_wait_s=time.perf_counter() - started)
        if error is not None:
            raise error

    def _count(self, **more: float) -> None:
        with self._counting:
            self.counters |= {name: self.counters.get(name, 0.0) + n for name, n in more.items()}

    def close(self) -> None:
        """`finish`, then end the threads; idempotent. Waits for no other rank, which may be gone: a
        state of several needs `finish` first."""
        self._closing.set()
        try:
            self.finish()
        finally:
            self._threads.shutdown()
            self._copiers.shutdown()
            self._forget()

    def _forget(self) -> None:
        """Give the memory of copies back."""
        self._copies.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy by this thread alone, which lets others run."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _like(tensors: Tensors) -> Tensors:
    """Host memory for copies of them, each at the beginning of a page."""
    arena = Arena([round_up(t.nbytes, PAGE) for t in tensors.values()], pinned="none")
    return _laid(tensors, iter(arena.pieces))


def _laid(tensors: Tensors, pieces: Iterator[torch.Tensor]) -> Tensors:
    """Pieces of an arena as copies of tensors."""
    return {name: next(pieces)[: t.nbytes].view(t.dtype) for name, t in tensors.items()}


def _copies_for(store: Store, block: int) -> Tensors:
    """Host memory for copies of a block on the host; what is on disk of it comes in one piece."""
    state = store.states[block]
    if block not in store.spec.on_disks:
        return _like(tensors_of(state))
    numel = state.weight.numel()
    (whole,) = Arena([store.spec.rest_itemsize * numel], pinned="none").pieces
    staged = staged_state(store.spec, torch.zeros_like(state.weight), whole)
    return {**tensors_of(staged), ON_DISK: whole}


def _num_bytes(state: BlockState) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state).values())


def _write_block(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, dict[str, Any]]:
    """Write one block's file; its name, and what the manifest says of it. OSError where the disk
    takes no more."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != ON_DISK}
    try:
        num_bytes, sha256 = blockfile.write(path, tensors, path.stem)
    except OSError as error:
        raise type(error)(
            f"save: {path.parent.parent}: {error.strerror or error}, allowed a disk with room; "
            "make room or choose another"
        ) from error
    return path.name, {"bytes": num_bytes, "sha256": sha256}


def describe(store: Store) -> dict[str, Any]:
    """What a state and the store it is loaded into must have in common."""
    spec = store.spec
    return {
        "format": FORMAT,
        "dtype": str(spec.dtype),
        "master": spec.master,
        "blocks": [[[f.name, list(f.shape)] for f in layout.fields] for layout in spec.layouts],
    }


def tensors_of(state: BlockState) -> Tensors:
    """What is saved of a block, by the names that its file has."""
    named = {name: getattr(state, name) for name in ("weight", "extra", "exp_avg", "exp_avg_sq")}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def file_of(directory: Path, block: int, index: int, count: int) -> Path:
    """Where part `index` of `count` of a block is."""
    part = f"-part-{index + 1}-of-{count}" if count > 1 else ""
    return directory / f"block-{block:04}{part}.safetensors"


def _said(whole: Path, index: int) -> Path:
    """Where a rank says which files it has written."""
    return whole / f"rank-{index}.json"
