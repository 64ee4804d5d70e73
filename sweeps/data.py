"""The steps that every system trains on: the interface of a text, and real text with no download,
the sources of the Python standard library found on this machine, byte level.

Invariant: the same machine, seed and shape give the same batches, whatever system trains; the
held-out tail is never trained on; a label is the byte after its token, and -100 wherever there is
none. The sequences of an epoch and their order depend on no batch size, and two numbers say where
in them a run is.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from baselines.system import Shape
from engine import IGNORE_INDEX, Batch
from sweeps.groups import Data

T = TypeVar("T")
PAD = 0
"""Token put where a sequence has ended; its label is ignored and its mask is 0."""
SKIPPED = frozenset(
    (
        "__pycache__",
        "config",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    )
)
"""Folders that installations differ in, or that hold data more than source."""


class Stream(ABC, Generic[T]):
    """Endless optimizer steps of one text, whose held-out part is not among them.

    `state` says where it is, and `seek` goes there: what comes then is what would have come.
    """

    digest: str
    """What tells this text from others, 16 hex digits."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        self._epoch, self._sequence = 0, 0
        self._sequences: Sequence[T] | None = None

    @abstractmethod
    def epoch(self, number: int) -> Sequence[T]:
        """The sequences of an epoch, in their order; as many as it has, whatever the batch."""

    @abstractmethod
    def batch(self, sequences: Sequence[T], shape: Shape) -> Batch:
        """One step of `shape.batch_size` sequences."""

    @abstractmethod
    def heldout(self, num_tokens: int) -> Iterator[Batch]:
        """The first sequences of the held-out part, one a batch, as many as `num_tokens` fill but
        one at least; none where it is shorter than a sequence."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.batch([self._draw() for _ in range(self.shape.batch_size)], self.shape)

    def _draw(self) -> T:
        if self._sequences is None:
            self._sequences = self.epoch(self._epoch)
        if self._sequence == len(self._sequences):
            self._epoch, self._sequence = self._epoch + 1, 0
            self._sequences = self.epoch(self._epoch)
        self._sequence += 1
        return self._sequences[self._sequence - 1]

    def state(self) -> dict[str, int]:
        """The epoch, from 0, and how many of its sequences have been taken."""
        return {"epoch": self._epoch, "sequence": self._sequence}

    def seek(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was asked for, of a stream of the same text, seed and seq_len.

        ValueError, one line, for a place that this stream does not have.
        """
        epoch, sequence = state.get("epoch", -1), state.get("sequence", -1)
        sequences = self.epoch(epoch) if epoch >= 0 else ()
        if epoch < 0 or not 0 <= sequence <= len(sequences):
            raise ValueError(
                f"data: got the place {dict(state)}, allowed an epoch >= 0 and 0 to "
                f"{len(sequences)} of its sequences; go on with the text, seed and seq_len of then"
            )
        self._epoch, self._sequence, self._sequences = epoch, sequence, sequences


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text as bytes: what is trained on, and the tail that never is."""

    train: torch.Tensor
    """uint8 of shape [num_train_bytes]."""
    heldout: torch.Tensor
    """uint8 of shape [num_heldout_bytes]."""
    digest: str
    """SHA-256 of all the bytes, first 16 hex digits."""


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Python sources under the standard library's folder (or `root`), sorted by their path inside
    it."""
    top = root or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(top):
        folders[:] = set(folders) - SKIPPED  # they are not walked at all
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [(path.relative_to(top).as_posix(), path) for path in found if path.is_file()]
    return [path for _, path in sorted(files)]


@lru_cache(maxsize=4)
def load(max_bytes: int, heldout_fraction: float, root: Path | None = None) -> Corpus:
    """Read the corpus, at most `max_bytes` of it. Raises ValueError where there is no text."""
    text = bytearray()
    for path in stdlib_files(root):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    del text[max_bytes:]
    if not text:
        raise ValueError(
            "data: got no *.py in the standard library, allowed its sources; install Python with "
            "them"
        )
    whole = torch.frombuffer(text, dtype=torch.uint8)
    split = len(text) - int(len(text) * heldout_fraction)
    return Corpus(
        train=whole[:split], heldout=whole[split:], digest=hashlib.sha256(text).hexdigest()[:16]
    )


def corpus_of(data: Data) -> Corpus:
    """The corpus that a cell's config names."""
    return load(data.max_bytes, data.heldout_fraction)


class ByteStream(Stream[torch.Tensor]):
    """Sequences of seq_len + 1 bytes, each seen once an epoch, in an order fixed by `seed`."""

    def __init__(self, corpus: Corpus, shape: Shape, seed: int) -> None:
        """Raises ValueError where the text holds fewer than batch_size sequences."""
        super().__init__(shape, seed)
        self.corpus, self.digest = corpus, corpus.digest
        length = shape.seq_len + 1
        num_sequences = corpus.train.numel() // length
        if num_sequences < shape.batch_size:
            raise ValueError(
                f"shape.seq_len: got {shape.seq_len} x {shape.batch_size} sequences, allowed at "
                f"most {corpus.train.numel()} bytes of "
                "text a step; shorten the sequences, lower shape.batch_size or raise data.max_bytes"
            )
        self._all = corpus.train[: num_sequences * length].view(num_sequences, length)
        self._shuffled, self._next = random.Random(seed), 0

    def epoch(self, number: int) -> Sequence[torch.Tensor]:
        """Each shuffle goes on where the one before left the generator, so those before are
        repeated. Its order is fixed across Python versions and platforms."""
        if number < self._next:
            self._shuffled, self._next = random.Random(self.seed), 0
        while self._next <= number:
            order = list(range(len(self._all)))
            self._shuffled.shuffle(order)
            self._next += 1
        return _Picked(self._all, order)

    def batch(self, sequences: Sequence[torch.Tensor], shape: Shape) -> Batch:
        """`pack` of them."""
        return pack(sequences, shape)

    def heldout(self, num_tokens: int) -> Iterator[Batch]:
        """The first of the tail's sequences."""
        alone = Shape(batch_size=1, seq_len=self.shape.seq_len)
        for sequence in heldout(self.corpus, self.shape.seq_len, num_tokens):
            yield pack([sequence], alone)


class _Picked(Sequence[torch.Tensor]):
    """Rows of a matrix in an order, none of them copied."""

    def __init__(self, rows: torch.Tensor, order: Sequence[int]) -> None:
        self._rows, self._order = rows, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[self._order[index]]


def heldout(corpus: Corpus, seq_len: int, num_tokens: int) -> torch.Tensor:
    """The first sequences of the held-out tail, as many as `num_tokens` fill but one at least:
    uint8 [sequences, seq_len + 1]."""
    length = seq_len + 1
    num_sequences = min(max(1, num_tokens // seq_len), corpus.heldout.numel() // length)
    return corpus.heldout[: num_sequences * length].view(num_sequences, length)


def pack(sequences: Sequence[torch.Tensor], shape: Shape) -> Batch:
    """One step from `batch_size` sequences of at most seq_len + 1 bytes: shifted, padded, cut into
    micro-batches.

    The mask is None where nothing is padded, so that systems may take their unmasked kernels.
    """
    assert len(sequences) == shape.batch_size
    tokens = torch.full((shape.batch_size, shape.seq_len), PAD, dtype=torch.int64)
    labels = torch.full((shape.batch_size, shape.seq_len), IGNORE_INDEX, dtype=torch.int64)
    mask = torch.zeros((shape.batch_size, shape.seq_len), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        assert len(sequence) <= shape.seq_len + 1, "a sequence is longer than the shape"
        used = min(len(sequence), shape.seq_len)
        tokens[row, :used] = sequence[:used]
        labels[row, : len(sequence) - 1] = sequence[1:]
        mask[row, :used] = 1
    parts = (shape.num_micro_batches, shape.micro_batch_size, shape.seq_len)
    padded = bool((mask == 0).any())
    return Batch(
        tokens=tokens.view(parts),
        labels=labels.view(parts),
        attention_mask=mask.view(parts) if padded else None,
    )
