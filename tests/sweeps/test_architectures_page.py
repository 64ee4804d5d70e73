"""The command that tries every architecture: its verdicts, its page, and what it does when one
fails."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from sweeps import architectures
from sweeps.architectures import AGREES, DTYPES, FAILS, NOT_BUILT, REFUSED, Trained, Verdict
from sweeps.tiny import causal_types

pytestmark = pytest.mark.slow

PAGE = architectures.PAGE.read_text()
SAMPLE = [
    "llama",
    "gemma3",
    "gemma4_text",
    "gpt2",
    "bloom",
    "falcon",
    "gptj",
    "bart",
    "opt",
    "trocr",
]
SAMPLE += [
    "mamba",
    "mamba2",
    "rwkv",
    "bamba",
    "jamba",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "gemma3n_text",
    "zaya",
]
SAMPLE += ["glm_moe_dsa", "mllama", "hrm_text", "bert-generation", "xlstm"]
"""Those that were wrong, refused too late or ended in a traceback once, and neighbours."""


def rows() -> dict[str, list[str]]:
    """Model type -> its two cells on the page."""
    found = re.findall(r"^\| ([a-z0-9_-]+) \| (.+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    cells = {
        name: [first, first if second == "the same" else second] for name, first, second in found
    }
    return {name: cell for name, cell in cells.items() if not cell[0].isdigit()}


def kind(text: str) -> str:
    return next(k for k in (AGREES, REFUSED, NOT_BUILT, FAILS) if text.startswith(k))


def test_the_page_has_every_causal_type_of_the_pinned_transformers():
    version = re.search(r"transformers ([0-9.]+),", PAGE).group(1)
    assert (
        f"transformers=={version}"
        in Path(architectures.PAGE.parents[1] / "constraints.txt").read_text()
    )
    if transformers.__version__ == version:
        assert list(rows()) == sorted(causal_types())


def test_the_summary_counts_the_rows():
    for name in (AGREES, REFUSED, NOT_BUILT):
        counts = [sum(kind(cells[i]) == name for cells in rows().values()) for i in range(2)]
        assert f"| {name} | {counts[0]} | {counts[1]} |" in PAGE
    assert FAILS not in PAGE


def test_no_line_of_the_page_tells_of_a_machine():
    assert not re.search(r"/home|/work|/tmp|0x[0-9a-f]{6}|site-packages", PAGE)


def test_a_sample_of_types_is_found_as_the_page_has_it():
    command = [sys.executable, "-m", "sweeps.architectures", *SAMPLE, "--workers", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=architectures.PAGE.parents[1], timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(lines) == len(DTYPES) * len(SAMPLE)
    for name in SAMPLE if transformers.__version__ in PAGE else ():
        for dtype, cell in zip(("float32", "bfloat16"), rows()[name], strict=True):
            assert kind(lines[f"{name} {dtype}"]) == kind(cell), name


def test_a_name_that_is_no_type_is_one_line_and_exit_code_two(capsys):
    with pytest.raises(SystemExit) as caught:
        architectures.main(["llama", "lama"])
    assert caught.value.code == 2
    assert "TYPE: got 'lama', allowed the" in capsys.readouterr().err


def trained(loss: float = 1.0, gradient: float = 1.0) -> Trained:
    gradients = {"large": torch.ones(4), "small": torch.full((4,), 0.01 * gradient)}
    return Trained(losses=[1.0, loss], gradients=gradients)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (trained(), AGREES),
        (trained(loss=1 + 1e-7, gradient=1 + 1e-6), AGREES),
        (trained(loss=1 + 1e-5), FAILS),
        (trained(gradient=1.001), FAILS),
        (trained(gradient=0.0), FAILS),
        (trained(loss=float("nan")), FAILS),
        (trained(gradient=float("nan")), FAILS),
    ],
)
def test_what_differs_fails(found, expected):
    assert architectures.compare(found, trained(), torch.float32).kind == expected


def test_a_gradient_where_plain_training_has_none_fails():
    plain = Trained(losses=[1.0, 1.0], gradients={"large": torch.ones(4)})
    assert architectures.compare(trained(), plain, torch.float32).kind == FAILS


def die(model_type: str, dtype: torch.dtype) -> Verdict:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(model_type: str, dtype: torch.dtype) -> Verdict:
    while True:
        pass


@pytest.mark.parametrize(
    ("what", "reason"), [(die, "killed by SIGKILL"), (hang, "took more than 1 s")]
)
def test_a_crash_or_a_hang_is_a_line_and_no_page_is_written(
    what, reason, monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(architectures, "judge", what)
    monkeypatch.setattr(architectures, "TIME_LIMIT_S", 1.0)
    monkeypatch.setattr(architectures, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(architectures, "causal_types", lambda: ["llama", "gpt2"])
    assert architectures.main(["--workers", "2"]) == 1
    out, err = capfd.readouterr()
    assert f"llama bfloat16: FAILS: {reason}" in out
    assert "2 of 2 fail: gpt2, llama" in err
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_whole_and_the_same_whatever_the_order(monkeypatch, tmp_path):
    found = {
        "b": [Verdict(kind=AGREES, loss=1e-9)] * 2,
        "a": [Verdict(kind=REFUSED, reason="model: no | no")] * 2,
    }
    text = architectures.page(found, "5.0")
    again = {"a": found["a"], "b": [Verdict(kind=AGREES, loss=9e-7, gradient=1e-5)] * 2}
    assert architectures.page(again, "5.0") == text
    assert "| a | refused: no \\| no | the same |" in text
    architectures.write_whole(tmp_path / "page.md", text)
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert (tmp_path / "page.md").read_text() == text
