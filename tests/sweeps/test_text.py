"""Files of text: what a token learns, packing, order, the place in the data, and one line for what
is wrong."""

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from baselines.model import initial_weights
from baselines.registry import build
from baselines.system import Shape
from engine import Batch
from sweeps import auto, data, heldout, text
from sweeps.command import command_of
from sweeps.config import Cell, cell_from
from sweeps.groups import Data
from sweeps.identity import digest, hashed, published
from sweeps.packing import Documents, PackedStream, Part, Piece
from tests.models import make_model

pytestmark = pytest.mark.slow

IGNORED = -100
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LAST_FIRST = "{% for m in messages|reverse %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
"""A template in which no answer follows what prompts it."""
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
CHAT = [
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "three of them"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Of the library's, away from the user's own and from the working directory."""
    import datasets

    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Tokenizers of bytes with a few merges, by the chat template that they have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL)
    tokenizer.train_from_iterator(["how many of them there are, three or four"] * 9, trainer)
    folders = {}
    for name, template in [
        ("plain", None), ("marked", MARKED), ("unmarked", UNMARKED), ("last_first", LAST_FIRST)
    ]:  # fmt: skip
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
        fast.chat_template = template
        folder = tmp_path_factory.mktemp("tokenizer") / name
        fast.save_pretrained(folder)
        folders[name] = str(folder)
    folders["of weights alone"] = str(tmp_path_factory.mktemp("weights"))
    make_model("qwen2", num_hidden_layers=1).save_pretrained(folders["of weights alone"])
    return folders


def write(path: Path, examples: list[dict]) -> str:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(path)


def words(number: int, seed: int = 0) -> list[dict]:
    """Documents of unlike length."""
    draw = random.Random(seed)
    return [{"text": " ".join(draw.choices(["how", "many", "are", "there"], k=draw.randint(2, 30)))}
            for _ in range(number)]  # fmt: skip


def documents(*lengths: int, whole: bool = False, answers_from: int = 0) -> Documents:
    """Documents in which every token tells which it is, in two parts."""
    parts, first = [], 0
    for part in (lengths[:2], lengths[2:]):
        size = sum(part)
        flags = [int(at >= answers_from) for length in part for at in range(length)]
        parts.append(
            Part(
                tokens=torch.arange(first, first + size, dtype=torch.int32).numpy(),
                answers=torch.tensor(flags, dtype=torch.int8).numpy() if whole else None,
                lengths=torch.tensor(part, dtype=torch.int64).numpy(),
            )
        )
        first += size
    return Documents(parts, whole=whole, digest="")


def stream(found: Documents, *, batch_size=2, seq_len=8, seed=0, fraction=0.0) -> PackedStream:
    shape = Shape(batch_size=batch_size, seq_len=seq_len)
    return PackedStream(found, shape, seed, heldout_fraction=fraction)


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("tokens", "labels")]
    positions = (one.position_ids, other.position_ids)
    pairs += [positions] if positions[0] is not None else []
    return all(torch.equal(a, b) for a, b in pairs)


# Packing.


def test_text_flows_from_sequence_to_sequence_and_every_token_comes_once():
    found = documents(5, 12, 3, 20)
    batches = list(itertools.islice(stream(found, batch_size=1), 5))
    tokens = torch.cat([batch.tokens.flatten() for batch in batches])
    assert sorted(tokens.tolist()) == list(range(40))
    ends = {4, 16, 19, 39}
    for batch in batches:
        assert batch.attention_mask is None
        for token, label, place, before in zip(
            batch.tokens.flatten().tolist(),
            batch.labels.flatten().tolist(),
            batch.position_ids.flatten().tolist(),
            [None, *batch.tokens.flatten().tolist()[:-1]],
            strict=True,
        ):
            assert label == (IGNORED if token in ends else token + 1), "the label after a cut too"
            assert (place == 0) == (before is None or before in ends)


def test_a_whole_document_begins_the_next_sequence_where_it_does_not_fit():
    found = documents(5, 12, 3, 4, whole=True)
    batch = stream(found, batch_size=3, seq_len=8).batch(
        [[Piece(0, 0, 5), Piece(2, 0, 3)], [Piece(1, 0, 8)], [Piece(3, 0, 4)]],
        Shape(batch_size=3, seq_len=8),
    )
    assert batch.tokens[0, 1].tolist() == list(range(5, 13)), "too long: cut"
    assert batch.labels[0, 1].tolist() == list(range(6, 14))
    assert batch.tokens[0, 2].tolist() == [20, 21, 22, 23, 0, 0, 0, 0]
    assert batch.labels[0, 2].tolist() == [21, 22, 23, *[IGNORED] * 5]
    assert batch.position_ids[0, 2].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    for seed in range(9):
        for pieces in stream(found, seed=seed).epoch(3):
            assert all(piece.start == 0 for piece in pieces)
            assert sum(piece.stop for piece in pieces) <= 8
    flat = [piece.document for pieces in stream(found).epoch(0) for piece in pieces]
    assert sorted(flat) == [0, 1, 2, 3]


def test_answers_alone_are_learnt_and_what_has_none_in_reach_is_left_out():
    found = documents(5, 12, 3, 20, whole=True, answers_from=2)
    tokens, labels = found.read(Piece(0, 0, 5))
    assert tokens.tolist() == [0, 1, 2, 3, 4]
    assert labels.tolist() == [IGNORED, 2, 3, 4, IGNORED]
    late = documents(12, 5, 3, 20, whole=True, answers_from=4)
    order = [p.document for pieces in stream(late).epoch(0) for p in pieces]
    assert sorted(order) == [0, 1, 3], "the third has no answer, whatever follows it"
    with pytest.raises(ValueError, match=r"shape\.seq_len: got 3, .*every answer"):
        stream(late, seq_len=3)


@pytest.mark.parametrize("whole", [False, True])
def test_the_held_out_part_is_at_the_end_and_never_trained_on(whole):
    found = documents(5, 12, 3, 20, whole=whole)
    split = stream(found, seq_len=4, fraction=0.3)
    trained = {t for _ in range(30) for t in next(split).tokens.flatten().tolist()}
    kept = 20 if whole else 28
    assert max(trained) < kept
    assert whole or trained == set(range(kept))
    held = [batch.tokens.flatten().tolist() for batch in split.heldout(10**6)]
    assert held[0] == list(range(kept, kept + 4))
    assert len(list(split.heldout(1))) == 1
    assert not list(stream(found, fraction=0.0).heldout(100))
    if not whole:
        last = split.documents.read(Piece(3, 0, 8))[1]
        assert last[-1] == IGNORED, "no label leads into the held-out part"


@pytest.mark.parametrize("whole", [False, True])
def test_sequences_depend_on_seed_and_epoch_and_not_on_the_batch(whole):
    found = documents(*(random.Random(0).randint(2, 20) for _ in range(60)), whole=whole)

    def rows(size: int, seed: int = 0) -> list[list[int]]:
        steps = itertools.islice(stream(found, batch_size=size, seed=seed), 96 // size)
        return [row.tolist() for batch in steps for row in batch.tokens.flatten(0, 1)]

    assert rows(1) == rows(4) == rows(6)
    assert rows(1) != rows(1, seed=1)
    one, two = (list(stream(found).epoch(number)) for number in (0, 1))
    assert one != two
    assert one == list(stream(found).epoch(0))


# The place in the data.


def byte_stream(tmp_path: Path) -> data.ByteStream:
    (tmp_path / "a.py").write_bytes(bytes(range(256)) * 2)
    return data.ByteStream(data.load(1 << 20, 0.1, tmp_path), Shape(batch_size=4, seq_len=9), 0)


@pytest.mark.parametrize("kind", ["bytes", "text", "whole"])
def test_a_stream_goes_on_where_it_was(kind, tmp_path):
    """Within an epoch, at its very end, and in the midst of a batch of two epochs."""

    def begun() -> data.Stream:
        if kind == "bytes":
            return byte_stream(tmp_path)
        sizes = (random.Random(0).randint(2, 20) for _ in range(40))
        return stream(documents(*sizes, whole=kind == "whole"), batch_size=3)

    first = begun()
    states, steps, epochs = [], [], set()
    for _ in range(60):
        states.append(json.loads(json.dumps(first.state())))
        steps.append(next(first))
        epochs.add(first.state()["epoch"])
    assert len(epochs) > 2
    for number in (0, 1, 7, 20, 41, 59):
        other = begun()
        next(other)
        other.seek(states[number])
        assert other.state() == states[number]
        for step in steps[number:]:
            assert same(next(other), step)
    for place in ({}, {"epoch": -1, "sequence": 0}, {"epoch": 0, "sequence": 10**6}):
        with pytest.raises(ValueError, match=r"^data: got the place"):
            begun().seek(place)


# Files and tokenizers.


def tokens_of(files: str | list[str], **settings) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, labels) of each document."""
    found = text.documents_of(text.source_of(Data(files=files, **settings)))
    pieces = [Piece(number, 0, int(length)) for number, length in enumerate(found.lengths)]
    read = [found.read(piece) for piece in pieces]
    return [tokens.tolist() for tokens, _ in read], [labels.tolist() for _, labels in read]


def test_bytes_of_every_kind_of_file(tmp_path):
    import pyarrow
    from pyarrow import parquet

    examples = [{"text": "one two", "id": 3}, {"text": ""}, {"text": "three é"}]
    lines = write(tmp_path / "a.jsonl", examples)
    parquet.write_table(pyarrow.table({"body": ["four", "five"]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("six\nseven\n")
    tokens, labels = tokens_of(lines)
    assert tokens == [[*b"one two", 0], [*"three é".encode(), 0]], "an empty document is none"
    assert labels[0] == [*b"ne two", 0, IGNORED]
    several = tokens_of([str(tmp_path / "b.parquet"), str(tmp_path / "c.txt")], text_field="body")
    assert several[0] == [[*b"four", 0], [*b"five", 0], [*b"six\nseven\n", 0]]


def test_a_tokenizer_gives_ids_and_the_end_of_a_document(tmp_path, folders, monkeypatch):
    path = write(tmp_path / "a.jsonl", words(20))
    tokens, _ = tokens_of(path, tokenizer=folders["plain"])
    tokenizer = text.encoder_of(folders["plain"]).tokenizer
    written = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    assert [tokenizer.decode(found[:-1]) for found in tokens] == written
    assert {found[-1] for found in tokens} == {tokenizer.eos_token_id}
    assert max(map(len, tokens)) < max(map(len, written)), "there are merges"
    monkeypatch.setattr(text, "LONGEST", 40)
    long = "many of them\n" * 20 + "there" * 30
    (tmp_path / "b.txt").write_text(long)
    ((found,), _) = tokens_of(str(tmp_path / "b.txt"), tokenizer=folders["plain"])
    assert tokenizer.decode(found[:-1]) == long


@pytest.mark.parametrize("template", ["marked", "unmarked"])
def test_the_loss_of_a_conversation_is_on_what_the_assistant_says(template, tmp_path, folders):
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 2)
    tokens, labels = tokens_of(path, chat_field="messages", tokenizer=folders[template])
    tokenizer = text.encoder_of(folders[template]).tokenizer
    assert tokenizer.decode(tokens[0]) == (
        "<|user|>how many?<|end|><|assistant|>three of them<|end|>"
        "<|user|>sure?<|end|><|assistant|>yes<|end|>"
    )
    learnt = [label for label in labels[1] if label != IGNORED]
    assert tokenizer.decode(learnt) == "three of them<|end|>yes<|end|>"


def test_the_loss_of_a_pair_is_on_the_answer(tmp_path, folders):
    path = write(tmp_path / "a.jsonl", [{"query": "how many? ", "response": "three"}])
    fields = {"prompt_field": "query", "answer_field": "response"}
    ((tokens,), (labels,)) = tokens_of(path, tokenizer=folders["plain"], **fields)
    tokenizer = text.encoder_of(folders["plain"]).tokenizer
    assert tokenizer.decode(tokens) == "how many? three<|end|>"
    assert tokenizer.decode([x for x in labels if x != IGNORED]) == "three<|end|>"


# Cells.

SMALL = ["model=tiny", "shape.batch_size=2", "shape.seq_len=32", "measure.heldout_tokens=64"]


def cell_of(*overrides: str) -> Cell:
    auto.register("cpu")
    (cell,) = command_of([*SMALL, "data=text", *overrides]).cells
    return cell


def test_a_cell_is_known_by_the_text_and_not_by_where_it_lies(tmp_path):
    names = ("a.jsonl", "b.jsonl", "folder")
    (tmp_path / "folder").mkdir()
    one = write(tmp_path / "a.jsonl", words(40))
    moved = write(tmp_path / "folder" / "c.jsonl", words(40))
    other = write(tmp_path / "b.jsonl", words(40, seed=1))
    first, second, third = (cell_of(f"data.files={path}") for path in (one, moved, other))
    assert first.hash == second.hash != third.hash
    assert first.hash != cell_of(f"data.files=[{one},{other}]").hash
    config = published(first.config)
    assert digest(hashed(config)) == first.hash == cell_from(config).hash
    assert str(tmp_path) not in json.dumps(config), names
    assert config["data"]["files"] == "a.jsonl"
    assert "source" not in hashed(config)["data"]


def test_a_cell_of_text_trains_alike_under_engine_and_baseline(tmp_path):
    path = write(tmp_path / "a.jsonl", words(80))
    before, here = sorted(Path.cwd().iterdir()), {}
    for name in ("in_memory", "megatrain"):
        cell = cell_of(
            f"data.files={path}",
            f"system={name}",
            "system.dtype=float32",
            "recipe.lr=1e-3",
            "data.heldout_fraction=0.2",
        )
        spec, steps = cell.spec(), text.stream_of(cell)
        system = build(name, spec)
        system.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
        losses = [system.train_step(next(steps)).item() for _ in range(3)]
        system.drain()
        here[name] = [*losses, heldout.loss(heldout.trained(system, cell), cell)]
        system.close()
    assert here["megatrain"] == pytest.approx(here["in_memory"], rel=1e-4)
    assert here["in_memory"][2] < here["in_memory"][0]
    assert sorted(Path.cwd().iterdir()) == before


def test_tokens_are_made_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", words(30))
    source = text.source_of(Data(files=path))
    first = text.documents_of(source)
    text.documents_of.cache_clear()
    monkeypatch.setattr(text, "_encoded", None)
    again = text.documents_of(source)
    assert again.lengths.tolist() == first.lengths.tolist()
    assert not again.parts[0].tokens.flags.owndata, "mapped, not read"


BAD = {
    "missing file": ("nope.jsonl", {}, r"^data\.files: got '.*nope\.jsonl', which is no file"),
    "another kind": ("a.csv", {}, r"^data\.files: got '.*a\.csv', allowed a file of \.jsonl"),
    "empty": ("empty.jsonl", {}, r"^data\.files: got '.*empty\.jsonl', which is empty"),
    "blank": ("blank.jsonl", {}, r"^data\.files: got .*blank\.jsonl, which hold no text"),
    "no JSON": ("torn.jsonl", {}, r"^data\.files: got .*torn\.jsonl line 2 \(Expecting"),
    "no object": ("list.jsonl", {}, r"^data\.files: got .*list\.jsonl line 1 without the field"),
    "no UTF-8": ("latin.txt", {}, r"^data\.files: got .*latin\.txt \('utf-8'"),
    "no Parquet": ("no.parquet", {}, r"^data\.files: got .*no\.parquet \("),
    "no field": (
        "a.jsonl",
        {"text_field": "body"},
        r"^data\.files: got .*a\.jsonl line 1 without the field 'body'.*it has text",
    ),
    "no text": ("number.jsonl", {}, r"^data\.files: got .*line 1 with text='3', allowed a str"),
    "no folder": ("a.jsonl", {"tokenizer": "nope"}, r"^data\.tokenizer: got 'nope', which is no"),
    "no tokenizer": ("a.jsonl", {"tokenizer": "."}, r"^data\.tokenizer: got '\.' \("),
    "weights alone": (
        "a.jsonl",
        {"tokenizer": "of weights alone"},
        r"^data\.tokenizer: got '.*', which has none or an empty one",
    ),
    "no template": (
        "chat.jsonl",
        {"chat_field": "messages", "tokenizer": "plain"},
        r"^data\.chat_field: got 'messages' with data.tokenizer=.*no chat template",
    ),
    "no spans": (
        "chat.jsonl",
        {"chat_field": "messages", "tokenizer": "last_first"},
        r"^data\.files: got .*chat\.jsonl line 1 \(whose answer 1 is not what follows",
    ),
    "no answer": (
        "asked.jsonl",
        {"chat_field": "messages", "tokenizer": "marked"},
        r"^data\.files: got .*asked\.jsonl line 1 \(which has no answer",
    ),
    "no messages": (
        "odd.jsonl",
        {"chat_field": "messages", "tokenizer": "marked"},
        r"^data\.files: got .*odd\.jsonl line 1 \(",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_the_files_is_one_line(case, tmp_path, folders, monkeypatch):
    name, settings, words_ = BAD[case]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", words(3))
    write(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    write(tmp_path / "asked.jsonl", [{"messages": CHAT[:1]}])
    write(tmp_path / "odd.jsonl", [{"messages": [3]}])
    write(tmp_path / "number.jsonl", [{"text": 3}])
    for file, content in {
        "a.csv": b"text\n", "empty.jsonl": b"", "blank.jsonl": b'{"text": ""}\n\n',
        "torn.jsonl": b'{"text": "x"}\n{"text": \n', "list.jsonl": b"[1]\n",
        "latin.txt": b"caf\xe9", "no.parquet": b"PAR1 nothing",
    }.items():  # fmt: skip
        (tmp_path / file).write_bytes(content)
    if "tokenizer" in settings:
        settings = {
            **settings,
            "tokenizer": folders.get(settings["tokenizer"], settings["tokenizer"]),
        }
    before = sorted(os.listdir())
    with pytest.raises(ValueError, match=words_) as caught:
        text.documents_of(text.source_of(Data(files=str(tmp_path / name), **settings)))
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir()) == before


def test_what_does_not_fit_the_model_is_one_line(tmp_path, folders):
    path = f"data.files={write(tmp_path / 'a.jsonl', words(3))}"
    with pytest.raises(ValueError, match=r"^data\.tokenizer: got .* with 282 ids, allowed at most"):
        cell_of(path, f"data.tokenizer={folders['plain']}")
    cell_of(path, f"data.tokenizer={folders['plain']}", "model.config.vocab_size=282")
    with pytest.raises(ValueError, match=r"^shape\.seq_len: got 2048 x 2 sequences, allowed at mo"):
        cell_of(path, "shape.seq_len=2048")
    with pytest.raises(ValueError, match=r"^model\.model_type: got 'qwen2' .*sdpa"):
        cell_of(path, "model.attn_implementation=flex_attention")


def test_the_library_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    source = text.source_of(Data(files=write(tmp_path / "a.jsonl", words(3, seed=5))))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'megatrain-bench\[train\]'$"):
        text.documents_of(source)
