"""The MLP and the norms in chunks of tokens: the same training, whatever is kept; and the bytes that
the plan says, counted live."""

import functools
import re
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from engine import EngineConfig, Widths, layer_activation_bytes
from engine.layers.chunked import Chunked, ChunkedMLP, is_only_added
from engine.layers.decoder import Call
from engine.layers.live import LiveBytes
from engine.layers.template import Template
from tests.models import assert_same, make_batch, make_engine, make_model, train
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow

TOKENS = 32
"""Of a micro-batch: two rows."""


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """The tensors of these models are small: without this none would be offloaded."""
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)


def trained(model: torch.nn.Module, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(
        make_engine(model, batch=make_batch(0, micro_batches=2), **options), micro_batches=2
    )


PLACEMENTS = [
    {},
    {"checkpoint_interval": 2, "depth": 1},
    {"keep_activations": 4, "device_optimizer": 2},
    {"offload_activations": 4},
    {"offload_activations": 1, "keep_activations": 1, "gradient_slabs": 2},
    {"checkpoint_interval": 2, "keep_attention": 3},
    {"checkpoint_interval": 2, "keep_attention": 1, "offload_attention": 3},
]


@pytest.fixture(scope="module")
def alone(models):
    """(dtype, chunk) -> a run with every layer recomputed, made once."""
    return functools.cache(lambda dtype, chunk: trained(models[dtype], mlp_chunk=chunk))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("chunk", [16, 5], ids=["divides", "leaves-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_train_as_the_whole(models, alone, dtype, chunk, placement):
    expected = alone(dtype, 0)
    losses, parameters = trained(
        models[dtype], mlp_chunk=chunk, poison=True, lanes=TwinLanes(seed=chunk), **placement
    )
    if dtype == torch.float32:
        torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=0)
        for name, value in expected[1].items():
            torch.testing.assert_close(
                parameters[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    else:
        torch.testing.assert_close(losses, expected[0], rtol=0, atol=2e-3)
    assert_same((losses, parameters), alone(dtype, chunk))  # whatever the placement: the same bits


@pytest.mark.parametrize("chunk", [TOKENS, TOKENS + 1])
def test_a_chunk_that_takes_the_micro_batch_changes_no_bit(models, chunk):
    engine = make_engine(models[torch.bfloat16], mlp_chunk=chunk)
    assert engine._decoder.templates[0].mlp is None
    assert engine.plan() == make_engine(models[torch.bfloat16]).plan()
    assert_same(train(engine), train(make_engine(models[torch.bfloat16])))


@pytest.mark.parametrize(
    ("model_type", "settings", "runs"), [("qwen2", {}, 2), ("gemma2", {"head_dim": 8}, 3)]
)
def test_an_mlp_that_is_only_added_is_recomputed_once(model_type, settings, runs):
    """A layer's forward, then its backward; where a norm follows the MLP, that norm's gradient
    needs the output once more."""
    model, calls = make_model(model_type, attention="eager", **settings), list[int]()
    engine = make_engine(model, mlp_chunk=8)
    for template in set(engine._decoder.templates):
        template.module.mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    for step in range(3):
        engine.train_step(make_batch(step))
    layers = engine.blocks.num_layers
    assert len(calls) == 3 * runs * layers * TOKENS // 8
    plain = make_engine(model)
    plain.train_step(make_batch(0))
    again = 2 * (runs - 2) * layers * 3 * 32 * 64 * TOKENS  # gated MLPs
    assert engine.counters()["recompute_flops"] == 3 * (plain.counters()["recompute_flops"] + again)


def test_the_backward_of_kept_layers_computes_their_mlps_again(models):
    flops = []
    for options in (
        {},
        {"mlp_chunk": 8},
        {"mlp_chunk": 8, "keep_activations": 4},
        {"mlp_chunk": 8, "offload_activations": 4},
    ):
        engine = make_engine(models[torch.float32], **options)
        engine.train_step(make_batch(0))
        flops.append(engine.counters()["recompute_flops"])
    assert flops[0] == flops[1]
    assert flops[2] == flops[3] == 4 * 2 * 3 * 32 * 64 * TOKENS  # layers, gated MLPs


def test_offloaded_layers_leave_their_mlp_and_norms_behind(models):
    moved = {}
    for chunk in (0, 64):
        batch = make_batch(0, rows=8, seq_len=64)
        engine = make_engine(
            models[torch.float32], batch=batch, offload_activations=4, mlp_chunk=chunk
        )
        without = make_engine(models[torch.float32], batch=batch, mlp_chunk=chunk)
        for one in (engine, without):
            one.train_step(batch)
        moved[chunk] = engine.counters()["d2h_bytes"] - without.counters()["d2h_bytes"]
        slabs = sum(slab.numel() for slab in engine._store.activations.values())
        assert 0.6 * slabs < moved[chunk] <= slabs
    values = 4 * 64 + 2 * (32 + 1)  # MLP-wide, normalised by two norms, and their scales
    assert moved[0] - moved[64] == 4 * 4 * values * 8 * 64  # layers, bytes, tokens


@pytest.mark.slow
def test_a_compiled_chunk_agrees_and_leaves_out_the_last_product(models):
    options = {"mlp_chunk": 12, "keep_activations": 1}
    expected = trained(models[torch.float32])
    torch._dynamo.utils.counters.clear()
    losses, parameters = trained(models[torch.float32], compile=True, **options)
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-4)
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found <= 6 + 8  # two lengths of the MLP's forward and backward, of two norms'; the loss
    mlp = make_engine(models[torch.float32], compile=True, **options)._decoder.templates[0].mlp
    weights = mlp.named(list(models[torch.float32].model.layers[0].mlp.parameters()))
    piece = torch.randn(1, 12, 32)
    with torch.no_grad():
        found, code = run_and_get_code(mlp.pull, weights, piece, piece)
        torch.testing.assert_close(found, mlp._pull(weights, piece, piece), rtol=1e-4, atol=1e-5)
    assert (
        len(re.findall(r"extern_kernels\.(?:mm|addmm)\(", "".join(code))) == 8
    )  # gate and up, twice three


class Returns(torch.nn.Module):
    """An MLP that returns what it is made with, as gpt-oss's returns its router's scores too."""

    layer_idx = 0

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden * self.layer_idx if self.output is None else self.output


def test_chunks_are_summed_in_fp32_and_rounded_once():
    torch.manual_seed(0)
    template, chunks = with_mlp(torch.nn.Linear(16, 16, bias=False).bfloat16()), 46
    hidden, grad = torch.randn(2, 1, chunks * 8, 16).bfloat16().unbind()
    weight = template.mlp.module.weight = torch.nn.Parameter(torch.randn(16, 16).bfloat16())
    output = template.mlp(hidden)
    found = torch.autograd.grad(output, weight, grad)[0]
    total = torch.zeros(16, 16)
    for start in range(0, chunks * 8, 8):
        piece, given = (values[:, start : start + 8] for values in (hidden, grad))
        total += template.mlp.pull(template.mlp.named([weight]), piece, given)[1][0].float()
    assert torch.equal(found, total.bfloat16())


@pytest.mark.parametrize(
    ("model_type", "number"), [("qwen2", 2), ("olmo", 2), ("olmo2", 2), ("gemma2", 4)]
)
def test_every_norm_of_a_layer_is_chunked(model_type, number):
    """Not those inside of attention, which are of heads."""
    settings = {"head_dim": 8} if model_type == "gemma2" else {}
    engine = make_engine(make_model(model_type, attention="eager", **settings), mlp_chunk=8)
    template = engine._decoder.templates[0]
    assert [type(part) for part in template._chunked] == [ChunkedMLP, *[Chunked] * number]
    assert not any("MLP" in type(part.module).__name__ for part in template._chunked[1:])


def test_only_a_sum_with_the_mlp_leaves_its_output_unread():
    template = with_mlp(torch.nn.Linear(4, 4))
    template.mlp.module.weight = torch.nn.Parameter(torch.ones(4, 4))
    template.mlp.module.bias = torch.nn.Parameter(torch.ones(4))
    hidden = torch.ones(1, 9, 4, requires_grad=True)
    assert is_only_added(hidden + template.mlp(hidden))
    assert not is_only_added(hidden + template.mlp(hidden).square())
    assert not is_only_added(template.mlp(hidden).square())


def test_an_mlp_knows_its_layer():
    template = with_mlp(Returns())
    template._set_index(3)
    assert template.mlp(torch.ones(1, 9, 4)).eq(3).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EngineConfig(mlp_chunk=-1),
            "system.mlp_chunk: got -1, allowed an integer >= 0; set system.mlp_chunk=0",
        ),
        (
            lambda: EngineConfig(mlp_chunk=True),
            "system.mlp_chunk: got True, allowed an integer >= 0; set system.mlp_chunk=0",
        ),
        (
            lambda: make_engine(
                make_model(
                    "opt", ffn_dim=64, dropout=0.0, attention_dropout=0.0, word_embed_proj_dim=32
                ),
                mlp_chunk=8,
            ),
            "system.mlp_chunk: got 8, allowed 0 for OPTDecoderLayer, which has no mlp; set "
            "system.mlp_chunk=0",
        ),
        (
            lambda: with_mlp(Returns(())).mlp(torch.ones(1, 9, 4)),
            "system.mlp_chunk: got 8, allowed 0 for Returns, which returns tuple; set "
            "system.mlp_chunk=0",
        ),
        (
            lambda: with_mlp(Returns(torch.ones(1, 8, 4).double())).mlp(torch.ones(1, 9, 4)),
            "system.mlp_chunk: got 8, allowed 0 for Returns, which returns torch.float64 for "
            "torch.float32; set system.mlp_chunk=0",
        ),
        (
            lambda: with_mlp(Returns()).mlp(torch.ones(1, 9, 4), scores=1),
            "system.mlp_chunk: got 8, allowed 0 for Returns, which is called with more than hidden "
            "states; set system.mlp_chunk=0",
        ),
    ],
)
def test_what_cannot_be_chunked_is_one_line(make, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make()
    assert "\n" not in str(caught.value)


def with_mlp(mlp: torch.nn.Module) -> Template:
    layer = torch.nn.Module()
    layer.mlp = mlp
    return Template(layer, mlp_chunk=8)


SHAPES = {
    "7b": (3584, 18944, 28, 4, 128),
    "14b": (5120, 13824, 40, 8, 128),
    "wide": (1024, 3072, 32, 8, 128),
}
"""Hidden, inner, heads, key-value heads, width of a head: of Qwen2.5, and one that is at its peak in
attention."""


def layer_bytes(name: str, tokens: int, chunk: int) -> tuple[Any, dict[str, int]]:
    """(config, live bytes of a bfloat16 layer): peaks of backward, of forward and of a kept
    forward, and what that holds."""
    hidden, inner, heads, keys, width = SHAPES[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": width,
    }
    config = AutoConfig.for_model("qwen2", num_hidden_layers=1, vocab_size=64, **sizes)
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        ).model.layers[0]
    template, found = Template(layer, mlp_chunk=chunk), dict[str, int]()
    with FakeTensorMode(), torch.no_grad():
        x, grad = torch.empty(2, 1, tokens, hidden, dtype=torch.bfloat16).unbind()
        weights = {
            name: torch.empty(p.shape, dtype=p.dtype, requires_grad=True)
            for name, p in layer.named_parameters()
        }
        rotary = torch.empty(2, 1, tokens, width, dtype=torch.bfloat16).unbind()
        call = Call(args=(), kwargs={"position_embeddings": rotary, "attention_mask": None})
        for kind, work in {
            "backward": lambda: template.backward(weights, x, call, 0, grad),
            "forward": lambda: template.forward(weights, x, call, 0),
            "kept": lambda: template.forward_with_graph(weights, x, call, 0),
        }.items():
            with LiveBytes((x, *weights.values(), *rotary)) as live:
                output = work()
            found |= {kind: live.most, "holds": live.now}
            del output
    return config, found | {"weights": 2 * sum(p.numel() for p in layer.parameters())}


@pytest.mark.parametrize(
    ("name", "tokens", "chunk"),
    [
        ("7b", 1 << 17, 0),
        ("7b", 1 << 16, 1 << 15),
        ("7b", 1 << 18, 1 << 17),
        ("7b", 1 << 19, 1 << 15),
        ("wide", 1 << 18, 1 << 15),
        ("14b", 1 << 17, 0),
        ("14b", 1 << 18, 1 << 15),
    ],
)
def test_the_plan_is_what_a_layer_holds_at_its_peak(name, tokens, chunk):
    """Its gradients are counted whole, as the plan does, though at the peak not all of them are
    there yet."""
    config, found = layer_bytes(name, tokens, chunk)
    widths = Widths.of(config)
    kept, graph = (
        layer_activation_bytes(widths, tokens, 2, backward=backward, mlp_chunk=chunk)
        for backward in (False, True)
    )
    assert found["holds"] == pytest.approx(kept, rel=0.01)
    assert found["backward"] == pytest.approx(graph + found["weights"], rel=0.03 if chunk else 0.05)
    assert max(found["forward"], found["kept"]) < graph
    if chunk:
        assert graph <= layer_activation_bytes(widths, tokens, 2)
