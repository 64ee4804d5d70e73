"""Which tokens of a text a model is to learn: all of a document, an answer, or what the assistant
says in a conversation.

Invariant: what is no answer has flag 0, and its tokens are those that the tokenizer gives the whole
text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Tokens = tuple[list[int], list[int]]
"""Token ids, and 1 for each that is to be learnt."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a template says what the assistant generates."""
ASSISTANT = "assistant"


def conversation(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Tokens:
    """A conversation as the tokenizer's chat template writes it.

    ValueError, which says what is wrong, where nobody can say what of it the assistant says.
    """
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError("which has no answer of an assistant")
    if MARKED.search(tokenizer.chat_template):
        found = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [int(flag) for flag in found["assistant_masks"]]
    text, spans = _spans(tokenizer, messages)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = [(start, stop) for start, stop in found["offset_mapping"]]
    return list(found["input_ids"]), [int(_answers(place, spans)) for place in places]


def _answers(place: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a token's characters lie in an answer."""
    return any(start <= place[0] and place[1] <= stop for start, stop in spans)


def _spans(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[int, int]]]:
    """The whole text, and (start, stop) of each answer in it: from the end of what prompts it to
    the end of the text that it is the last message of."""

    def written(number: int, *, prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:number], tokenize=False, add_generation_prompt=prompt
            )
        )

    whole, spans = written(len(messages)), []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, after = written(number, prompt=True), written(number + 1)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"whose answer {number} is not what follows the messages before it in the "
                    "template, which has no {% generation %} either"
                )
            spans.append((len(before), len(after)))
    return whole, spans
