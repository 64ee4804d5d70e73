"""Documents packed into sequences that are all of one length.

Invariant: every token of an epoch's documents is in one sequence at most, and the sequences of an
epoch depend on the documents, the seed, the epoch and seq_len alone. Positions begin at 0 in every
piece of a document, and no label leads from one document into another. What is left of a sequence
is filled with a document of padding, which has no labels.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from baselines.system import Shape
from engine import IGNORE_INDEX, Batch
from sweeps.data import PAD, Stream

Array = np.ndarray[Any, Any]
NEVER = 1 << 62
"""Place of the first answer in a document that has none."""


class Piece(NamedTuple):
    """Tokens start to stop - 1 of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """Documents that lie one behind the other, in memory or in a file mapped into it."""

    tokens: Array
    """int32 [num_tokens]."""
    answers: Array | None
    """int8 [num_tokens], 1 on tokens that are to be learnt; None is all."""
    lengths: Array
    """Tokens of each document."""


class Documents:
    """Tokenised documents, in the order of the files."""

    def __init__(self, parts: Sequence[Part], *, whole: bool, digest: str) -> None:
        """whole: whether a document is never split."""
        self.parts, self.whole, self.digest = list(parts), whole, digest
        self.lengths: Array = np.concatenate([part.lengths for part in parts]).astype(np.int64)
        self._ends = np.cumsum(self.lengths)
        self._first_of_parts = np.cumsum([0, *(part.tokens.size for part in parts)]).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @cached_property
    def first_answers(self) -> Array:
        """Of each document the first token that is to be learnt."""
        found = [
            np.zeros(len(part.lengths), np.int64) if part.answers is None else _firsts(part)
            for part in self.parts
        ]
        return np.concatenate(found)

    def split(self, heldout_fraction: float) -> tuple[Documents, list[int], list[int]]:
        """(the documents, numbers of those to train on, numbers of those held out).

        Whole documents are held out whole; of text the last tokens are, and a document between is
        cut in two.
        """
        if self.whole:
            kept = len(self) - int(len(self) * heldout_fraction)
            return self, list(range(kept)), list(range(kept, len(self)))
        cut = self.num_tokens - int(self.num_tokens * heldout_fraction)
        number = int(np.searchsorted(self._ends, cut))
        if number < len(self) and cut < self._ends[number]:
            taken = cut - int(self._ends[number] - self.lengths[number])
            two = [size for size in (taken, int(self.lengths[number]) - taken) if size]
            halves = self._with_lengths([*self.lengths[:number], *two, *self.lengths[number + 1 :]])
            number += len(two) == 2
            return halves, list(range(number)), list(range(number, len(halves)))
        return self, list(range(number + 1)), list(range(number + 1, len(self)))

    def _with_lengths(self, lengths: Sequence[int]) -> Documents:
        """The same tokens cut into other documents, none of them across two parts."""
        other = Documents(self.parts, whole=self.whole, digest=self.digest)
        other.lengths = np.asarray(lengths, np.int64)
        other._ends = np.cumsum(other.lengths)
        return other

    def read(self, piece: Piece) -> tuple[Array, Array]:
        """(tokens, labels) of a piece: a label is the document's next token, or -100."""
        begin = int(self._ends[piece.document] - self.lengths[piece.document])
        number = bisect_right(self._first_of_parts, begin) - 1
        part, begin = self.parts[number], begin - self._first_of_parts[number]
        end = begin + int(self.lengths[piece.document])
        start, stop = begin + piece.start, begin + piece.stop
        labels = np.full(stop - start, IGNORE_INDEX, np.int64)
        following = slice(start + 1, min(stop + 1, end))
        labels[: following.stop - following.start] = part.tokens[following]
        if part.answers is not None:
            silent = part.answers[following] == 0
            labels[: len(silent)][silent] = IGNORE_INDEX
        return part.tokens[start:stop], labels


def _firsts(part: Part) -> Array:
    assert part.answers is not None
    starts = np.cumsum(part.lengths) - part.lengths
    answers = np.append(np.flatnonzero(part.answers), part.tokens.size)
    firsts = answers[np.searchsorted(answers, starts)] - starts  # may be another document's
    return np.where(firsts < part.lengths, firsts, NEVER)


class _Flowing(Sequence[list[Piece]]):
    """Documents one behind the other, cut every `seq_len` tokens; the last, shorter cut is left
    out."""

    def __init__(self, documents: Documents, order: Sequence[int], seq_len: int) -> None:
        self._order, self._seq_len = order, seq_len
        self._lengths = documents.lengths[np.asarray(order, np.int64)]
        self._ends = np.cumsum(self._lengths)

    def __len__(self) -> int:
        return int(self._ends[-1]) // self._seq_len if len(self._ends) else 0

    def __getitem__(self, index: Any) -> Any:
        at, stop = index * self._seq_len, (index + 1) * self._seq_len
        place, pieces = int(np.searchsorted(self._ends, at, side="right")), []
        while at < stop:
            begin, end = int(self._ends[place] - self._lengths[place]), int(self._ends[place])
            pieces.append(Piece(self._order[place], at - begin, min(end, stop) - begin))
            at, place = end, place + 1
        return pieces


class _Whole(Sequence[list[Piece]]):
    """Documents in their order, as many in a sequence as there is room for; one that is too long is
    cut."""

    def __init__(self, documents: Documents, order: Sequence[int], seq_len: int) -> None:
        lengths = np.minimum(documents.lengths[np.asarray(order, np.int64)], seq_len).tolist()
        self._order, self._lengths, self._firsts = order, lengths, list[int]()
        room = 0
        for place, length in enumerate(lengths):
            if length > room:
                self._firsts.append(place)
                room = seq_len
            room -= length

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, index: Any) -> Any:
        last = self._firsts[index + 1] if index + 1 < len(self) else len(self._order)
        places = range(self._firsts[index], last)
        return [Piece(self._order[place], 0, self._lengths[place]) for place in places]


class PackedStream(Stream[list[Piece]]):
    """Steps of packed documents, shuffled anew in every epoch."""

    def __init__(
        self, documents: Documents, shape: Shape, seed: int, *, heldout_fraction: float
    ) -> None:
        """Raises ValueError where the documents hold fewer tokens than one step, or none that is to
        be learnt within a sequence."""
        super().__init__(shape, seed)
        self.documents, self._train, self._heldout = documents.split(heldout_fraction)
        self.digest = documents.digest
        num_tokens = int(self.documents.lengths[: len(self._train)].sum())
        if num_tokens < shape.num_tokens:
            raise ValueError(
                f"shape.seq_len: got {shape.seq_len} x {shape.batch_size} sequences, allowed at "
                f"most {num_tokens} tokens a step, which is all that data.files has beside the "
                "held-out part; shorten the sequences, lower shape.batch_size or add files"
            )
        self._train, self._heldout = self._learnt(self._train), self._learnt(self._heldout)
        if not self._train:
            raise ValueError(
                f"shape.seq_len: got {shape.seq_len}, allowed more, for every answer of data.files "
                "begins after as many tokens; lengthen the sequences"
            )

    def _learnt(self, numbers: list[int]) -> list[int]:
        """Those documents that a cut at seq_len leaves something to learn of."""
        if not self.documents.whole:
            return numbers
        firsts = self.documents.first_answers
        return [number for number in numbers if firsts[number] <= self.shape.seq_len]

    def _packed(self, order: Sequence[int]) -> Sequence[list[Piece]]:
        kind = _Whole if self.documents.whole else _Flowing
        return kind(self.documents, order, self.shape.seq_len)

    def epoch(self, number: int) -> Sequence[list[Piece]]:
        """Shuffled by the seed and the epoch's number alone."""
        order = list(self._train)
        random.Random(f"{self.seed}:{number}").shuffle(order)
        return self._packed(order)

    def questions(self, number: int) -> Iterator[tuple[list[int], list[int]]]:
        """(what comes before the answer, the answer and the end) of the first held-out pairs."""
        for document in self._heldout[:number]:
            tokens, _ = self.documents.read(
                Piece(document, 0, int(self.documents.lengths[document]))
            )
            first = int(self.documents.first_answers[document])
            yield tokens[:first].tolist(), tokens[first:].tolist()

    def heldout(self, num_tokens: int) -> Iterator[Batch]:
        """Packed in the order of the files."""
        sequences, seq_len = self._packed(self._heldout), self.shape.seq_len
        alone = Shape(batch_size=1, seq_len=seq_len)
        for index in range(min(max(1, num_tokens // seq_len), len(sequences))):
            yield self.batch([sequences[index]], alone)

    def batch(self, sequences: Sequence[list[Piece]], shape: Shape) -> Batch:
        """Tokens, labels and positions; a batch without padding, for what is filled up is a
        document."""
        size = (shape.batch_size, shape.seq_len)
        tokens, labels = np.full(size, PAD, np.int64), np.full(size, IGNORE_INDEX, np.int64)
        positions = np.empty(size, np.int64)
        for row, pieces in enumerate(sequences):
            at = 0
            for piece in pieces:
                part = slice(at, at + piece.stop - piece.start)
                tokens[row, part], labels[row, part] = self.documents.read(piece)
                positions[row, part] = np.arange(part.stop - at)
                at = part.stop
            positions[row, at:] = np.arange(shape.seq_len - at)
        parts = (shape.num_micro_batches, shape.micro_batch_size, shape.seq_len)
        tensors = (torch.from_numpy(each).view(parts) for each in (tokens, labels, positions))
        return Batch(**dict(zip(("tokens", "labels", "position_ids"), tensors, strict=True)))
