"""Real text with no download: the sources of the Python standard library found on this machine,
byte level.

Invariant: the same machine, seed and shape give the same batches, whatever system trains; the
held-out tail is never trained on; a label is the byte after its token, and -100 wherever there is
none.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from baselines.system import Shape
from engine import IGNORE_INDEX, Batch
from sweeps.config import Data

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
    files = [
        (path.relative_to(top).as_posix(), path) for path in top.rglob("*.py") if path.is_file()
    ]
    return [path for name, path in sorted(files) if not SKIPPED.intersection(name.split("/"))]


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


def batches(corpus: Corpus, shape: Shape, seed: int) -> Iterator[Batch]:
    """Endless optimizer steps: sequences of seq_len + 1 bytes, each seen once an epoch, in an order
    fixed by `seed`.

    Raises ValueError where the text holds fewer than batch_size sequences.
    """
    length = shape.seq_len + 1
    num_sequences = corpus.train.numel() // length
    if num_sequences < shape.batch_size:
        raise ValueError(
            f"shape.seq_len: got {shape.seq_len} x {shape.batch_size} sequences, allowed at most "
            f"{corpus.train.numel()} bytes of "
            "text a step; shorten the sequences, lower shape.batch_size or raise data.max_bytes"
        )
    return _epochs(corpus.train[: num_sequences * length].view(num_sequences, length), shape, seed)


def heldout(corpus: Corpus, seq_len: int, num_tokens: int) -> torch.Tensor:
    """The first sequences of the held-out tail, as many as `num_tokens` fill but one at least:
    uint8 [sequences, seq_len + 1]."""
    length = seq_len + 1
    num_sequences = min(max(1, num_tokens // seq_len), corpus.heldout.numel() // length)
    return corpus.heldout[: num_sequences * length].view(num_sequences, length)


def _epochs(sequences: torch.Tensor, shape: Shape, seed: int) -> Iterator[Batch]:
    shuffled = random.Random(seed)  # its order is fixed across Python versions and platforms
    order: list[int] = []
    while True:
        while len(order) < shape.batch_size:
            epoch = list(range(len(sequences)))
            shuffled.shuffle(epoch)
            order += epoch
        picked, order = order[: shape.batch_size], order[shape.batch_size :]
        yield pack([sequences[index] for index in picked], shape)


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
