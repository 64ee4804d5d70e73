"""How many held-out questions a trained model answers word for word.

Invariant: it comes after the measurement and changes nothing in it; the plain model of the library
answers, greedily, with the parameters that a system trained, and sees no more of a question than
training does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sweeps.config import Cell
from sweeps.data import PAD
from sweeps.packing import PackedStream
from sweeps.text import Encoder, encoder_of

AT_ONCE = 64
"""Questions that are answered together."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out question."""

    prompt: list[int]
    """Its tokens."""
    answer: list[int]
    """Those of its answer and the end."""
    text: str
    """What of the answer is compared."""


def questions(cell: Cell, stream: Any) -> list[Question]:
    """The first `measure.exact_match` questions that are held out, or as many as there are.

    ValueError, one line, for an answer in which `measure.answer_pattern` finds nothing.
    """
    if not cell.measure.exact_match:
        return []
    assert isinstance(stream, PackedStream), "the config is checked"
    encoder = encoder_of(cell.data.tokenizer)
    return [
        Question(prompt=prompt, answer=answer, text=_expected(cell, encoder, answer))
        for prompt, answer in stream.questions(cell.measure.exact_match)
    ]


def _expected(cell: Cell, encoder: Encoder, answer: Sequence[int]) -> str:
    text = text_of(encoder, answer)
    found = compared(text, cell.measure.answer_pattern)
    if found is None:
        raise ValueError(
            f"measure.answer_pattern: got {cell.measure.answer_pattern!r}, which is not found in "
            f"the answer {text[:80]!r}, allowed one that every held-out answer has; correct it"
        )
    return found


def text_of(encoder: Encoder, tokens: Sequence[int]) -> str:
    """What tokens say up to the end of the document."""
    until = next((at for at, token in enumerate(tokens) if token in encoder.end), len(tokens))
    said = list(tokens[:until])
    if encoder.tokenizer is None:
        return bytes(token for token in said if token < 256).decode(errors="replace").strip()
    return str(encoder.tokenizer.decode(said, skip_special_tokens=True)).strip()


def compared(text: str, pattern: str | None) -> str | None:
    """The last match of the pattern (its first group, if it has one), or all of the text without a
    pattern; None where there is no match."""
    if pattern is None:
        return text
    found = list(re.finditer(pattern, text))
    return found[-1][1 if found[-1].re.groups else 0].strip() if found else None


@torch.no_grad()
def share(model: nn.Module, cell: Cell, asked: Sequence[Question]) -> float:
    """The share of the questions whose answer is exactly the expected one."""
    encoder, pattern = encoder_of(cell.data.tokenizer), cell.measure.answer_pattern
    model = model.to(cell.spec().device).eval()
    said = [text_of(encoder, tokens) for tokens in _answers(model, encoder, asked)]
    good = [compared(text, pattern) == one.text for text, one in zip(said, asked, strict=True)]
    return sum(good) / len(good)


def _answers(model: Any, encoder: Encoder, asked: Sequence[Question]) -> Iterator[list[int]]:
    """The tokens after each question, as many as the longest answer has."""
    longest = max(len(one.answer) for one in asked)
    for first in range(0, len(asked), AT_ONCE):
        prompts = [one.prompt for one in asked[first : first + AT_ONCE]]
        width = max(map(len, prompts))
        tokens = torch.tensor([[PAD] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        said = model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=encoder.end or None,
            pad_token_id=PAD,
        )
        yield from said[:, width:].tolist()
