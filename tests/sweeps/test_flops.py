"""FLOP conventions against torch's own counter on small models; peaks of data sheets; the host's
bytes by kind."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from analysis import rows
from sweeps import flops
from sweeps.result import host_split
from sweeps.rowfile import read_rows
from tests.models import make_model

BATCH, SEQ_LEN = 2, 24
RESULTS = Path(rows.__file__).parent / "results"


def counted(model: torch.nn.Module) -> float:
    """Operations of one label token, forward and backward, as torch counts them: matrix products
    alone, all T x T scores."""
    tokens = torch.randint(0, 96, (BATCH, SEQ_LEN))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / (BATCH * SEQ_LEN)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("key_heads", [1, 4], ids=["gqa", "mha"])
def test_conventions_are_what_torch_counts_but_for_what_they_say(
    tied: bool, key_heads: int
) -> None:
    options = {
        "num_attention_heads": 4,
        "num_key_value_heads": key_heads,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    model = make_model(
        "qwen2", attention="eager", tie_word_embeddings=tied, **options
    )  # eager: the counter sees the scores
    config, params = model.config, list(model.parameters())
    num_params = sum(param.numel() for param in params)
    no_product = sum(param.numel() for param in params if param.ndim < 2) + (
        0 if tied else model.get_input_embeddings().weight.numel()
    )
    found = flops.per_token(config, num_params, SEQ_LEN)
    scores = 12 * config.num_hidden_layers * config.hidden_size * SEQ_LEN
    assert counted(model) == 6 * (num_params - no_product) + scores
    assert found == {
        "6p": 6 * num_params,
        "6p_causal": 6 * num_params + scores / 2,
        "paper": 6 * num_params + scores,
    }
    assert found["paper"] - counted(model) == 6 * no_product


def test_a_head_wider_than_the_hidden_size_tells_the_conventions_apart() -> None:
    model = make_model("qwen3", head_dim=32, num_attention_heads=4, hidden_size=64)
    num_params = sum(param.numel() for param in model.parameters())
    found, layers = (
        flops.per_token(model.config, num_params, SEQ_LEN),
        model.config.num_hidden_layers,
    )
    assert found["6p_causal"] == 6 * num_params + 6 * layers * 4 * 32 * SEQ_LEN
    assert found["paper"] == 6 * num_params + 12 * layers * 64 * SEQ_LEN


def test_what_is_ambiguous_is_null() -> None:
    windowed = make_model("mistral", sliding_window=8).config
    assert flops.per_token(windowed, 10, 9) == {"6p": 60.0, "6p_causal": None, "paper": None}
    assert None not in flops.per_token(windowed, 10, 8).values()
    assert set(
        flops.per_token(make_model("gemma2", attention="eager").config, 10, 4097).values()
    ) == {60.0, None}
    from transformers import AutoConfig

    experts = AutoConfig.for_model("mixtral")
    assert set(flops.per_token(experts, 10, 8).values()) == {None}


def test_the_paper_reproduces_its_own_rows() -> None:
    """7B at 256K and 512K tokens (facts of arXiv 2604.05091): 236.1 s and 401.2 TFLOPS, 871.4 s and
    407.4."""
    num_params, layers, hidden = 7_615_616_512, 28, 3584
    for seq_len, step_s, tflops in ((262_144, 236.1, 401.2), (524_288, 871.4, 407.4)):
        assert flops.flops_paper(
            num_params, layers, hidden, seq_len
        ) * seq_len / step_s / 1e12 == pytest.approx(tflops, rel=1e-3)


def test_an_unknown_gpu_has_no_datasheet() -> None:
    assert flops.datasheet_tflops("NVIDIA H200") == 989.4
    assert flops.datasheet_tflops("NVIDIA Imaginary 9000") is None
    assert flops.datasheet_tflops(None) is None


def test_host_bytes_add_up_to_what_was_observed() -> None:
    plan = {
        "host": {
            "weights": 2,
            "master": 4,
            "moments": 8,
            "gradients": 2,
            "staging": 5,
            "activations": 7,
            "other": 99,
        },
        "device": {"weights": 100, "workspace": 1},
    }
    split = host_split(plan, 40, on_gpu=True)
    assert split == {
        "weights": 2,
        "master": 4,
        "moments": 8,
        "gradients": 2,
        "staging": 12,
        "other": 12,
    }
    on_cpu = host_split(plan, 40, on_gpu=False)
    assert (on_cpu["weights"], on_cpu["staging"], sum(on_cpu.values())) == (102, 13, 40)
    nothing_hosted = host_split({"host": {}, "device": {"weights": 100}}, 40, on_gpu=True)
    assert (nothing_hosted.pop("other"), set(nothing_hosted.values())) == (40, {0})
    assert host_split(plan, None, on_gpu=True) == host_split({}, 40, on_gpu=True) == {}


def test_rows_from_before_load_and_are_split_too() -> None:
    path = RESULTS / "vs_zero3_3b" / "2026-11-21_h200-16c_t1027.jsonl"
    before = read_rows(path)
    assert {row.bench_version for row in before} <= {1, 2}
    assert all(row.mfu_datasheet is None and row.host_split == {} for row in before)
    frame = rows.frame(path).set_index("family")
    split = frame.loc["zero3", "host_split"]
    assert sum(split.values()) == frame.loc["zero3", "peak_host_bytes"]
    assert split["moments"] == 8 * frame.loc["zero3", "num_params"]
