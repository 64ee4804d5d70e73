"""The engine's state: what it refuses, what it allocates, what survives a restart."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch

from engine import EngineConfig, MegaTrain, Recipe
from tests.models import assert_same, make_batch, make_engine, make_model, train, weights_of


def test_more_kept_and_offloaded_layers_than_there_are_is_one_line(models):
    expected = r"system.offload_activations: got 3, allowed 0 to 2 where system.keep_activations is 2 of 4 layers; lower one"
    with pytest.raises(ValueError, match=expected):
        make_engine(
            models[torch.float32], keep_activations=2, offload_activations=3, device_optimizer=-1
        )


@pytest.mark.parametrize("name", ["device_optimizer", "keep_activations", "offload_activations"])
def test_a_placement_beyond_the_model_is_one_line(models, name):
    with pytest.raises(ValueError, match=f"system.{name}: got 9, allowed 0 to "):
        make_engine(models[torch.float32], **{name: 9})


@pytest.mark.parametrize(
    ("master", "late_moments"), [("split", True), ("fp32", True), ("bf16", True), ("split", False)]
)
def test_save_and_resume_continue_bit_identically(models, tmp_path, master, late_moments):
    recipe = Recipe(lr=1e-2, schedule="linear", warmup_steps=2, total_steps=9)
    arguments = {"recipe": recipe, "master": master, "late_moments": late_moments}
    whole = train(make_engine(models[torch.bfloat16], **arguments), 6)
    first = make_engine(models[torch.bfloat16], **arguments)
    train(first, 3)
    first.save(tmp_path / "step-3")
    for resumed in (
        make_engine(models[torch.bfloat16], **arguments),
        first,
    ):  # a new engine, and one that went on
        train(first, 1, first=3)
        resumed.resume(tmp_path / "step-3")
        losses, parameters = train(resumed, 3, first=3)
        assert_same((losses, parameters), (whole[0][3:], whole[1]))


def test_save_is_whole_or_not_at_all(models, tmp_path, monkeypatch):
    engine = make_engine(models[torch.bfloat16])
    monkeypatch.setattr(json, "dumps", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        engine.save(tmp_path / "broken")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    engine.save(tmp_path / "whole")
    with pytest.raises(ValueError, match="exists, allowed a new directory"):
        engine.save(tmp_path / "whole")
    with pytest.raises(ValueError, match="is no saved state"):
        engine.resume(tmp_path / "missing")
    with pytest.raises(ValueError, match="has master 'split'"):
        make_engine(models[torch.bfloat16], master="bf16").resume(tmp_path / "whole")


def test_a_float32_checkpoint_does_not_depend_on_the_master_that_it_has_not(models, tmp_path):
    engine = make_engine(models[torch.float32], master="split")
    train(engine, 2)
    engine.save(tmp_path / "step-2")
    other = make_engine(models[torch.float32], master="fp32")
    other.resume(tmp_path / "step-2")
    assert_same(train(other, 2, first=2), train(engine, 2, first=2))


def test_a_checkpoint_of_another_model_is_one_line_and_changes_nothing(models, tmp_path):
    """Fewer layers; and parameters of other shapes in blocks of the same names and lengths."""
    engine = make_engine(models[torch.float32])
    before = dict(engine.parameters())
    others = make_engine(make_model("qwen2", num_hidden_layers=4, intermediate_size=63))
    blocks = [[layout.numel for layout in e.work.layouts] for e in (engine, others)]
    assert blocks[0] == blocks[1]
    for name, other in {"shapes": others, "layers": make_engine(make_model("qwen2"))}.items():
        other.save(tmp_path / name)
        with pytest.raises(ValueError, match="has blocks other parameters, allowed what") as caught:
            engine.resume(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert_same(([], dict(engine.parameters())), ([], before))


def test_a_checkpoint_takes_its_name_at_once_or_not_at_all(models, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no rename")

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(OSError, match="no rename"):
        make_engine(models[torch.float32]).save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_the_master_and_not_its_rounded_weight(models):
    """The first step moves each by the learning rate, a tenth of what bf16 tells apart here."""
    recipe = Recipe(lr=1e-5, weight_decay=0.0, clip_norm=0.0)
    engine = make_engine(models[torch.bfloat16], recipe=recipe)
    before = dict(engine.parameters())
    engine.train_step(make_batch(0))
    moved = {name: (value - before[name]).abs() for name, value in engine.parameters()}
    assert max(value.max() for value in moved.values()) < 1.02e-5
    assert moved["lm_head.weight"].mean() > 0.98e-5


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_fp32_weights_given_to_a_bf16_engine_are_its_master(master):
    model = make_model("qwen2")
    for parameter in model.parameters():
        parameter.data.mul_(1.001)
    engine = make_engine(model, dtype=torch.bfloat16, master=master)
    assert_same(([], dict(engine.parameters())), ([], dict(weights_of(model))))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_checkpoint_has_the_mode_that_the_umask_gives(models, tmp_path, umask):
    before = os.umask(umask)
    try:
        make_engine(models[torch.float32]).save(tmp_path / "saved")
    finally:
        os.umask(before)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o777 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"step": "3"}', "{", ""])
def test_a_description_that_save_did_not_write_is_one_line(models, tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(
        ValueError, match="is no saved state, allowed a directory that save\\(\\) wrote"
    ) as caught:
        make_engine(models[torch.float32]).resume(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_lacks_a_block_is_one_line_and_changes_nothing(models, tmp_path):
    engine = make_engine(models[torch.float32])
    engine.save(tmp_path / "saved")
    (tmp_path / "saved" / "block-0003.safetensors").unlink()
    losses, parameters = train(engine, 2)
    with pytest.raises(
        ValueError, match=r"has no block-0003\.safetensors, allowed one a block"
    ) as caught:
        engine.resume(tmp_path / "saved")
    assert "\n" not in str(caught.value)
    assert_same((losses, dict(engine.parameters())), (losses, parameters))


@pytest.mark.parametrize("offloaded", [0, 2])
def test_host_plan_is_what_is_allocated_and_split_master_holds_12_bytes(models, offloaded):
    engine = make_engine(models[torch.bfloat16], offload_activations=offloaded)
    store = engine._store
    states = store.states
    allocated = {
        "weights": sum(s.weight.nbytes for s in states),
        "master": sum(s.extra.nbytes for s in states),
        "moments": sum(s.exp_avg.nbytes + s.exp_avg_sq.nbytes for s in states),
        "gradients": sum(s.nbytes for s in store.slabs.values()),
        "activations": sum(s.nbytes for s in store.activations.values()),
    }
    assert len(store.activations) == offloaded
    planned = dict(engine.plan().host)
    assert "other" not in planned  # on the CPU; with CUDA, what its context holds
    assert allocated == planned
    elements = sum(layout.numel for layout in engine.work.layouts)
    assert allocated["weights"] + allocated["master"] + allocated["moments"] == 12 * elements
    # One arena of exactly the needed size plus one page: no rounding to a power of two.
    arena = store._arena.pieces[0].untyped_storage().nbytes()
    assert arena == allocated["weights"] + allocated["gradients"] + allocated["activations"] + 4096


@pytest.mark.parametrize(("master", "num_bytes"), [("split", 12), ("fp32", 14), ("bf16", 10)])
def test_bytes_a_parameter_of_each_master(models, master, num_bytes):
    engine = make_engine(models[torch.bfloat16], master=master)
    planned = engine.plan().host
    elements = sum(layout.numel for layout in engine.work.layouts)
    assert planned["weights"] + planned["master"] + planned["moments"] == num_bytes * elements
    assert (
        (engine.dtypes()["master"] == "bfloat16")
        is (engine.caveat is not None)
        is (master == "bf16")
    )


def test_plan_allocates_nothing(models):
    model = make_model("qwen2")
    engine = MegaTrain(
        model,
        recipe=Recipe(),
        micro_batch_size=4096,
        seq_len=1 << 20,
        config=EngineConfig(depth=64),
    )
    assert engine.plan().device_bytes > 10**12
    assert engine._store is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"depth": 0}, "system.depth: got 0, allowed an integer >= 1"),
        ({"depth": "x"}, "system.depth: got 'x'"),
        ({"streams": 4}, "system.streams: got 4, allowed 1, 2 or 3"),
        ({"streams": [1]}, r"system.streams: got \[1\], allowed 1, 2 or 3"),
        ({"streams": True}, "system.streams: got True, allowed 1, 2 or 3"),
        (
            {"num_threads": 100_000},
            "system.num_threads: got 100000, allowed an "
            "integer 0 to 4096; set system.num_threads=0",
        ),
        (
            {"checkpoint_interval": 0},
            "system.checkpoint_interval: got 0, allowed -1 or an integer >= 1",
        ),
        (
            {"checkpoint_interval": -1, "offload_activations": 1},
            "system.offload_activations: got 1, allowed 0 where",
        ),
        ({"gradient_slabs": -1}, "system.gradient_slabs: got -1"),
        ({"loss_chunk": 0}, "system.loss_chunk: got 0"),
        ({"master": "half"}, "system.master: got 'half', allowed split, fp32, bf16"),
        ({"pinned": True}, "system.pinned: got True, allowed exact, torch, none"),
    ],
)
def test_bad_options_are_one_line(setting, message):
    with pytest.raises(ValueError, match=message) as caught:
        EngineConfig(**setting)
    assert "\n" not in str(caught.value)


def test_a_bad_dtype_is_one_line():
    with pytest.raises(
        ValueError, match=r"system\.dtype: got torch\.float16, allowed bfloat16, float32"
    ):
        MegaTrain(
            make_model("qwen2"), recipe=Recipe(), micro_batch_size=1, seq_len=8, dtype=torch.float16
        )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": math.inf}, "recipe.lr: got inf, allowed a finite number"),
        ({"lr": "x"}, "recipe.lr: got 'x', allowed a finite number"),
        ({"lr": True}, "recipe.lr: got True, allowed a finite number"),
        ({"eps": math.nan}, "recipe.eps: got nan, allowed a finite number"),
        ({"weight_decay": math.inf}, "recipe.weight_decay: got inf, allowed a finite number"),
        ({"clip_norm": math.inf}, "recipe.clip_norm: got inf, allowed a finite number"),
        ({"warmup_steps": 1.5}, "recipe.warmup_steps: got 1.5, allowed an integer"),
        ({"total_steps": None}, "recipe.total_steps: got None, allowed an integer"),
    ],
    ids=str,
)
def test_a_bad_recipe_is_one_line(setting, message):
    with pytest.raises(ValueError, match=message) as caught:
        Recipe(**setting)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["num_micro_batches", "micro_batch_size", "seq_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_bad_shape_is_one_line(name, value):
    shape = {"micro_batch_size": 1, "seq_len": 8} | {name: value}
    with pytest.raises(
        ValueError, match=rf"shape\.{name}: got {value!r}, allowed an integer >= 1"
    ) as caught:
        MegaTrain(make_model("qwen2"), recipe=Recipe(), dtype=torch.float32, **shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [torch.zeros(3), torch.zeros(32, 96), torch.zeros(96 * 32)], ids=lambda v: str(v.shape)
)
def test_weights_of_another_shape_are_named(value):
    engine = MegaTrain(
        make_model("qwen2"), recipe=Recipe(), micro_batch_size=1, seq_len=8, dtype=torch.float32
    )
    with pytest.raises(
        ValueError, match=r"weights: got 'lm_head\.weight' of shape \(.*\), allowed \(96, 32\)"
    ) as caught:
        engine.setup([("lm_head.weight", value)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda b: {"tokens": b.tokens[0]}, "tokens"),
        (lambda b: {"tokens": b.tokens[:, :1]}, "tokens"),
        (lambda b: {"labels": b.labels[..., :-1]}, "labels"),
        (lambda b: {"labels": b.labels.int()}, "labels"),
        (lambda b: {"attention_mask": torch.ones(2, 16, dtype=torch.int64)}, "attention_mask"),
    ],
)
def test_a_batch_of_another_shape_is_one_line_and_no_step(models, change, name):
    engine, batch = make_engine(models[torch.float32]), make_batch(0)
    with pytest.raises(
        ValueError,
        match=rf"batch\.{name}: got torch\.int.* of shape .*, allowed torch\.int64 of shape",
    ) as caught:
        engine.train_step(replace(batch, **change(batch)))
    assert "\n" not in str(caught.value)
    assert_same(train(engine, 1), train(make_engine(models[torch.float32]), 1))


def test_missing_weights_are_named():
    engine = MegaTrain(
        make_model("qwen2"), recipe=Recipe(), micro_batch_size=1, seq_len=8, dtype=torch.float32
    )
    with pytest.raises(ValueError, match=r"parameters were not given, lm_head\.weight among them"):
        engine.setup([])


@pytest.mark.parametrize(
    "name",
    ["foo", "model.layers.7.mlp.up_proj.weight", "model.layers.0.nope", "model.layers.x.nope"],
)
def test_weights_of_another_model_are_named(models, name):
    model = models[torch.float32]
    engine = MegaTrain(
        make_model("qwen2"), recipe=Recipe(), micro_batch_size=1, seq_len=8, dtype=torch.float32
    )
    with pytest.raises(
        ValueError,
        match=rf"weights: got '{name}', allowed the model's 39 parameters, lm_head\.weight",
    ) as caught:
        engine.setup([(name, model.lm_head.weight)])
    assert "\n" not in str(caught.value)


def test_counters_are_the_bytes_of_the_schedule(models):
    engine = make_engine(models[torch.bfloat16], checkpoint_interval=1)
    train(engine, 3)
    sizes = [layout.numel * 2 for layout in engine.work.layouts]
    counters = engine.counters()
    assert counters["h2d_bytes"] == 3 * (sum(sizes) + sum(sizes[1:-1]))
    assert counters["d2h_bytes"] == 3 * sum(sizes)
    layer_params = engine.work.layouts[1].num_params
    assert counters["recompute_flops"] == 3 * 2 * 4 * layer_params * make_batch(0).tokens.numel()


def test_the_schedule_recipe_reaches_the_optimizer(models):
    """Learning rate zero at the end of a linear schedule: the last step changes nothing but
    moments."""
    engine = make_engine(
        models[torch.float32], recipe=Recipe(lr=1e-2, schedule="linear", total_steps=2)
    )
    train(engine, 2)
    before = dict(engine.parameters())
    engine.train_step(make_batch(7))
    for name, value in engine.parameters():
        assert torch.equal(value, before[name])


def test_close_is_idempotent(models):
    engine = make_engine(models[torch.float32])
    engine.close()
    engine.close()
    assert engine._store is None
