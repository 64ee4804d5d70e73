"""Every system of the registry against `in_memory`: the same numbers, the same refusals, the same
resumption.

A new baseline is covered by being registered, a preset of one by having a YAML. All run in this one
process: their process groups must not clash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from baselines.model import initial_weights
from baselines.registry import REGISTRY
from baselines.registry import build as build_registered
from baselines.system import ModelSpec, Shape, SystemSpec, Unsupported
from engine import Batch, NonFiniteLossError, Recipe
from sweeps import auto
from tests.engine.test_packed import apart
from tests.sweeps.test_config import GROUPS, composed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # on a fresh machine the first zero3 test builds DeepSpeed's operator: minutes on two cores
CPU = torch.device("cpu")
VOCAB, SEQ_LEN, BATCH_SIZE, STEPS = 96, 16, 8, 12
TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 1e-5}
# dtype, micro-batches, clip_norm (0.1 always clips, 100 never, 0 is off), tied
CASES = {
    "bf16-clip": (torch.bfloat16, 1, 0.1, False),
    "bf16-tied-accumulation": (torch.bfloat16, 4, 0.1, True),
    "bf16-no-clip": (torch.bfloat16, 1, 0.0, True),
    "fp32-clip-tied": (torch.float32, 1, 0.1, True),
    "fp32-accumulation": (torch.float32, 4, 0.1, False),
    "fp32-clip-inactive": (torch.float32, 1, 100.0, False),
}
OWN = [
    name
    for name in GROUPS["system"]
    if "\nimplementation: " in (auto.CONF / "system" / f"{name}.yaml").read_text()
]
"""Systems that their YAML registers."""
SYSTEMS = [*REGISTRY, *OWN]
OWN_OPTIONS = ("megatrain", "published_megatrain", "slideformer")
"""Systems without the options that rivals share."""
PRESETS = [
    name
    for name in GROUPS["system"]
    if name not in SYSTEMS
    and not name.startswith("megatrain")
    and not name.endswith(("_compiled", "_kept"))
]
"""YAMLs of conf/system beside those named as their system. The engine's are in
test_engine_parity.py; `_compiled` is a system with `compile` alone (test_systems.py), which
test_compiling_does_not_change_the_losses has for all, and `_kept` keeps what a device has room for
(test_kept_activations.py), for which test_keeping_layers_does_not_change_the_losses names a
number."""
NAMES = [*SYSTEMS, *PRESETS]
RIVALS = [name for name in NAMES if name != "in_memory"]
OF_PRESETS = ("bf16-clip", "fp32-accumulation")
"""Cases in which a preset is tried; its system is tried in all."""
RELEASING = {
    "zero3": {
        "param_persistence_threshold": 0,
        "max_live_parameters": 1,
        "prefetch_bucket_size": 0,
    }
}
"""Settings with which, and with `reuse_nothing`, a layer's weights leave the device after its
forward, though the model is tiny."""
NUM_LAYERS = 2


@pytest.fixture
def reuse_nothing(monkeypatch):
    """ZeRO-3 releases a parameter however soon it is used again."""
    monkeypatch.setattr("baselines.deepspeed.options.REUSE_DISTANCE", 0)


def make_spec(
    dtype=torch.float32, num_micro_batches=1, clip_norm=0.1, tied=False, **options
) -> SystemSpec:
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return SystemSpec(
        model=ModelSpec(name="tiny", model_type="qwen2", config=config),
        shape=Shape(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, num_micro_batches=num_micro_batches),
        recipe=Recipe(
            lr=3e-3,
            clip_norm=clip_norm,
            weight_decay=0.1,
            schedule="linear",
            warmup_steps=3,
            total_steps=30,
        ),
        dtype=dtype,
        options=options,
    )


def make_batch(step: int, spec: SystemSpec) -> Batch:
    """One of two batches in turn, so that the loss falls and a wrong update shows; some labels are
    ignored."""
    generator = torch.Generator().manual_seed(step % 2)
    shape = (spec.shape.num_micro_batches, spec.shape.micro_batch_size, SEQ_LEN + 1)
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    labels = tokens[..., 1:].clone()
    labels[0, 0, :9] = -100
    return Batch(tokens=tokens[..., :-1].contiguous(), labels=labels)


def build(name: str, spec: SystemSpec):
    """A system of the registry, or a preset with the options of its YAML beneath those of
    `spec`."""
    if name in REGISTRY:
        return build_registered(name, spec)
    cell = composed(f"system={name}")
    given = {"options": {**cell.options, **spec.options}, "implementation": cell.implementation}
    return build_registered(cell.system, dataclasses.replace(spec, **given))


@contextlib.contextmanager
def running(name: str, spec: SystemSpec, weights=None) -> Iterator:
    """The system set up with the common weights, and closed (twice) afterwards; skipped where it is
    unsupported.

    Skipped too where it says itself that it does not do what the recipe asks
    (tests/baselines/test_rivals.py has those).
    """
    try:
        system = build(name, spec)
    except Unsupported as error:
        pytest.skip(str(error))
    if getattr(system, "caveat", None):
        pytest.skip(f"{name}: {system.caveat}")
    try:
        system.setup(
            weights if weights is not None else initial_weights(spec.model, 0, spec.dtype, CPU)
        )
        yield system
    finally:
        system.close()
        system.close()


def train(system, spec: SystemSpec, steps: range) -> list[float]:
    losses = [system.train_step(make_batch(step, spec)) for step in steps]
    system.drain()
    return [loss.item() for loss in losses]


@functools.cache
def reference(case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    spec = make_spec(*CASES[case])
    with running("in_memory", spec) as system:
        return train(system, spec, range(STEPS)), dict(system.parameters())


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in RIVALS for case in CASES if name in SYSTEMS or case in OF_PRESETS],
)
def test_agrees_with_in_memory(name, case):
    spec = make_spec(*CASES[case])
    expected, expected_params = reference(case)
    assert expected[-1] < expected[0] - 0.3
    with running(name, spec) as system:
        losses = train(system, spec, range(STEPS))
        params = dict(system.parameters())
        counters = system.counters()
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE[spec.dtype]
    assert params.keys() == expected_params.keys()
    for key, value in params.items():
        assert value.dtype == torch.float32
        assert value.device == CPU
        assert value.shape == expected_params[key].shape
    if spec.dtype == torch.float32:
        drift = max(
            (params[key] - value).abs().max().item() for key, value in expected_params.items()
        )
        assert drift < 1e-3
    assert all(isinstance(value, float) for value in counters.values())


@pytest.mark.parametrize("name", RIVALS)
def test_packed_documents_train_as_they_do_in_memory(name):
    """Documents of unlike lengths in each sequence, under every system."""
    spec, losses = make_spec(torch.float32), []
    lengths = (SEQ_LEN // 2, SEQ_LEN - SEQ_LEN // 2 - 5, 5)
    places = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor(lengths).cumsum(0) - 1
    for one in ("in_memory", name):
        with running(one, spec) as system:
            found = []
            for step in range(3):
                batch = make_batch(step, spec)
                batch.labels[..., ends] = -100
                packed = places.expand_as(batch.tokens).contiguous()
                found.append(system.train_step(dataclasses.replace(batch, position_ids=packed)))
            system.drain()
            losses.append([loss.item() for loss in found])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    plain = make_batch(0, spec)
    plain.labels[..., ends] = -100
    with running("in_memory", spec) as system:
        assert abs(system.train_step(plain).item() - losses[0][0]) > 1e-4, "borders are seen"


def documents(batch: Batch) -> Batch:
    """The batch with two documents in each sequence."""
    places = torch.cat([torch.arange(9), torch.arange(SEQ_LEN - 9)])
    labels = batch.labels.clone()
    labels[..., 8] = -100
    packed = places.expand_as(batch.tokens).contiguous()
    return Batch(tokens=batch.tokens, labels=labels, position_ids=packed)


def plain_loss(parameters: dict[str, torch.Tensor], spec: SystemSpec, batch: Batch) -> float:
    """By transformers' own logits, of each document by itself."""
    from baselines.model import materialise

    model = materialise(spec.model, torch.float32, CPU, parameters.items())
    whole = torch.arange(SEQ_LEN).expand_as(batch.tokens)
    places = whole if batch.position_ids is None else batch.position_ids
    with torch.no_grad():
        return apart(model, dataclasses.replace(batch, position_ids=places)).item()


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.usefixtures("reuse_nothing")
def test_an_evaluation_changes_no_bit_and_is_the_plain_models_loss(name):
    """Before the first step and between others; of one micro-batch, of more and of documents. The
    norms are those of in_memory."""
    spec = make_spec(torch.float32, 2, 0.1)
    whole = make_batch(1, spec)
    few = Batch(tokens=whole.tokens[:1], labels=whole.labels[:1])
    many = Batch(tokens=whole.tokens.repeat(2, 1, 1), labels=whole.labels.repeat(2, 1, 1))
    given, found = (few, many, documents(whole)), {}
    for one, evaluates in (("in_memory", False), (name, False), (name, True)):
        options = RELEASING.get(one, {})
        with running(one, dataclasses.replace(spec, options=options)) as system:
            losses, norms = [], []
            for step in range(4):
                if evaluates:
                    evaluated = [system.evaluate(batch) for batch in given]
                    assert all(e.dtype == torch.float32 and e.shape == () for e in evaluated)
                losses += train(system, spec, range(step, step + 1))
                norms.append(system.gradient_norm)
            assert all(norm.dtype == torch.float32 and norm.shape == () for norm in norms)
            params = dict(system.parameters())
            found[one, evaluates] = losses, [norm.item() for norm in norms], params
            for batch in given if evaluates else ():
                expected = plain_loss(params, spec, batch)
                assert system.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)
    first, second = found[name, False], found[name, True]
    assert first[:2] == second[:2]
    assert all(torch.equal(value, second[2][key]) for key, value in first[2].items())
    assert first[1] == pytest.approx(found["in_memory", False][1], rel=1e-4)


def test_a_state_resumed_after_an_evaluation_is_what_is_evaluated(tmp_path):
    """FSDP2 leaves the outer weights gathered after a forward alone."""
    spec = make_spec()
    with running("fsdp2", spec) as system:
        train(system, spec, range(2))
        system.save(tmp_path / "saved")
        expected = system.evaluate(make_batch(0, spec))
        train(system, spec, range(2, 4))
        assert system.evaluate(make_batch(0, spec)) != expected
        system.resume(tmp_path / "saved")
        assert system.evaluate(make_batch(0, spec)) == expected


def test_zenflow_evaluates_and_knows_no_norm():
    """It updates chosen columns before the norm is known."""
    system, spec = build("zenflow", make_spec()), make_spec()
    weights = dict(initial_weights(spec.model, 0, spec.dtype, CPU))
    system.setup(weights.items())
    try:
        batch = make_batch(0, spec)
        expected = plain_loss(weights, spec, batch)
        assert system.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)
        assert system.train_step(batch).item() == pytest.approx(expected, rel=1e-5)
        assert system.gradient_norm is None
    finally:
        system.close()


def test_accumulation_does_not_change_the_maths():
    whole, parts = make_spec(num_micro_batches=1), make_spec(num_micro_batches=4)
    results = []
    for spec in (whole, parts):
        with running("in_memory", spec) as system:
            batch = make_batch(0, whole)
            shape = (spec.shape.num_micro_batches, spec.shape.micro_batch_size, SEQ_LEN)
            results.append(
                system.train_step(
                    Batch(tokens=batch.tokens.view(shape), labels=batch.labels.view(shape))
                ).item()
            )
            results.append(system.train_step(make_batch(1, spec)).item())
    assert results[0] == pytest.approx(results[2], abs=1e-6)


@pytest.mark.parametrize("clip_norm", [0.1, 100.0, 0.0])
def test_in_memory_is_plain_torch(clip_norm):
    """The reference itself against the obvious loop: transformers' logits, clip_grad_norm_,
    AdamW."""
    from baselines.model import materialise

    spec = make_spec(torch.float32, 1, clip_norm)
    recipe = spec.recipe
    model = materialise(
        spec.model, spec.dtype, CPU, initial_weights(spec.model, 0, spec.dtype, CPU)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False
    )
    losses = []
    for step in range(STEPS):
        batch = make_batch(step, spec)
        logits = model(batch.tokens[0], use_cache=False).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[0].flatten())
        loss.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.param_groups[0]["lr"] = recipe.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with running("in_memory", spec) as system:
        assert train(system, spec, range(STEPS)) == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (name, kept)
        for name in NAMES
        for kept in (0, NUM_LAYERS)
        if name not in OWN_OPTIONS and (not kept or name in SYSTEMS)
    ],
)
def test_compiling_does_not_change_the_losses(name, kept):
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        spec = make_spec(
            num_micro_batches=2,
            loss_chunk=40,
            keep_activations=kept,
            compile=compiled,
        )
        with running(name, spec) as system:
            losses.append(train(system, spec, range(3)))
        # One graph for all layers, and one for each of the loss's two sizes of chunk (64 = 40 + 24
        # tokens).
        assert counters["stats"]["unique_graphs"] == 3 * compiled
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in OWN_OPTIONS])
@pytest.mark.usefixtures("reuse_nothing")
def test_keeping_layers_does_not_change_the_losses(name):
    losses = []
    for options in (
        {},
        {"keep_activations": 1},
        {"keep_activations": NUM_LAYERS},
    ):
        spec = make_spec(num_micro_batches=2, loss_chunk=50, **RELEASING.get(name, {}), **options)
        with running(name, spec) as system:
            losses.append(train(system, spec, range(3)))
    for kept in losses[1:]:
        assert kept == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in_memory", "zero3", "zero2", "fsdp2"])
@pytest.mark.usefixtures("reuse_nothing")
def test_keeping_layers_compiled_does_not_change_the_losses(name):
    losses = []
    for options in ({}, {"keep_activations": 1, "compile": True}):
        torch._dynamo.reset()
        counters.clear()
        spec = make_spec(num_micro_batches=2, loss_chunk=64, **RELEASING.get(name, {}), **options)
        with running(name, spec) as system:
            losses.append(train(system, spec, range(3)))
    assert counters["stats"]["unique_graphs"] == 3  # a recomputed layer, a kept one, the loss
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("option", ["accumulate_on_device", "reshard_after_forward"])
def test_what_fsdp2_keeps_on_the_device_does_not_change_the_losses(option):
    losses = []
    for value in (True, False):
        spec = make_spec(num_micro_batches=4, **{option: value})
        with running("fsdp2", spec) as system:
            losses.append(train(system, spec, range(4)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SYSTEMS)
def test_resume_continues_where_save_was_called(name, dtype, tmp_path):
    """Bit for bit. After 5 steps the powers of the betas round otherwise as products than by pow,
    which the CPU's AdamW of DeepSpeed alone would take then."""
    spec = make_spec(dtype, 2)
    directory = tmp_path / "checkpoints" / "last"
    with running(name, spec) as system:
        train(system, spec, range(5))
        system.save(directory)
        expected, expected_params = train(system, spec, range(5, 8)), dict(system.parameters())
    assert [path.name for path in directory.parent.iterdir()] == ["last"]
    with running(name, spec, initial_weights(spec.model, 1, dtype, CPU)) as system:
        system.resume(directory)
        losses, params = train(system, spec, range(5, 8)), dict(system.parameters())
    assert losses == expected
    for key, value in expected_params.items():
        assert torch.equal(params[key], value), key


def train_two(system, spec: SystemSpec) -> None:
    for step in range(2):
        system.train_step(make_batch(step, spec))
    system.drain()


@pytest.mark.parametrize(("dtype", "num_micro_batches"), [(torch.bfloat16, 1), (torch.float32, 2)])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_that_is_not_finite_changes_nothing(name, dtype, num_micro_batches):
    spec = make_spec(dtype, num_micro_batches)
    weights = dict(initial_weights(spec.model, 0, dtype, CPU))
    weights["model.norm.weight"] = weights["model.norm.weight"].clone()
    weights["model.norm.weight"][3] = float("nan")
    with running(name, spec, list(weights.items())) as system:
        before = dict(system.parameters())
        with pytest.raises(NonFiniteLossError):
            train_two(system, spec)
        for key, value in system.parameters():
            torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_plan_and_dtypes_before_setup(name):
    try:
        system = build(name, make_spec(torch.bfloat16, 2))
    except Unsupported as error:
        pytest.skip(str(error))
    plan = system.plan()
    assert plan.device_bytes > 0
    assert all(
        isinstance(value, int) and value >= 0
        for value in (*plan.device.values(), *plan.host.values())
    )
    assert {"weights", "master", "moments", "gradients"} <= system.dtypes().keys()
    system.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_one_line(name):
    with pytest.raises(
        ValueError, match=r"^system\.foo: got 1, allowed .*; remove it or choose one of these$"
    ):
        build(name, make_spec(foo=1))


def listening() -> set[str]:
    """Addresses at which this process, or one that it started, takes connections from."""
    here = psutil.Process()
    sockets = [
        socket
        for process in (here, *here.children(recursive=True))
        for socket in process.net_connections("inet")
    ]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_no_other_machine_can_connect_while_a_rival_runs(name):
    spec = make_spec()
    with running(name, spec) as system:
        train(system, spec, range(2))
        assert dist.is_initialized()
        assert all(ipaddress.ip_address(address).is_loopback for address in listening())


@pytest.mark.parametrize("name", ["in_memory", "fsdp2"])
def test_compiled_rivals_evaluate_alike(name, monkeypatch):
    """The compiler's own work is left to other tests; what breaks a graph is an error here too."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    spec = make_spec(compile=True, keep_activations=1, loss_chunk=64)
    with running(name, spec) as system:
        train(system, spec, range(2))
        batch, params = make_batch(0, spec), dict(system.parameters())
        expected = pytest.approx(plain_loss(params, spec, batch), rel=1e-5)
        assert system.evaluate(batch).item() == expected
        losses = train(system, spec, range(1))
    assert losses[0] == expected
