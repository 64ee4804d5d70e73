"""The text of a cell: the standard library's sources, or files of JSONL, Parquet or plain text,
tokenised.

Invariant: files are tokenised once, into the cache of the library `datasets`, from which they are
mapped into memory; nothing is fetched, and nothing is written beside them. What is wrong with them
is a ValueError of one line that names the file and the line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from baselines.model import config_of
from sweeps import borders, chat
from sweeps.config import Cell
from sweeps.data import PAD, ByteStream, Stream, corpus_of
from sweeps.groups import Data
from sweeps.packing import Documents, PackedStream, Part

FORMAT = 1
"""Of the cached tokens; another one has files tokenised anew."""
AT_ONCE = 256
"""Documents that are tokenised together."""
LONGEST = 1 << 20
"""Characters that are tokenised together; a longer document is cut at the end of a line."""
KINDS = (".jsonl", ".json", ".parquet", ".txt")
HALF = re.compile(r"[\ud800-\udfff]")
"""Half of a character beyond the first 65,536, which JSON can hold and UTF-8 cannot."""
Example = tuple[str, Mapping[str, Any]]
"""Where it stands, and its fields."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is read, and how: all that the tokens follow from."""

    paths: tuple[str, ...]
    tokenizer: str | None
    fields: tuple[str, ...]
    chat: bool
    digest: str

    @property
    def whole(self) -> bool:
        """Whether its documents are conversations or pairs, which are never split."""
        return self.chat or len(self.fields) > 1


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer of transformers, or bytes."""

    encode: Callable[[list[str]], list[list[int]]]
    """Token ids of each text, without special tokens."""
    begin: list[int]
    end: list[int]
    """What a document begins and ends with."""
    num_ids: int
    tokenizer: Any = None


def stream_of(cell: Cell) -> Stream[Any]:
    """The steps that a cell is trained on, at their beginning. ValueError, one line, for what is
    wrong with its text, or with the text for its model."""
    if not cell.data.paths:
        return ByteStream(corpus_of(cell.data), cell.shape, cell.seed)
    source = source_of(cell.data)
    if cell.data.tokenizer is not None:
        _require_vocabulary(cell, encoder_of(cell.data.tokenizer).num_ids)
    borders.require(cell.model)
    documents = documents_of(source)
    fraction = cell.data.heldout_fraction
    return PackedStream(documents, cell.shape, cell.seed, heldout_fraction=fraction)


def _require_vocabulary(cell: Cell, num_ids: int) -> None:
    config = config_of(cell.model)
    vocabulary = config.get_text_config().vocab_size
    if num_ids > vocabulary:
        raise ValueError(
            f"data.tokenizer: got {cell.data.tokenizer!r} with {num_ids} ids, allowed at most "
            f"{vocabulary} (model.config.vocab_size of {cell.model.name}); give the model's own "
            "tokenizer or a larger vocabulary"
        )


def source_of(data: Data) -> Source:
    """Where a text comes from, with the digest of the files, the tokenizer and the fields."""
    for path in data.paths:
        _require_file(path)
    if data.chat_field is not None:
        fields: tuple[str, ...] = (data.chat_field,)
    elif data.prompt_field is not None and data.answer_field is not None:
        fields = (data.prompt_field, data.answer_field)
    else:
        fields = (data.text_field or "text",)
    chats = data.chat_field is not None
    known = hashlib.sha256(json.dumps([FORMAT, fields, chats]).encode())
    for path in data.paths:
        known.update(_sha256(path, Path(path).stat().st_mtime_ns).encode())
    if data.tokenizer is not None:
        known.update(_identity(encoder_of(data.tokenizer)).encode())
    digest = known.hexdigest()[:16]
    return Source(
        paths=data.paths, tokenizer=data.tokenizer, fields=fields, chat=chats, digest=digest
    )


def _require_file(path: str) -> None:
    allowed = f"allowed a file of {', '.join(KINDS)}; give data.files=PATH"
    if Path(path).suffix not in KINDS:
        raise ValueError(f"data.files: got {path!r}, {allowed}")
    if not Path(path).is_file():
        raise ValueError(f"data.files: got {path!r}, which is no file, {allowed}")
    if not Path(path).stat().st_size:
        raise ValueError(f"data.files: got {path!r}, which is empty, {allowed}")


@lru_cache(maxsize=64)
def _sha256(path: str, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() + Path(path).suffix


def _identity(encoder: Encoder) -> str:
    """All of a tokenizer that its tokens follow from."""
    tokenizer = encoder.tokenizer
    template = tokenizer.chat_template
    return json.dumps([tokenizer.backend_tokenizer.to_str(), template, encoder.begin, encoder.end])


@lru_cache(maxsize=4)
def encoder_of(folder: str | None) -> Encoder:
    """The tokenizer of a folder, or bytes. ValueError, one line, for a folder that has none."""
    if folder is None:
        return Encoder(encode=_bytes, begin=[], end=[PAD], num_ids=256)
    allowed = "allowed a folder with a fast tokenizer of transformers (tokenizer.json)"
    if not Path(folder).is_dir():
        raise ValueError(
            f"data.tokenizer: got {folder!r}, which is no folder, {allowed}; give its path"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # whatever transformers says of a folder without one
        why = " ".join(str(error).split())[:200]
        raise ValueError(
            f"data.tokenizer: got {folder!r} ({why}), {allowed}; give another"
        ) from None
    if not num_ids or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        got = f"got {folder!r}, which has none or an empty one"  # transformers makes one up
        raise ValueError(f"data.tokenizer: {got}, {allowed}; give another, or none for bytes")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    begin = [token for token in tokenizer("")["input_ids"] if token not in end]

    def encode(texts: list[str]) -> list[list[int]]:
        return list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])

    return Encoder(encode=encode, begin=begin, end=end, num_ids=num_ids, tokenizer=tokenizer)


def _bytes(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


@lru_cache(maxsize=4)
def documents_of(source: Source) -> Documents:
    """The tokens, from the cache where they are there. ValueError, one line, for what is wrong."""
    try:
        import datasets
        from datasets.exceptions import DatasetGenerationError
    except ImportError:
        raise ValueError(
            "data: got files, allowed where the library datasets is installed; pip install "
            "'megatrain-bench[train]'"
        ) from None
    if source.chat and not encoder_of(source.tokenizer).tokenizer.chat_template:
        raise ValueError(
            f"data.chat_field: got {source.fields[0]!r} with data.tokenizer={source.tokenizer}, "
            "which has no chat template, allowed with one that has; give another tokenizer, or "
            "data.prompt_field and data.answer_field"
        )
    columns = {"tokens": datasets.List(datasets.Value("int32"))}
    if source.whole:
        columns["answers"] = datasets.List(datasets.Value("int8"))
    datasets.disable_progress_bars()
    try:
        made = datasets.Dataset.from_generator(
            tokenised, features=datasets.Features(columns), gen_kwargs={"source": source}
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError) and str(error.__cause__).startswith("data."):
            raise error.__cause__ from None
        raise
    return Documents(list(_parts(made)), whole=source.whole, digest=source.digest)


def _parts(made: Any) -> Iterator[Part]:
    """The pieces that the library wrote the documents in, none of them copied."""
    tokens = made.data.column("tokens").chunks
    answers = made.data.column("answers").chunks if "answers" in made.column_names else None
    for number, chunk in enumerate(tokens):
        yield Part(
            tokens=chunk.flatten().to_numpy(),
            answers=None if answers is None else answers[number].flatten().to_numpy(),
            lengths=np.asarray(chunk.value_lengths().to_numpy()),
        )


def tokenised(source: Source) -> Iterator[dict[str, list[int]]]:
    """The documents of two tokens or more, in the order of the files."""
    encoder, found = encoder_of(source.tokenizer), False
    examples = _examples(source)
    while some := list(islice(examples, AT_ONCE)):
        for tokens, answers in _encoded(source, encoder, some):
            if len(tokens) > 1:
                found = True
                yield {"tokens": tokens, "answers": answers} if source.whole else {"tokens": tokens}
    if not found:
        raise ValueError(
            f"data.files: got {', '.join(source.paths)}, which hold no text, allowed files with "
            "some; give others"
        )


def _encoded(
    source: Source, encoder: Encoder, examples: Sequence[Example]
) -> Iterator[chat.Tokens]:
    if source.chat:
        for where, example in examples:
            yield _conversation(encoder, where, example[source.fields[0]])
        return
    columns = [[example[name] for _, example in examples] for name in source.fields]
    found = [_encode(encoder, texts) for texts in columns]
    for *prompts, answer in zip(*found, strict=True):
        prompt = [*encoder.begin, *(token for tokens in prompts for token in tokens)]
        learnt = [*answer, *encoder.end]
        yield [*prompt, *learnt], [0] * len(prompt) + [1] * len(learnt)


def _encode(encoder: Encoder, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, a long one cut."""
    cut = [_cut(text) for text in texts]
    ids = iter(encoder.encode([piece for pieces in cut for piece in pieces]))
    return [[token for _ in pieces for token in next(ids)] for pieces in cut]


def _cut(text: str) -> list[str]:
    if len(text) <= LONGEST:
        return [text]
    pieces, size = [""], 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), LONGEST):
            part = line[start : start + LONGEST]
            if size + len(part) > LONGEST:
                pieces.append("")
                size = 0
            pieces[-1] += part
            size += len(part)
    return pieces


def _conversation(encoder: Encoder, where: str, messages: Any) -> chat.Tokens:
    allowed = "allowed a list of messages {role, content} with an answer of an assistant"
    try:
        if not messages:
            raise ValueError("which is no conversation")
        return chat.conversation(encoder.tokenizer, [dict(message) for message in messages])
    except Exception as error:  # a template may raise what it likes
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = kind + " ".join(str(error).split())[:200]
        raise ValueError(
            f"data.files: got {where} ({why}), {allowed}; correct it, or give another tokenizer"
        ) from None


def _examples(source: Source) -> Iterator[Example]:
    """Every example of every file, with the fields that are read of the types that they need."""
    kind: type = list if source.chat else str
    for path in source.paths:
        for where, example in _read(path, source.fields):
            for name in source.fields:
                _require_field(where, example, name, kind)
            yield where, example


def _require_field(where: str, example: Any, name: str, kind: type) -> None:
    if not isinstance(example, Mapping) or name not in example:
        fields = ", ".join(map(str, example)) if isinstance(example, Mapping) else "no fields"
        raise ValueError(
            f"data.files: got {where} without the field {name!r}, allowed one with it (it has "
            f"{fields[:200]}); name another in data.text_field, data.chat_field or "
            "data.prompt_field and data.answer_field"
        )
    if not isinstance(example[name], kind):
        raise ValueError(
            f"data.files: got {where} with {name}={str(example[name])[:80]!r}, allowed a "
            f"{kind.__name__}; correct it"
        )
    if kind is str and HALF.search(example[name]):
        raise ValueError(
            f"data.files: got {where} with half a character (\\ud800 to \\udfff) in {name}, "
            "allowed whole ones; correct it"
        )


def _read(path: str, fields: Sequence[str]) -> Iterator[tuple[str, Any]]:
    suffix = Path(path).suffix
    if suffix == ".txt":
        yield path, {fields[0]: _decoded(path, Path(path).read_bytes())}
    elif suffix == ".parquet":
        yield from _rows(path)
    else:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path} line {number}", _json(f"{path} line {number}", line)


def _decoded(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"data.files: got {where} ({error}), allowed UTF-8; convert it") from None


def _json(where: str, line: bytes) -> Any:
    try:
        return json.loads(_decoded(where, line))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"data.files: got {where} ({error}), allowed one JSON object a line; correct it"
        ) from None


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        rows = datasets.load_dataset("parquet", data_files=[path], split="train", streaming=True)
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row
    except ValueError as error:
        if str(error).startswith("data."):
            raise
        raise _no_parquet(path, error) from None
    except Exception as error:  # whatever the library says of a file that is none
        raise _no_parquet(path, error) from None


def _no_parquet(path: str, error: Exception) -> ValueError:
    why = " ".join(str(error).split())[:200]
    return ValueError(f"data.files: got {path} ({why}), allowed a Parquet file; give another")
