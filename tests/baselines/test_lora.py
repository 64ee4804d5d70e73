"""LoRA and QLoRA against plain peft: the same losses and weights; what is frozen stays, and nobody
is ranked beside them."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from analysis import speeds, studies, tables
from baselines import lora
from baselines.model import initial_weights, materialise
from baselines.registry import build
from baselines.system import Unsupported
from sweeps.agreement import compared
from tests.baselines.test_baseline_parity import CPU, make_batch, make_spec, train
from tests.made_rows import framed, row
from tests.study_rows import config

pytest.importorskip("peft")
pytestmark = pytest.mark.slow
OPTIONS = {"rank": 4, "alpha": 8, "lr_times": 10}


def wide(dtype: torch.dtype = torch.bfloat16):
    """Of rows that bitsandbytes reads on the CPU too."""
    spec = make_spec(dtype, **OPTIONS)
    config = {**spec.model.config, "hidden_size": 64, "intermediate_size": 128}
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, config=config))


def set_up(name: str, spec):
    system = build(name, spec)
    system.setup(initial_weights(spec.model, 0, spec.dtype, CPU))
    return system


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_it_is_plain_peft_with_torch_s_adamw(num_micro_batches: int) -> None:
    from peft import LoraConfig, get_peft_model

    spec = make_spec(num_micro_batches=num_micro_batches, **OPTIONS)
    system = set_up("lora", spec)
    losses = train(system, spec, range(20))
    weights = initial_weights(spec.model, 0, spec.dtype, CPU)
    torch.manual_seed(0)
    plain = get_peft_model(
        materialise(spec.model, spec.dtype, CPU, weights),
        LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear"),
    )
    trained = [param for param in plain.parameters() if param.requires_grad]
    recipe = dataclasses.replace(spec.recipe, lr=10 * spec.recipe.lr)
    settings = {"betas": (recipe.beta1, recipe.beta2), "eps": recipe.eps}
    adamw = torch.optim.AdamW(trained, weight_decay=recipe.weight_decay, **settings)
    for step, expected in enumerate(losses):
        batch = make_batch(step, spec)
        logits = plain(input_ids=batch.tokens.flatten(0, 1)).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, recipe.clip_norm)
        adamw.param_groups[0]["lr"] = recipe.lr_at(step)
        adamw.step()
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    merged = dict(plain.merge_and_unload().named_parameters())
    mine = dict(system.parameters())
    assert mine.keys() == merged.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, merged[name].detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_adapters_alone_are_trained_and_merged(name: str) -> None:
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    spec = wide()
    system = set_up(name, spec)
    frozen = {
        key: param.detach().clone()
        for key, param in system.loss.model.named_parameters()
        if not param.requires_grad
    }
    before = dict(system.parameters())
    original = dict(initial_weights(spec.model, 0, torch.float32, CPU))
    assert before.keys() == original.keys()
    for key, value in before.items():
        off = (value - original[key]).abs().max() / original[key].abs().max().clamp(min=1e-9)
        adapted = "proj.weight" in key
        assert off < (0.2 if adapted and name == "qlora" else 1e-6), key
    losses = train(system, spec, range(20))
    assert losses[-1] < losses[0] - 0.1
    after = dict(system.parameters())
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {key for key in after if "proj.weight" in key}
    for key, param in system.loss.model.named_parameters():
        if param.requires_grad:
            assert param.dtype == torch.float32
        else:
            assert torch.equal(param, frozen[key])
    system.close()


def test_its_state_resumes_bit_for_bit(tmp_path) -> None:
    spec = make_spec(**OPTIONS)
    first = set_up("lora", spec)
    train(first, spec, range(3))
    first.save(tmp_path / "state")
    expected = train(first, spec, range(3, 6))
    again = set_up("lora", spec)
    again.resume(tmp_path / "state")
    assert train(again, spec, range(3, 6)) == expected


def test_the_plan_has_the_frozen_weights_and_the_adapters() -> None:
    spec = wide()
    total = sum(value.numel() for _, value in initial_weights(spec.model, 0, torch.float32, CPU))
    plans = {name: build(name, spec).plan().device for name in ("lora", "qlora")}
    system = set_up("lora", spec)
    trained = sum(one.numel() for one in system._params.values())
    assert plans["lora"]["weights"] == 2 * total
    assert plans["lora"]["moments"] == 8 * trained
    assert plans["qlora"]["weights"] < plans["lora"]["weights"]
    system = set_up("qlora", spec)
    model = system.loss.model
    held = [one for one in model.parameters() if not one.requires_grad]
    kept = sum(one.numel() * one.element_size() for one in held)
    scales = kept / plans["qlora"]["weights"]
    assert 0.9 < scales <= 1.0


def test_what_is_not_installed_is_unsupported(monkeypatch) -> None:
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"^peft is not installed; pip install 'mega[^\n]*$"):
        build("lora", make_spec())


def test_what_bitsandbytes_cannot_is_unsupported(monkeypatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def refuse(*given, **settings):
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(bitsandbytes.nn, "Params4bit", refuse)
    with pytest.raises(Unsupported, match=r"^bitsandbytes cannot [^\n]*no kernel for this[^\n]*$"):
        set_up("qlora", wide())
    with pytest.raises(Unsupported, match=r"^bitsandbytes on the CPU reads rows of a [^\n]*$"):
        set_up("qlora", make_spec())


def test_it_is_never_ranked_nor_compared() -> None:
    of = {"measure": {}, "recipe": {}, "machine": {"device": "cuda"}}
    known = config(name="in_memory") | of
    reference = row("in_memory", [2.0] * 3, losses=[3.0, 2.0], config=known)
    mine = row("lora", [1.0] * 3, losses=[3.0, 2.0], config=known)
    assert compared(mine, [reference]).agrees is None
    found = framed([reference, mine, row("zero3", [4.0] * 3, losses=[3.0, 2.0])])
    lines = speeds.lines(studies.assigned(found))
    assert list(lines[speeds.comparable(lines)]["system"]) == ["in_memory", "zero3"]
    table = tables.of(studies.Study(name="mine", title="Mine"), lines)
    assert list(table["system"])[-1] == "LoRA"
    assert list(table["losses"])[-1] == "not compared"
