"""Layers that multiply in float8: which products they are, and that nothing else depends on them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from baselines import in_memory
from baselines.model import initial_weights
from baselines.registry import build
from engine import EngineConfig, RefusedError
from engine.layers.float8 import Float8Linear, use_float8
from tests.baselines.test_baseline_parity import CPU, make_batch, make_spec
from tests.models import assert_same, make_engine, make_model, train
from tests.twin import TwinLanes

BF16 = torch.bfloat16
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
"""Of activations, weights and gradients."""


def engine_of(**options: Any) -> Any:
    model = make_model("qwen2", dtype=BF16, num_hidden_layers=4)
    return make_engine(model, products="float8", **options)


PLACEMENTS = [
    {"depth": 1, "streams": 1},
    {"keep_activations": 2, "reload_weights": 1, "device_optimizer": 2},
    {"offload_activations": 3},
    {"checkpoint_interval": 3, "keep_attention": 4},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_any_placement_gives_identical_bits(placement: dict[str, Any]) -> None:
    found = train(engine_of(poison=True, lanes=TwinLanes(seed=1), **placement))
    assert_same(found, train(engine_of()))
    plain = make_engine(make_model("qwen2", dtype=BF16, num_hidden_layers=4))
    losses = train(plain)[0]
    assert found[0] != losses
    assert found[0] == pytest.approx(losses, abs=2e-2)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What float8 makes of a tensor whose largest element it can just hold, in float64."""
    most = torch.finfo(dtype).max
    scale = (most / tensor.abs().max().double()).float()
    return (tensor.float() * scale).clamp(-most, most).to(dtype).double() / scale.double()


def products(layer: nn.Module, hidden: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input, gradient of the weight, and of the bias."""
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    return [output.detach(), *torch.autograd.grad(output, [hidden, *layer.parameters()], grad)]


def case(shape: tuple[int, ...]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A linear layer from 48 to 32, its input and its output's gradient, far from each other in
    size."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, dtype=BF16)
    return (
        layer,
        100 * torch.randn(*shape, 48, dtype=BF16),
        1e-6 * torch.randn(*shape, 32, dtype=BF16),
    )


@pytest.mark.parametrize("shape", [(16,), (2, 24)])
def test_the_three_products_are_those_of_rounded_operands(shape: tuple[int, ...]) -> None:
    layer, hidden, grad = case(shape)
    x, w, g = (
        rounded(t.detach(), dtype)
        for t, dtype in zip((hidden, layer.weight, grad), DTYPES, strict=True)
    )
    x, g = x.flatten(0, -2), g.flatten(0, -2)
    expected = [
        x @ w.T + layer.bias.detach().double(),
        g @ w,
        g.T @ x,
        grad.double().flatten(0, -2).sum(0),
    ]
    assert use_float8([layer]) == 48 * 32
    for mine, right in zip(products(layer, hidden, grad), expected, strict=True):
        scale = right.abs().max().item()
        assert mine.double().view(right.shape) / scale == pytest.approx(right / scale, abs=8e-3)


def test_zeros_stay_zeros() -> None:
    layer, hidden, grad = case((16,))
    use_float8([layer])
    output, grad_hidden, grad_weight, _ = products(layer, 0 * hidden, 0 * grad)
    assert torch.equal(output, layer.bias.expand(16, 32))
    assert not grad_hidden.any()
    assert not grad_weight.any()


def test_layers_whose_sides_have_no_kernel_are_left_alone_and_so_are_routers() -> None:
    layers = nn.Sequential(nn.Linear(16, 24), nn.Linear(32, 16), nn.LayerNorm(32))
    routed = nn.ModuleDict({"gate": nn.Linear(32, 16), "gate_proj": nn.Linear(16, 16)})
    assert use_float8([layers, routed]) == 32 * 16 + 16 * 16
    assert [type(module) for module in layers] == [nn.Linear, Float8Linear, nn.LayerNorm]
    assert [type(module) for module in routed.values()] == [nn.Linear, Float8Linear]


def test_a_model_of_which_nothing_multiplies_in_float8_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"^system\.products: got float8, allowed where layers"):
        make_engine(make_model("gpt2", dtype=BF16, n_embd=32, n_head=4), products="float8")


def test_operands_lie_row_by_row_whatever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's kernels want it; those of a CPU take any."""
    seen: list[tuple[bool, bool]] = []
    plain = torch._scaled_mm

    def watched(first: torch.Tensor, second: torch.Tensor, **given: Any) -> torch.Tensor:
        seen.append((first.is_contiguous(), second.t().is_contiguous()))
        return plain(first, second, **given)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    layer, hidden, _ = case((1, 16))
    use_float8([layer])
    turned = hidden.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    layer(turned).sum().backward()
    assert seen == [(True, True)] * 3


def test_what_is_done_to_an_output_in_place_is_allowed() -> None:
    """As Llama 4 does to that of its shared expert."""
    layer, hidden, _ = case((2, 8))
    use_float8([layer])
    layer.bias = None
    output = layer(hidden.requires_grad_())
    output.add_(1.0).sum().backward()
    assert hidden.grad is not None


def test_a_plan_counts_what_float8_adds() -> None:
    """Weights made float8 in a compiled graph; an operand twice in fp32 in an eager one."""
    plain, eager, compiled, quick = (
        make_engine(make_model("qwen2", dtype=BF16), **options).work
        for options in (
            {},
            {"products": "float8"},
            {"products": "float8", "compile": True},
            {"compile": True},
        )
    )
    linear = 32 * (32 + 16 + 16 + 32 + 3 * 64)
    assert compiled.float8 == linear
    assert compiled.kept_bytes - quick.kept_bytes == linear
    assert eager.kept_bytes == plain.kept_bytes
    more = eager.layer_bytes(backward=True) - plain.layer_bytes(backward=True)
    assert more == 8 * 64 * 2 * 16


@pytest.mark.slow
@pytest.mark.parametrize("placement", [{}, {"keep_activations": 2}], ids=str)
def test_compiled_it_is_the_same_in_one_graph(placement: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="system.compile")  # of two graphs
        compiled = train(engine_of(compile=True, **placement))
    assert compiled[0] == pytest.approx(train(engine_of())[0], abs=5e-3)


def trained(system: str, **options: Any) -> list[float]:
    spec = make_spec(BF16, products="float8", **options)
    one = build(system, spec)
    try:
        one.setup(initial_weights(spec.model, 0, spec.dtype, CPU))
        losses = [float(one.train_step(make_batch(step, spec))) for step in range(4)]
        one.drain()
    finally:
        one.close()
    return losses


def test_streaming_changes_nothing_beside_a_model_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the engine's products in place of torchao's."""
    monkeypatch.setattr(in_memory, "_use_float8", lambda layers, _: use_float8(layers))
    monkeypatch.setattr(in_memory.importlib.util, "find_spec", lambda _: True)
    assert trained("megatrain") == pytest.approx(trained("in_memory"), abs=2e-3)


def test_the_products_are_torchaos() -> None:
    pytest.importorskip("torchao", reason="an optional rival")
    layer, hidden, grad = case((2, 24))
    theirs = nn.Sequential(layer)
    in_memory._use_float8([theirs], CPU)
    expected = products(theirs, hidden, grad)
    use_float8([layer])
    for mine, other in zip(products(layer, hidden, grad), expected, strict=True):
        scale = other.abs().max().double()
        assert mine.double() / scale == pytest.approx(other.double() / scale, abs=8e-3)
    assert trained("in_memory") == pytest.approx(trained("megatrain"), abs=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "got float8 with system.dtype=float32, allowed with bfloat16"),
        ({"seq_len": 20}, "got float8 with 40 tokens in a product, allowed a multiple of 16"),
        ({"mlp_chunk": 24}, "got float8 with 24 tokens in a product, allowed a multiple of 16"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    from tests.models import make_batch

    dtype, seq_len = options.pop("dtype", BF16), options.pop("seq_len", 16)
    model = make_model("qwen2", dtype=dtype)
    with pytest.raises(RefusedError, match=rf"^system\.products: {message}; [^\n]+$"):
        make_engine(model, batch=make_batch(0, seq_len=seq_len), products="float8", **options)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^system\.products: got 'fp8', allowed plain, float8;"):
        EngineConfig(products="fp8")
    with pytest.raises(ValueError, match=r"^system\.products: got 'fp8', allowed plain or float8;"):
        build("in_memory", make_spec(BF16, products="fp8"))


def test_rows_say_so() -> None:
    engine = engine_of()
    assert engine.dtypes()["products"] == "float8"
    told = (
        r"the layers multiply in float8 \(9\d% of their parameters\): another function than bf16's"
    )
    assert re.fullmatch(told, engine.caveat)
