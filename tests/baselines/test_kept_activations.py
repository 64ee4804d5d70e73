"""Layers that the baselines keep instead of recomputing: what their graphs hold, how many find
room, what a row says of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from analysis.rows import family_and_mode
from baselines.loss import CausalLMLoss
from baselines.model import config_of, initial_weights, materialise
from baselines.registry import build
from baselines.system import ModelSpec, Shape
from engine import Widths, layer_activation_bytes
from sweeps.outlook import outlook_of
from tests.baselines import test_baseline_parity as parity
from tests.baselines.test_model import CPU, TINY
from tests.baselines.test_systems import QWEN_14B, make_spec
from tests.made_rows import row
from tests.sweeps.test_config import GROUPS, composed

pytestmark = pytest.mark.slow

SHAPE = Shape(batch_size=32, seq_len=1024)
KEPT = [name for name in GROUPS["system"] if name.endswith("_kept")]


def saved_by(layer):
    """What autograd saves in the layer's next call, filled in by it."""
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
    layer.register_forward_hook(lambda *_: hooks.__exit__())
    return saved


@pytest.mark.slow
def test_a_compiled_kept_layer_holds_what_the_plan_says_and_weights_as_parameters():
    torch._dynamo.reset()
    dtype = torch.bfloat16
    config = TINY | {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 512}
    spec = ModelSpec(name="m", model_type="qwen2", config=config)
    model = materialise(spec, dtype, CPU, initial_weights(spec, 0, dtype, CPU))
    loss = CausalLMLoss(model, keep_activations=1, compile=True)
    layer = model.model.layers[1]
    saved = saved_by(layer)
    given = []
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: given.extend((*args, *kwargs["position_embeddings"])),
        with_kwargs=True,
        prepend=True,
    )
    tokens = torch.randint(0, 96, (1, 512))
    loss(tokens, tokens, None, 512).backward()
    parameters = {param.data_ptr(): param for param in layer.parameters()}
    assert all(
        tensor is parameters[tensor.data_ptr()]
        for tensor in saved
        if tensor.data_ptr() in parameters
    )
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved
    }
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *given)}
    held = sum(size for storage, size in storages.items() if storage not in outside)
    output = 512 * 256 * dtype.itemsize
    expected = layer_activation_bytes(
        Widths.of(config_of(spec)), 512, dtype.itemsize, backward=False, compiled=True
    )
    assert held + output == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compiled"), [("zero3", True), ("fsdp2", True), ("fsdp2", False)])
def test_no_kept_layer_keeps_a_gathered_weight(name, compiled, monkeypatch):
    """When its forward is over what it saved of its weights is empty: DeepSpeed's parameters, or
    storages that FSDP2 emptied.

    Eager, DeepSpeed gathers a weight at a time, and its own linear saves the parameter.
    """
    torch._dynamo.reset()
    monkeypatch.setattr("baselines.deepspeed.options.REUSE_DISTANCE", 0)
    spec = parity.make_spec(
        torch.bfloat16, keep_activations=1, compile=compiled, **parity.RELEASING.get(name, {})
    )
    with parity.running(name, spec) as system:
        parity.train(
            system, spec, range(2)
        )  # the first step finds out in which order parameters are used
        root = system.loss if name == "fsdp2" else system._engine.module
        layer = root.model.model.layers[-1]
        weights, left, released = set(), [], []

        def gathered(*_):
            weights.update(param.untyped_storage().data_ptr() for param in layer.parameters())

        layer.register_forward_pre_hook(gathered)
        saved = saved_by(layer)

        def look(*_):
            for storage in (tensor.untyped_storage() for tensor in saved):
                released.extend([storage] * (not storage.nbytes()))
                left.extend([storage] * (storage.nbytes() > 0 and storage.data_ptr() in weights))

        root.register_forward_hook(look)
        parity.train(system, spec, range(1))
    assert weights
    assert 0 not in weights
    assert len(released) >= 9, "seven matrices and two norms"
    assert left == []


def activations(num_layers, **options):
    """(`checkpoints`, `activations`) of a 14B model with that many layers."""
    config = QWEN_14B | {"num_hidden_layers": num_layers}
    plan = build("in_memory", make_spec(config, SHAPE, device="cuda", **options)).plan()
    return plan.device["checkpoints"], plan.device["activations"]


@pytest.mark.parametrize("compiled", [False, True])
def test_plan_counts_kept_graphs_beside_one_backward_and_inputs_of_the_others(compiled):
    config, tokens, hidden = (
        SimpleNamespace(**QWEN_14B),
        SHAPE.num_tokens,
        2 * SHAPE.num_tokens * QWEN_14B["hidden_size"],
    )
    widths = Widths.of(config)
    kept, graph = (
        layer_activation_bytes(widths, tokens, 2, backward=backward, compiled=compiled)
        for backward in (False, True)
    )
    logits = (4 if compiled else 12) * QWEN_14B["vocab_size"]  # bytes a token
    for chunk in (1, 4096, 32768):
        beside = max(graph - kept, logits * chunk)
        for number in (0, 1, 5, 48):
            inputs, held = activations(
                48, keep_activations=number, compile=compiled, loss_chunk=chunk
            )
            assert inputs == (48 - number + 2) * hidden
            assert held == max(number * kept + beside, graph)
    assert logits * 1 < graph - kept < logits * 32768, "each is the larger one once"


@pytest.mark.parametrize(
    "name", ["in_memory", "zero3", "zero2", "fsdp2", "superoffload", "zenflow"]
)
def test_as_many_layers_are_kept_as_the_plan_has_room_for(name):
    config = QWEN_14B | {"num_hidden_layers": 12}

    def built(memory, number):
        spec = make_spec(config, SHAPE, device="cuda", compile=True, keep_activations=number)
        return build(name, dataclasses.replace(spec, device_memory=memory))

    sizes = [built(None, number).plan().device_bytes for number in range(13)]
    assert sizes[1:] == sorted(sizes[1:])
    assert sizes[1] <= sizes[0], "a graph of the last layer is there in either case"
    chosen = {}
    for number in (0, 1, 4, 11, 12):
        memory = -(-sizes[number] * 100 // 94)
        for given in (memory, memory - 100):
            system = built(given, -1)
            chosen[given] = system.options.keep_activations
            assert system.placement == {"kept_layers": chosen[given]}
            assert system.plan() == built(None, chosen[given]).plan()
            assert system.plan().device_bytes <= 0.94 * given or chosen[given] == 0
            assert chosen[given] == 12 or sizes[chosen[given] + 1] > 0.94 * given
        assert chosen[memory] >= number
    assert len(set(chosen.values())) > 4
    assert built(10**13, -1).options.keep_activations == 12
    assert built(10**9, -1).options.keep_activations == 0


def test_without_a_device_nothing_is_kept_and_a_number_given_is_not_chosen():
    assert build("in_memory", make_spec(keep_activations=-1)).placement == {"kept_layers": 0}
    assert not hasattr(build("in_memory", make_spec(keep_activations=1)), "placement")


def test_twinflow_takes_the_room_first():
    options = composed("system=zero3_twinflow").options
    spec = dataclasses.replace(
        make_spec(QWEN_14B, SHAPE, device="cuda", **options), device_memory=140 * 10**9
    )
    both = build("zero3", dataclasses.replace(spec, options={**options, "keep_activations": -1}))
    assert both.options.offload_ratio == build("zero3", spec).options.offload_ratio < 1
    assert both.plan().device_bytes <= 0.94 * 140e9


@pytest.mark.parametrize("name", ["in_memory", "zero3", "zero2", "fsdp2"])
def test_more_layers_than_the_model_has_are_one_line(name):
    build(name, make_spec(keep_activations=2))
    with pytest.raises(
        ValueError,
        match=r"^system\.keep_activations: got 3, allowed -1 to 2, the layers of m; choose",
    ):
        build(name, make_spec(keep_activations=3))
    with pytest.raises(
        ValueError,
        match=r"^system\.keep_activations: got -2, allowed an integer >= -1; the default is 0$",
    ):
        build(name, make_spec(keep_activations=-2))


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_preset_is_its_system_compiled_that_keeps_what_fits(name):
    start = f"system={name.removesuffix('_kept')}"
    plain, kept = composed(start), composed(f"system={name}")
    assert composed(start, "mode=kept").config == kept.config
    assert kept.system == plain.system
    preset = " ".join(filter(None, (plain.options.get("preset"), "kept")))
    assert kept.options == {
        **plain.options,
        "preset": preset,
        "compile": True,
        "keep_activations": -1,
    }
    assert (
        family_and_mode(row(kept.system, [1.0], preset=preset, config=kept.config))[1]
        == "kept compiled"
    )


def test_a_rival_that_keeps_nothing_is_the_cell_that_it_was_before_it_could():
    cell = composed("system=zero3")
    system = {
        key: value for key, value in cell.config["system"].items() if key != "keep_activations"
    }
    assert dataclasses.replace(cell, config={**cell.config, "system": system}).hash == cell.hash
    assert composed("system=zero3", "system.keep_activations=1").hash != cell.hash
    engine = composed("system=megatrain")
    system = {
        key: value for key, value in engine.config["system"].items() if key != "keep_activations"
    }
    assert (
        dataclasses.replace(engine, config={**engine.config, "system": system}).hash != engine.hash
    )


def test_a_row_says_how_many_layers_were_kept():
    cell = composed("system=in_memory_kept", "model=tiny", "machine.device=cpu")
    assert outlook_of(build(cell.system, cell.spec()), cell).plan["placement"] == {"kept_layers": 0}
    cell = composed("system=in_memory", "model=tiny", "machine.device=cpu")
    assert "placement" not in outlook_of(build(cell.system, cell.spec()), cell).plan
