"""Text and batches: fixed order, labels shifted, padding ignored, the tail held out."""

import hashlib
import itertools
from pathlib import Path

import pytest
import torch

from baselines.system import Shape
from engine import IGNORE_INDEX
from sweeps import data


@pytest.fixture
def corpus(tmp_path: Path) -> data.Corpus:
    for name, text in (
        ("b.py", b"b" * 500),
        ("a.py", bytes(range(250)) * 2),
        ("test/t.py", b"no" * 99),
        ("a.txt", b"no"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    return data.load(1 << 20, 0.1, tmp_path)


def test_files_in_order_and_tail_held_out(corpus: data.Corpus) -> None:
    assert corpus.train.numel() == 900
    assert corpus.heldout.numel() == 100
    assert bytes(corpus.train[:250].tolist()) == bytes(range(250))
    assert set(corpus.heldout.tolist()) == {ord("b")}


def test_labels_are_the_next_byte(corpus: data.Corpus) -> None:
    batch = next(data.ByteStream(corpus, Shape(batch_size=4, seq_len=9, num_micro_batches=2), 0))
    assert batch.tokens.shape == (2, 2, 9)
    assert batch.attention_mask is None
    assert batch.num_tokens == 36
    assert torch.equal(batch.tokens[..., 1:], batch.labels[..., :-1])


def test_batches_are_deterministic_and_each_sequence_comes_once_an_epoch(
    corpus: data.Corpus,
) -> None:
    shape = Shape(batch_size=9, seq_len=9)
    first, again, other = (
        list(itertools.islice(data.ByteStream(corpus, shape, seed), 10)) for seed in (0, 0, 1)
    )
    assert all(torch.equal(one.tokens, two.tokens) for one, two in zip(first, again, strict=True))
    assert not all(
        torch.equal(one.tokens, two.tokens) for one, two in zip(first, other, strict=True)
    )
    seen = torch.cat([batch.tokens.flatten(0, 1) for batch in first]).sort(0).values
    whole = corpus.train.view(90, 10)[:, :9].long().sort(0).values
    assert torch.equal(seen, whole)


def test_padding_is_never_a_label() -> None:
    shape = Shape(batch_size=2, seq_len=4)
    batch = data.pack([torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7])], shape)
    assert batch.tokens.tolist() == [[[1, 2, 3, 4], [6, 7, 0, 0]]]
    ignored = IGNORE_INDEX
    assert batch.labels.tolist() == [[[2, 3, 4, 5], [7, ignored, ignored, ignored]]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[[1, 1, 1, 1], [1, 1, 0, 0]]]
    assert batch.num_tokens == 5


def test_too_little_text_is_one_line(corpus: data.Corpus) -> None:
    with pytest.raises(ValueError, match=r"shape\.seq_len: got 900 x 1"):
        data.ByteStream(corpus, Shape(batch_size=1, seq_len=900), 0)


def test_the_standard_library_is_there() -> None:
    corpus = data.load(1 << 16, 0.02)
    assert corpus.train.numel() + corpus.heldout.numel() == 1 << 16
    assert len(corpus.digest) == 16


def test_the_order_of_the_bytes_is_that_of_the_committed_rows(corpus: data.Corpus) -> None:
    """Of twelve steps of eight sequences, which are more than an epoch of ninety."""
    steps = list(itertools.islice(data.ByteStream(corpus, Shape(batch_size=8, seq_len=9), 3), 12))
    found = hashlib.sha256()
    for batch in steps:
        found.update(batch.tokens.numpy().tobytes() + batch.labels.numpy().tobytes())
    assert found.hexdigest()[:16] == "fc03bd366890c8b5"
