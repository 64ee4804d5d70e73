"""Questions answered word for word: which are asked, what is compared, and that a batch of padded
questions is answered as each alone would be."""

import json
from pathlib import Path

import pytest
import torch

from baselines.model import initial_weights
from baselines.registry import build
from sweeps import auto, exact_match, heldout
from sweeps.command import command_of
from sweeps.config import Cell
from sweeps.text import encoder_of, stream_of

pytestmark = pytest.mark.slow
PAIRS = [("sky?", "blue"), ("the colour of grass?", "green"), ("and snow, in winter?", "white")]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    import datasets

    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)


def cell_of(tmp_path: Path, *overrides: str) -> Cell:
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"q": question, "a": answer}) for question, answer in PAIRS * 20]
    path.write_text("\n".join(lines))
    auto.register("cpu")
    (cell,) = command_of(
        [
            "model=tiny",
            "model.config.num_hidden_layers=2",
            "model.config.hidden_size=64",
            "model.config.num_attention_heads=2",
            "model.config.intermediate_size=128",
            "shape.batch_size=2",
            "shape.seq_len=64",
            "data=text",
            f"data.files={path}",
            "data.prompt_field=q",
            "data.answer_field=a",
            "data.heldout_fraction=0.1",
            "system=in_memory",
            "system.dtype=float32",
            "recipe.lr=5e-3",
            "measure.exact_match=9",
            *overrides,
        ]
    ).cells
    return cell


def trained(cell: Cell, num_steps: int) -> torch.nn.Module:
    spec, steps = cell.spec(), stream_of(cell)
    system = build(cell.system, spec)
    system.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
    for _ in range(num_steps):
        system.train_step(next(steps))
    system.drain()
    model = heldout.trained(system, cell)
    system.close()
    return model


def test_as_many_held_out_questions_as_there_are(tmp_path: Path) -> None:
    asked = exact_match.questions(cell := cell_of(tmp_path), stream_of(cell))
    assert [bytes(one.prompt).decode() for one in asked] == [q for q, _ in PAIRS * 2]
    assert [bytes(one.answer).decode() for one in asked] == [f"{a}\0" for _, a in PAIRS * 2]
    assert [one.text for one in asked] == [a for _, a in PAIRS * 2]
    few = cell_of(tmp_path, "measure.exact_match=2")
    assert len(exact_match.questions(few, stream_of(few))) == 2
    none = cell_of(tmp_path, "measure.exact_match=0")
    assert exact_match.questions(none, stream_of(none)) == []


def test_padded_questions_are_answered_as_each_alone_and_what_was_learnt_is_exact(
    tmp_path: Path,
) -> None:
    cell = cell_of(tmp_path)
    asked = exact_match.questions(cell, stream_of(cell))
    texts = {}
    for num_steps in (4, 60):
        model, encoder = trained(cell, num_steps).eval(), encoder_of(None)
        found = [exact_match.text_of(encoder, one) for one in
                 exact_match._answers(model, encoder, asked)]  # fmt: skip
        alone = [exact_match.text_of(encoder, greedily(model, one.prompt, 6)) for one in asked]
        assert found == alone
        texts[num_steps] = found
        share = sum(one == each.text for one, each in zip(found, asked, strict=True)) / len(asked)
        assert exact_match.share(model, cell, asked) == share
    assert texts[60] == [a for _, a in PAIRS * 2] != texts[4]


@torch.no_grad()
def greedily(model: torch.nn.Module, prompt: list[int], longest: int) -> list[int]:
    """Without padding, cache or the library's loop."""
    tokens = list(prompt)
    for _ in range(longest):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("so 7. The answer is: 12", r"The answer is: (-?\d+)", "12"),
        ("The answer is: 3. The answer is: 4", r"The answer is: (-?\d+)", "4"),
        ("12 or 13", r"\d+", "13"),
        ("none", r"\d+", None),
        ("all of it", None, "all of it"),
    ],
)
def test_a_pattern_says_what_is_compared(text: str, pattern: str, expected: str) -> None:
    assert exact_match.compared(text, pattern) == expected


def test_an_answer_without_the_pattern_is_one_line(tmp_path: Path) -> None:
    cell = cell_of(tmp_path, "measure.answer_pattern='[0-9]+'")
    with pytest.raises(ValueError, match=r"measure.answer_pattern: got '\[0-9\]\+', which is not"):
        exact_match.questions(cell, stream_of(cell))
