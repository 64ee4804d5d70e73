"""After a step that went wrong: what is raised, what has not changed, and how training goes on."""

import math
import re
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine import Batch, MegaTrain, NonFiniteLossError, Recipe
from engine.lanes import CudaLanes
from engine.layers.template import Template
from engine.step import CPU, WRITE, Kind, Op
from tests.models import assert_same, make_batch, make_engine, make_model, train
from tests.twin import TwinLanes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("on_device", [0, 2, 6])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_a_non_finite_loss_takes_no_step(models, seed, on_device, clip_norm):
    recipe, lanes = Recipe(lr=1e-2, clip_norm=clip_norm), TwinLanes(seed=seed)
    engine = make_engine(
        models[torch.float32], recipe=recipe, lanes=lanes, device_optimizer=on_device
    )
    state = engine._store.states[2]
    state.weight[5] = math.nan
    before = [s.weight.clone() for s in engine._store.states]
    with pytest.raises(NonFiniteLossError, match="no optimizer step was taken"):
        train(engine, 1)
    for kept, current in zip(before, engine._store.states, strict=True):
        assert torch.equal(kept.view(torch.int32), current.weight.view(torch.int32))
        assert not current.exp_avg.any()


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_changes_nothing_where_that_is_said(
    models, monkeypatch, clip_norm
):
    """Without clipping no gradient is looked at: it is applied, and what the next step raises says
    so."""
    engine = make_engine(models[torch.float32], recipe=Recipe(lr=1e-2, clip_norm=clip_norm))
    _, before = train(engine, 1)
    backward, error = Template.backward, None
    with monkeypatch.context() as patch:

        def spoilt(*arguments: Any) -> Any:
            hidden, grads = backward(*arguments)
            return hidden, [grad * math.nan for grad in grads]

        patch.setattr(Template, "backward", spoilt)
        try:
            train(engine, 1, first=1)
        except NonFiniteLossError as caught:
            error = caught
    after = dict(engine.parameters())
    unchanged = all(torch.equal(value, after[name]) for name, value in before.items())
    assert unchanged is (error is not None) is (clip_norm > 0)
    if clip_norm:
        assert re.fullmatch(
            r"step 1: loss \d\.\d+, gradient norm nan; no optimizer step was taken", str(error)
        )
        return
    words = r"step 2: loss nan; no optimizer step was taken this time, but .* an earlier step may have applied one"
    with pytest.raises(NonFiniteLossError, match=words) as caught:
        train(engine, 1, first=2)
    assert "gradient norm" not in str(caught.value)
    assert "\n" not in str(caught.value)


BAD = {
    "no label": (
        lambda b: Batch(tokens=b.tokens, labels=torch.full_like(b.labels, -100)),
        NonFiniteLossError,
    ),
    "no such token": (lambda b: Batch(tokens=b.tokens + 96, labels=b.labels), IndexError),
}
"""What a batch can be made into that no step survives, and what it raises on the CPU."""


def drained_step(engine: MegaTrain, batch: Batch) -> None:
    engine.train_step(batch)
    engine.drain()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
@pytest.mark.parametrize("tied", [False, True])
def test_training_goes_on_as_if_the_bad_step_never_was(bad, clip_norm, tied):
    model, recipe = (
        make_model("llama", tie_word_embeddings=tied),
        Recipe(lr=1e-2, clip_norm=clip_norm),
    )
    expected = train(make_engine(model, recipe=recipe), 6)
    engine = make_engine(model, recipe=recipe)
    first, _ = train(engine, 3)
    spoilt, error = BAD[bad]
    for _ in range(2):
        with pytest.raises(error):
            engine.train_step(spoilt(make_batch(3)))
    second = train(engine, 3, first=3)
    assert_same((first + second[0], second[1]), expected)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_checkpoint_takes_back_a_bad_step(models, bad, clip_norm, seed, tmp_path):
    """With lanes that run late the error comes in the drain, as it may on CUDA, and the step was
    counted."""
    recipe, (spoilt, error) = Recipe(lr=1e-2, clip_norm=clip_norm), BAD[bad]
    expected = train(make_engine(models[torch.bfloat16], recipe=recipe), 6)
    engine = make_engine(models[torch.bfloat16], recipe=recipe, lanes=TwinLanes(seed=seed))
    train(engine, 3)
    engine.save(tmp_path / "step-3")
    with pytest.raises(error):
        drained_step(engine, spoilt(make_batch(3)))
    engine.resume(tmp_path / "step-3")
    losses, parameters = train(engine, 3, first=3)
    assert_same((losses, parameters), (expected[0][3:], expected[1]))


@pytest.mark.parametrize("seed", [None, 1])
def test_an_interrupted_backward_leaves_nothing_in_the_next_sums(monkeypatch, tmp_path, seed):
    """Tied embeddings: the tail's part of their gradient is there when a layer fails."""
    model = make_model("llama", tie_word_embeddings=True)
    expected = train(make_engine(model), 4)
    engine = make_engine(model, lanes=TwinLanes(seed=seed))
    train(engine, 2)
    engine.save(tmp_path / "step-2")
    with monkeypatch.context() as patch:
        patch.setattr(
            "engine.layers.template.Template.backward",
            lambda *_: (_ for _ in ()).throw(RuntimeError("interrupted")),
        )
        with pytest.raises(RuntimeError, match="interrupted"):
            train(engine, 1, first=2)
    engine.resume(tmp_path / "step-2")
    losses, parameters = train(engine, 2, first=2)
    assert_same((losses, parameters), (expected[0][2:], expected[1]))


def test_an_error_of_the_cpu_lane_is_not_lost_behind_another(models, monkeypatch):
    engine = make_engine(models[torch.float32])
    with pytest.raises(IndexError):
        engine.train_step(BAD["no such token"][0](make_batch(0)))
    with monkeypatch.context() as patch:
        patch.setattr(
            engine._lanes, "drain", lambda: (_ for _ in ()).throw(NonFiniteLossError("step 0"))
        )
        with pytest.raises(NonFiniteLossError, match="step 0"):
            engine.train_step(make_batch(0))
    engine.train_step(make_batch(0))


def cpu_lane(monkeypatch: pytest.MonkeyPatch) -> CudaLanes:
    """The worker of CudaLanes without a device beside it."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return CudaLanes(torch.device("cuda", 0), [CPU])


@pytest.mark.parametrize(
    ("error", "times"), [(NonFiniteLossError("bad"), 1), (MemoryError("bad"), 3)]
)
@pytest.mark.parametrize("met_by_a_wait", [False, True])
def test_the_worker_drops_what_follows_an_error_and_goes_on_after_a_loss_that_is_not_finite(
    monkeypatch, error, times, met_by_a_wait
):
    lanes, ran, go = cpu_lane(monkeypatch), [], threading.Event()

    def fail() -> None:
        go.wait()
        raise error

    failed = lanes.submit(op_on(CPU), fail, [])
    lanes.submit(op_on(CPU), lambda: ran.append("update of the bad step"), [])
    go.set()
    with pytest.raises(type(error)):
        lanes._wait_host(failed.done) if met_by_a_wait else lanes.drain()
    for _ in range(times - 1):
        with pytest.raises(type(error)):
            lanes.drain()
    lanes.submit(op_on(CPU), lambda: ran.append("later"), [])
    if times == 1:
        lanes.drain()
    lanes.close()
    assert ran == (["later"] if times == 1 else [])


@pytest.mark.parametrize("disk", [None, OSError("the drive is gone")])
def test_drives_get_what_the_step_before_a_loss_that_is_not_finite_left_to_write(monkeypatch, disk):
    """However late; and a drive's own error is not lost in the other."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    lanes, ran, go = CudaLanes(torch.device("cuda", 0), [CPU, WRITE]), [], threading.Event()

    def write(name: str) -> None:
        go.wait()
        ran.append(name)
        if disk:
            raise disk

    def bad() -> None:
        raise NonFiniteLossError("bad")

    lanes.submit(op_on(WRITE), lambda: write("of the step before"), [])
    checked = lanes.submit(op_on(CPU), bad, [])
    updated = lanes.submit(op_on(CPU), lambda: ran.append("update"), [])
    lanes.submit(op_on(WRITE), lambda: write("what was read"), [updated])
    checked.done.wait()
    go.set()
    for _ in range(2 if disk else 1):
        with pytest.raises(OSError if disk else NonFiniteLossError):
            lanes.drain()
    lanes.submit(op_on(CPU), lambda: ran.append("later"), [])
    lanes.close()
    told = ["of the step before", "what was read", "later"]
    assert ran == (told[:1] if disk else told)


def op_on(lane: str, *, signals: bool = True) -> Op:
    return Op(kind=Kind.LOAD, block=0, lane=lane, signals=signals)


class Stream:
    """A CUDA stream that says in `log` what it waits for and who waits for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: "Event") -> None:
        self.log.append(f"{self.name} waits for {event.stream.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for all of {self.name}")


class Event:
    """A CUDA event that says who waits for it; one that times says nothing."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.times = enable_timing

    def record(self, stream: Stream) -> None:
        if self.times:
            return
        self.stream = stream
        stream.log.append(f"{stream.name} records")

    def synchronize(self) -> None:
        self.stream.log.append(f"host waits for {self.stream.name}")


def test_cuda_lanes_wait_for_the_tickets_they_are_given(monkeypatch):
    """A stream for another's event, the worker too, a stream for the worker, a drain for all."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    lanes, log, go = cpu_lane(monkeypatch), list[str](), threading.Event()
    lanes._streams = {name: Stream(name, log) for name in ("h2d", "compute")}
    load = lanes.submit(op_on("h2d"), lambda: log.append("load"), [])
    forward = lanes.submit(op_on("compute"), lambda: log.append("forward"), [load])
    update = lanes.submit(op_on(CPU), lambda: (go.wait(), log.append("update")), [forward])
    threading.Timer(0.05, go.set).start()
    lanes.submit(op_on("h2d", signals=False), lambda: log.append("next load"), [update])
    lanes.drain()
    assert log == [
        *("load", "h2d records", "compute waits for h2d", "forward", "compute records"),
        *("host waits for compute", "update", "next load"),
        *("host waits for all of h2d", "host waits for all of compute"),
    ]
    lanes.close()


def test_a_drain_returns_once_the_worker_has_done_what_was_queued(monkeypatch):
    lanes, ran, go = cpu_lane(monkeypatch), [], threading.Event()
    lanes.submit(op_on(CPU), lambda: ran.append(go.wait()), [])
    threading.Timer(0.05, go.set).start()
    lanes.drain()
    assert ran == [True]
    lanes.close()


def test_close_waits_for_every_stream_and_raises_nothing(monkeypatch):
    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            assert "update" in waited, "the worker ends first, for it can enqueue no more"
            waited.append(self.name)
            if self.name == "h2d":
                raise RuntimeError("CUDA error")

    lanes, waited = cpu_lane(monkeypatch), []
    lanes._streams = {name: Stream(name) for name in ("h2d", "d2h", "compute")}
    lanes.submit(op_on(CPU), lambda: waited.append("update"), [])
    lanes.close()
    lanes.close()
    assert waited == ["update", "h2d", "d2h", "compute"]
