"""Rivals that are run from a checkout of their authors' code: what they refuse, plan and are given."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from baselines.model import initial_weights, materialise, num_params
from baselines.registry import build
from baselines.rival import PLAIN_MODELS
from baselines.slideformer import layer_inputs
from baselines.system import ModelSpec, Shape, Unsupported
from engine import NonFiniteLossError, Recipe
from tests.baselines.test_model import CPU, TINY
from tests.baselines.test_rivals import make_spec, with_roundpipe  # noqa: F401 - a fixture
from tests.baselines.test_systems import QWEN_14B
from tests.models import make_batch

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(tmp_path):
    """A folder with the one file that a clone is known by."""
    (tmp_path / "infinity" / "model").mkdir(parents=True)
    (tmp_path / "infinity" / "model" / "cpu_master.py").touch()
    return tmp_path


@pytest.fixture
def slideformer(tmp_path):
    """A folder of clones, one of which has the file that SlideFormer's is known by."""
    (tmp_path / "SlideFormer").mkdir()
    (tmp_path / "SlideFormer" / "offload_transformer.py").touch()
    return {"checkout": str(tmp_path)}


@pytest.mark.parametrize("name", ["published_megatrain", "slideformer"])
@pytest.mark.parametrize("path", [None, "/nowhere", "."])
def test_a_wrong_checkout_is_one_line(name, path):
    with pytest.raises(
        Unsupported,
        match=r"^machine\.checkout: got (nothing|/nowhere|\.), allowed the folder of a clone .*=PATH$",
    ):
        build(name, make_spec(checkout=path))


def test_slideformer_is_asked_for_what_it_can_do_and_says_the_rest(slideformer):
    system = build("slideformer", make_spec(**slideformer))
    assert system.checkout == Path(slideformer["checkout"]).resolve() / "SlideFormer"
    assert system.caveat == "no clipping, where the recipe clips at 1"
    assert system.dtypes() == {
        "weights": "bfloat16",
        "master": "float32",
        "moments": "float32",
        "gradients": "bfloat16",
    }
    recipe = Recipe(clip_norm=0, weight_decay=0.1, decayed="matrices")
    unclipped = dataclasses.replace(make_spec(**slideformer), recipe=recipe)
    assert build("slideformer", unclipped).caveat == "norms and biases decay too"
    everything = dataclasses.replace(unclipped, recipe=Recipe(clip_norm=0, weight_decay=0.1))
    assert build("slideformer", everything).caveat is None
    with pytest.raises(Unsupported, match=r"updates in every backward: .* is 2, use 1$"):
        build("slideformer", make_spec(micro_batches=2, **slideformer))
    fp32 = dataclasses.replace(make_spec(**slideformer), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^system\.dtype: got float32, allowed bfloat16 with"):
        build("slideformer", fp32)
    with pytest.raises(Unsupported, match=r"no packed documents here; set data=stdlib$"):
        build("slideformer", dataclasses.replace(make_spec(**slideformer), packed=True))
    with pytest.raises(Unsupported, match=r"^save: the SlideFormer code resumes no optimizer"):
        system.save(Path("checkpoint"))


@pytest.mark.parametrize("name", ["slideformer", "roundpipe"])
@pytest.mark.usefixtures("with_roundpipe")
def test_attention_that_is_causal_by_its_mask_alone_is_refused(name, slideformer):
    spec = make_spec(**slideformer) if name == "slideformer" else make_spec()
    eager = dataclasses.replace(spec.model, attn_implementation="eager")
    told = r"^model\.attn_implementation: got eager, allowed sdpa, flash_attention_2 with"
    with pytest.raises(Unsupported, match=told):
        build(name, dataclasses.replace(spec, model=eager))


@pytest.mark.parametrize("kind", PLAIN_MODELS)
def test_slideformers_layers_get_what_the_model_gives_them(kind):
    spec = ModelSpec(name="t", model_type=kind, config=TINY)
    model = materialise(spec, torch.float32, CPU, initial_weights(spec, 0, torch.float32, CPU))
    tokens, decoder = torch.randint(0, TINY["vocab_size"], (2, 16)), model.get_decoder()
    with torch.no_grad():
        hidden = decoder.embed_tokens(tokens)
        for layer, given in zip(decoder.layers, layer_inputs(decoder, hidden), strict=True):
            hidden = layer(hidden, **given)
        assert torch.equal(model.lm_head(decoder.norm(hidden)), model(tokens).logits)


THEIRS = """
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
import torch
import sliding_checkpoint

def done():
    future = Future()
    future.set_result(None)
    return future

def init_ac_gpu_prefetch_pool(tensors, device):
    assert tensors == []

class SlideFormerOffloader:
    def __init__(self, model, device, dtype, **given):
        self.model, self.given, self.rates, self.waited = model, given, [], 0
        self.update_executor, self.h2d_executor = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.d2h_executor = self.h2d_executor
        self.output_layer = SimpleNamespace(
            norm_layer=model.model.norm, lm_head=model.lm_head,
            lce=lambda weight, hidden, labels, bias: torch.nn.functional.cross_entropy(
                (hidden @ weight.t()).float(), labels))
        self.transformer_layers = [SimpleNamespace(_h2d_future=done(), _d2h_future=done())]
    def train(self):
        pass
    def update_learning_rate(self, rate):
        self.rates.append(rate)
    def wait_for_completion(self):
        self.waited += 1
    def __call__(self, tokens, labels):
        decoder = self.model.get_decoder()
        hidden = decoder.embed_tokens(tokens)
        for layer, given in zip(decoder.layers, prepare_layer_inputs(decoder, hidden)):
            hidden = layer(hidden, **given)
        return SimpleNamespace(loss=self.output_layer.forward(hidden, labels=labels))
"""
"""What of their offloader is called, as slow as plain code. The real one needs a GPU."""


def test_slideformer_is_given_the_loss_of_all_labels_and_every_steps_rate(slideformer, monkeypatch):
    clone = Path(slideformer["checkout"]) / "SlideFormer"
    (clone / "offload_transformer.py").write_text(THEIRS)
    (clone / "sliding_checkpoint.py").write_text("fifo_prefetch_queue = [1]\n")
    monkeypatch.setattr("baselines.slideformer.require_cuda", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    spec = dataclasses.replace(
        make_spec(device="cpu", **slideformer), shape=Shape(batch_size=2, seq_len=16)
    )
    system, batch = build("slideformer", spec), make_batch(0, vocab=TINY["vocab_size"])
    with_liger(monkeypatch, "0.8.5")
    with pytest.raises(Unsupported, match=r"needs liger-kernel .*, and 0\.8\.5 is installed; pip"):
        system.setup([])
    with_liger(monkeypatch, "0.7.0")
    system.setup(initial_weights(spec.model, 0, spec.dtype, CPU))
    theirs, model = system._model, system._model.model
    plain = model(batch.tokens[0]).logits.flatten(0, 1).float()
    expected = torch.nn.functional.cross_entropy(plain, batch.labels[0].flatten())
    assert system.train_step(batch) == expected
    system.train_step(batch)
    assert theirs.rates == [spec.recipe.lr_at(step) for step in (0, 1)]
    assert theirs.waited == 2
    asked = theirs.given["optimizer_kwargs"]
    assert asked["weight_decay"] == spec.recipe.weight_decay
    assert asked["num_layer"] == TINY["num_hidden_layers"] + 2
    assert {name for name, _ in system.parameters()} == dict(model.named_parameters()).keys()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="step 2: the loss is nan; updates were made"):
        system.train_step(batch)
    system.close()
    system.close()
    assert sys.modules["sliding_checkpoint"].fifo_prefetch_queue == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        theirs.update_executor.submit(print)
    for module in ("offload_transformer", "sliding_checkpoint"):
        monkeypatch.delitem(sys.modules, module)


def with_liger(monkeypatch, version):
    find = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version",
        lambda name: version if name == "liger-kernel" else find(name),
    )


def test_slideformer_plans_twelve_bytes_a_parameter_and_every_layers_input_on_the_host(slideformer):
    system = build("slideformer", make_spec(config=QWEN_14B, **slideformer))
    plan, total = system.plan(), num_params(system.spec.model)
    assert plan.host["master"] + plan.host["moments"] == 12 * total
    inputs = 48 * 2 * 32 * 1024 * QWEN_14B["hidden_size"]
    assert inputs < plan.host["checkpoints"] < 2 * inputs
    wider = build("slideformer", make_spec(config=QWEN_14B, double_buffer=True, **slideformer))
    assert 0 < plan.device_bytes < wider.plan().device_bytes < 60e9


def test_a_checkout_whose_code_does_not_import_is_one_line(checkout):
    (checkout / "infinity" / "__init__.py").write_text("import no_such_package_of_theirs")
    system = build("published_megatrain", make_spec(checkout=str(checkout)))
    assert "infinity" not in sys.modules
    with pytest.raises(
        Unsupported, match=r"does not import \(No module named 'no_such_package_of_theirs'\)"
    ):
        system.setup([])
    assert str(checkout) not in sys.path


def test_the_published_code_is_asked_for_what_it_can_do_and_says_the_rest(checkout):
    system = build("published_megatrain", make_spec(checkout=str(checkout)))
    assert system.dtypes() == {
        "weights": "bfloat16",
        "master": "bfloat16",
        "moments": "float32",
        "gradients": "bfloat16",
    }
    assert system.caveat.startswith("bfloat16 weights are the master")
    with pytest.raises(Unsupported, match="does not divide the loss"):
        build("published_megatrain", make_spec(checkout=str(checkout), micro_batches=2))
    with pytest.raises(
        Unsupported, match=r"^save: the published MegaTrain code has no checkpoints"
    ):
        system.save(checkout / "checkpoint")


def test_plan_of_the_published_code_is_what_was_measured_at_14b(checkout):
    """26.4 GB on the device and 221 GB on the host (15 B/param), 32 x 1024 tokens, K = 4 and 12
    slabs (on an H200)."""
    plan = build("published_megatrain", make_spec(QWEN_14B, checkout=str(checkout))).plan()
    assert plan.device_bytes == pytest.approx(26.4e9, rel=0.15)
    assert plan.host_bytes == pytest.approx(221e9, rel=0.15)
