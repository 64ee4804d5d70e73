"""The engine on real streams: same bits for any pipeline, no hidden synchronisation or allocation,
no race the sanitizer sees.

python -m pytest tests/gpu -m gpu
"""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.model import skip_packed_sequence_check
from engine import Machine, Recipe, norm_of
from engine.adamw import AdamW, _compiled_update
from engine.layers.float8 import CAPABILITY
from engine.layout import BLOCK_ALIGNMENT
from engine.master import BlockState
from engine.store import Arena, free_pinned_cache
from tests.models import H200, make_batch, make_engine, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def train(model, num_steps=6, micro_batches=2, recipe=None, *, same_batch=False, **options):
    seeds = [0] * num_steps if same_batch else range(num_steps)
    batches = [
        make_batch(seed, micro_batches=micro_batches, rows=4, seq_len=128, vocab=512)
        for seed in seeds
    ]
    engine = make_engine(
        model,
        batch=batches[0],
        device="cuda",
        recipe=recipe or Recipe(lr=1e-3),
        loss_chunk=256,
        **options,
    )
    losses = [engine.train_step(batch) for batch in batches]
    engine.drain()
    result = [loss.item() for loss in losses], dict(engine.parameters())
    engine.close()
    return result


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_any_pipeline_gives_identical_bits(clip_norm):
    model = make_model("qwen2", dtype=torch.bfloat16, **SHAPE)
    recipe, reference = Recipe(lr=1e-3, clip_norm=clip_norm), None
    for depth, streams, interval, slabs in itertools.product((1, 2, 3), (1, 2, 3), (1, 3), (0, 2)):
        found = train(
            model,
            recipe=recipe,
            depth=depth,
            streams=streams,
            checkpoint_interval=interval,
            gradient_slabs=slabs,
            poison=True,
        )
        reference = reference or found
        assert found[0] == reference[0], (depth, streams, interval, slabs)
        for name, value in found[1].items():
            assert torch.equal(value, reference[1][name]), (name, depth, streams, interval, slabs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_optimizer": 3, "keep_activations": 2},
        {"offload_activations": 2, "late_moments": True},
    ],
    ids=str,
)
def test_a_state_written_beside_training_is_that_of_its_own_step(options, tmp_path):
    """And resumes bit for bit; under streaming with the same state, whose updates on the CPU round
    otherwise than those on the device."""
    model, recipe = make_model("qwen2", dtype=torch.bfloat16, **SHAPE), Recipe(lr=1e-3)
    batches = [make_batch(seed, rows=4, seq_len=128, vocab=512) for seed in range(6)]

    def engine(**options):
        return make_engine(
            model, batch=batches[0], device="cuda", recipe=recipe, loss_chunk=256, **options
        )

    found = {}
    for way in ("save", "beside"):
        running = engine(**options)
        losses = [running.train_step(batch) for batch in batches[:3]]
        if way == "save":
            running.save(tmp_path / way)
        else:
            running.save_beside(tmp_path / way, room=1 << 40)
        losses += [running.train_step(batch) for batch in batches[3:]]
        running.saved()
        found[way] = [loss.item() for loss in losses], dict(running.parameters())
        running.close()
    for path in (tmp_path / "save").glob("block-*"):
        assert (tmp_path / "beside" / path.name).read_bytes() == path.read_bytes(), path.name
    resumed = engine(**options)
    resumed.resume(tmp_path / "beside")
    losses = [resumed.train_step(batch) for batch in batches[3:]]
    assert [loss.item() for loss in losses] == found["save"][0][3:] == found["beside"][0][3:]
    for name, value in resumed.parameters():
        assert torch.equal(value, found["save"][1][name]), name
    resumed.close()
    streamed = engine()
    streamed.resume(tmp_path / "beside")
    streamed.save(tmp_path / "streamed")
    for path in (tmp_path / "save").glob("block-*"):
        assert (tmp_path / "streamed" / path.name).read_bytes() == path.read_bytes(), path.name
    streamed.close()


def test_packed_documents_take_no_synchronisation_and_train_as_in_memory():
    """The masks of packed documents are made on the device."""
    skip_packed_sequence_check()
    model = make_model("qwen2", dtype=torch.float32, **SHAPE)
    places = torch.cat([torch.arange(50), torch.arange(78)])
    losses = {}
    for device in ("cpu", "cuda"):
        batches = [make_batch(seed, rows=4, seq_len=128, vocab=512) for seed in range(4)]
        packed = [
            replace(batch, position_ids=places.expand_as(batch.tokens).contiguous())
            for batch in batches
        ]
        engine = make_engine(
            model, batch=packed[0], device=device, recipe=Recipe(lr=1e-3), loss_chunk=256
        )
        found = [engine.train_step(packed[0])]  # the first looks at the masks
        engine.drain()
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            found += [engine.train_step(batch) for batch in packed[1:]]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.drain()
        losses[device] = [loss.item() for loss in found]
        engine.close()
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_optimizer": 3, "keep_activations": 2, "streams": 2},
        {"offload_activations": 2, "compile": True},
    ],
    ids=str,
)
def test_an_evaluation_between_steps_changes_no_bit_and_synchronises_only_to_drain(
    options, monkeypatch
):
    """Of another number of micro-batches too; the norm of each step is there when it is drained."""
    skip_packed_sequence_check()
    model, recipe = make_model("qwen2", dtype=torch.bfloat16, **SHAPE), Recipe(lr=1e-3)
    batches = [make_batch(seed, rows=4, seq_len=128, vocab=512) for seed in range(5)]
    more = make_batch(9, micro_batches=3, rows=4, seq_len=128, vocab=512)
    found = []
    for evaluates in (False, True):
        engine = make_engine(
            model, batch=batches[0], device="cuda", recipe=recipe, loss_chunk=256, **options
        )
        losses, norms = [engine.train_step(batches[0])], []
        if evaluates:
            first = engine.evaluate(more)  # the first of each kind compiles, and looks for dropout
        engine.drain()
        drain = engine.executor.lanes.drain

        def draining(drain=drain):
            torch.cuda.set_sync_debug_mode("default")
            drain()
            torch.cuda.set_sync_debug_mode("error")

        with monkeypatch.context() as patch:  # undone before `close` drains
            patch.setattr(engine.executor.lanes, "drain", draining)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for batch in batches[1:]:
                    losses.append(engine.train_step(batch))
                    norms.append(engine.gradient_norm)
                    if evaluates:
                        last = engine.evaluate(more)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        engine.drain()
        if evaluates:
            assert last.item() != first.item() == pytest.approx(last.item(), rel=0.1)
        numbers = [value.item() for value in (*losses, *norms)]
        assert norms[-1].item() == engine.executor.memory.verdict[1].item()
        found.append((numbers, dict(engine.parameters())))
        engine.close()
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_kept_and_offloaded_activations_give_the_bits_of_recomputed_ones(clip_norm):
    model, recipe = (
        make_model("qwen2", dtype=torch.bfloat16, **SHAPE),
        Recipe(lr=1e-3, clip_norm=clip_norm),
    )
    reference = train(model, recipe=recipe)
    kept = (
        {"keep_activations": 2},
        {"keep_activations": 6},
        {"keep_activations": 3, "gradient_slabs": 2},
        {"keep_activations": 4, "reload_weights": 1},
        {"keep_attention": 6},
        {"keep_attention": 3, "checkpoint_interval": 2},
        {"keep_attention": 1, "offload_attention": 5, "checkpoint_interval": 2},
    )
    offloaded = (
        {"offload_activations": 6},
        {"offload_activations": 2, "keep_activations": 2},
        {"offload_activations": 3, "streams": 2},
    )
    held = ({"pinned": "torch"}, {"pinned": "none", "offload_activations": 2})
    for options in (
        *kept,
        *offloaded,
        *held,
        {"late_moments": False},
        {"optimizer_overlap": False, "gradient_slabs": 2},
    ):
        found = train(model, recipe=recipe, poison=True, **options)
        assert found[0] == reference[0], options
        for name, value in found[1].items():
            assert torch.equal(value, reference[1][name]), (name, options)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY,
    reason="multiplies no float8",
)
def test_float8_products_give_the_same_bits_wherever_activations_wait():
    model = make_model("qwen2", dtype=torch.bfloat16, **SHAPE)
    plain, reference = train(model), train(model, products="float8")
    assert reference[0] != plain[0]
    assert reference[0] == pytest.approx(plain[0], abs=2e-2)
    for options in ({"keep_activations": 4, "reload_weights": 1}, {"offload_activations": 3}):
        found = train(model, products="float8", poison=True, **options)
        assert found[0] == reference[0], options
        for name, value in found[1].items():
            assert torch.equal(value, reference[1][name]), (name, options)
    compiled = train(model, products="float8", compile=True, keep_activations=2)
    assert compiled[0] == pytest.approx(reference[0], abs=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"device_optimizer": 3},
        {"device_optimizer": 8, "keep_activations": 6},
        {"compile": True},
        {"compile": True, "device_optimizer": 3, "keep_activations": 2},
        {"compile": True, "offload_activations": 3, "keep_activations": 1},
        {"compile": True, "offload_activations": 2, "keep_activations": 3, "reload_weights": 1},
        {"mlp_chunk": 200},
        {"mlp_chunk": 256, "offload_activations": 2, "keep_activations": 1},
        {"compile": True, "mlp_chunk": 200, "offload_activations": 2, "keep_activations": 1},
        {
            "compile": True,
            "device_optimizer": -1,
            "keep_activations": -1,
            "offload_activations": -1,
        },
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_every_placement_trains_as_streaming_does(options, clip_norm):
    """Losses only: on random tokens Adam turns one rounding of a gradient near zero into a step of
    either sign."""
    model, recipe = (
        make_model("qwen2", dtype=torch.bfloat16, **SHAPE),
        Recipe(lr=1e-3, clip_norm=clip_norm),
    )
    streamed, placed = (
        train(model, recipe=recipe, same_batch=True, poison=True, **chosen)[0]
        for chosen in ({}, options)
    )
    torch.testing.assert_close(placed, streamed, rtol=2e-3, atol=0)
    assert streamed[-1] < 0.97 * streamed[0]


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_state_on_a_drive_changes_no_bit(clip_norm, tmp_path):
    """That of some blocks, and of all."""
    model = make_model("qwen2", dtype=torch.bfloat16, **SHAPE)
    rates = replace(H200, adamw_params=1e9, disk_read_bytes=1e9, disk_write_bytes=1e9)
    there = {"machine": Machine(rates=rates), "folders": [tmp_path]}
    recipe = Recipe(lr=1e-3, clip_norm=clip_norm)
    losses, parameters = train(model, recipe=recipe, poison=True)
    for number in (3, SHAPE["num_hidden_layers"] + 2):
        found = train(model, recipe=recipe, poison=True, disk_blocks=number, **there)
        assert found[0] == losses, number
        for name, value in found[1].items():
            assert torch.equal(value, parameters[name]), (name, number)


def test_fp32_agrees_with_the_cpu():
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model("qwen2", **SHAPE)
    on_cuda = train(model, 4)
    batches = [
        make_batch(step, micro_batches=2, rows=4, seq_len=128, vocab=512) for step in range(4)
    ]
    engine = make_engine(model, batch=batches[0], recipe=Recipe(lr=1e-3), loss_chunk=256)
    torch.testing.assert_close(
        on_cuda[0], [engine.train_step(b).item() for b in batches], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"mlp_chunk": 200}, {"mlp_chunk": 200, "keep_activations": 1, "compile": True}],
    ids=str,
)
def test_a_steady_step_neither_synchronises_nor_allocates_device_or_pinned_memory(options):
    skip_packed_sequence_check()
    model = make_model("qwen2", dtype=torch.bfloat16, **SHAPE)
    batches = [
        make_batch(step, micro_batches=2, rows=4, seq_len=128, vocab=512) for step in range(8)
    ]
    engine = make_engine(model, batch=batches[0], device="cuda", loss_chunk=256, **options)
    for first in (batches[:2], batches[2:4]):  # the first drain gives up what compiling pinned
        for batch in first:
            engine.train_step(batch)
        engine.drain()
    before = (
        torch.cuda.memory_stats()["num_device_alloc"],
        torch.cuda.host_memory_stats()["num_host_alloc"],
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[4:]:
            engine.train_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.drain()
    assert (
        torch.cuda.memory_stats()["num_device_alloc"],
        torch.cuda.host_memory_stats()["num_host_alloc"],
    ) == before
    engine.close()


def test_what_computations_wait_for_is_counted_by_the_device():
    """Not by the thread that launches them, which waits ahead of the device."""
    batch = make_batch(0, micro_batches=1, rows=4, seq_len=128, vocab=512)
    model = make_model("qwen2", dtype=torch.bfloat16, **SHAPE)
    engine = make_engine(model, batch=batch, device="cuda", loss_chunk=256)
    engine.train_step(batch)
    engine.drain()
    before, started = engine.counters()["device_idle_s"], time.perf_counter()
    timeline = engine.record([batch] * 4)
    seconds = time.perf_counter() - started
    mine = [i for i in timeline.intervals if i.lane == "compute"]
    idle = timeline.step_s - sum(i.end_s - i.start_s for i in mine)
    counted = engine.counters()["device_idle_s"] - before
    assert 0 < counted < seconds
    assert counted / 4 < 1.5 * idle + 1e-3
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        "streams=2, checkpoint_interval=2",
        "streams=3, checkpoint_interval=2",
        "offload_activations=4",
        "mlp_chunk=200",
    ],
)
def test_the_cuda_sanitizer_finds_nothing(options):
    program = (
        "import torch; from tests.gpu.test_engine_cuda import *\n"
        "model = make_model('qwen2', dtype=torch.bfloat16, **SHAPE)\n"
        f"losses, _ = train(model, 3, depth=2, poison=True, {options})\n"
        "print('losses', losses)"
    )
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "losses" in done.stdout
    assert "data race" not in done.stderr


def test_a_recorded_step_is_as_long_as_it_takes():
    """Two clocks on one timeline: the recorded period agrees with the wall."""
    skip_packed_sequence_check()
    model = make_model(
        "qwen2", dtype=torch.bfloat16, **{**SHAPE, "hidden_size": 1024, "intermediate_size": 4096}
    )
    batches = [make_batch(0, rows=32, seq_len=128, vocab=512) for _ in range(8)]
    engine = make_engine(model, batch=batches[0], device="cuda", loss_chunk=4096, num_threads=4)
    engine.record(batches[:4])
    started = time.perf_counter()
    for batch in batches:
        engine.train_step(batch)
    engine.drain()
    step_s = (time.perf_counter() - started) / len(batches)
    timeline = engine.record(batches)
    engine.close()
    assert 0.5 * step_s < timeline.step_s < 2 * step_s
    assert {interval.lane for interval in timeline.intervals} == {"compute", "h2d", "d2h", "cpu"}
    assert all(0 <= i.start_s < i.end_s <= timeline.step_s for i in timeline.intervals)


def test_a_cap_on_device_memory_binds():
    """With growing segments, as cells run, and in a process of its own: a cap cannot be told from
    the next test's memory."""
    code = "import torch; from sweeps.cell import cap_device_memory as cap; cap(1 << 30); torch.empty({}, device='cuda')"
    env = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    small, large = (
        subprocess.run(
            [sys.executable, "-c", code.format(n)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        for n in (1 << 27, 1 << 29)
    )
    assert small.returncode == 0, small.stderr
    assert "OutOfMemoryError" in large.stderr


def test_the_host_arena_is_pinned_and_moves_at_the_speed_of_pinned_memory():
    """Registered memory: the copy from the arena is asynchronous and no slower than from torch's
    own pinned memory."""
    arena = Arena([1 << 28], pinned="exact")
    target = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def seconds(source: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            assert not end.query()  # the call returned before the copy was done
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[2] / 1e3

    (mine,) = arena.pieces
    registered, pinned = (
        seconds(mine),
        seconds(torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)),
    )
    print(
        f"registered {0.268 / registered:.1f} GB/s, pinned {0.268 / pinned:.1f} GB/s, is_pinned "
        f"{mine.is_pinned()}"
    )
    assert registered < 1.1 * pinned
    arena.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_a_large_block_is_exact_and_takes_no_memory(dtype):
    """As large as a layer of a 14B model; in float64 a piece at a time."""
    block = torch.randn(350_000_000 // BLOCK_ALIGNMENT, BLOCK_ALIGNMENT, device="cuda", dtype=dtype)
    expected = sum(piece.double().square().sum() for piece in block.split(4096)).sqrt()
    norm_of([block[:1]])
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    norm = norm_of([block])
    assert torch.cuda.max_memory_allocated() - held < 16 << 20
    assert norm.item() == pytest.approx(expected.item(), rel=3e-7)


def test_memory_that_torch_pinned_for_reuse_is_given_back() -> None:
    kept = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(1 << 27, dtype=torch.uint8, pin_memory=True)
    del other
    before = _pss()
    free_pinned_cache()
    assert before - _pss() > 1 << 26
    assert kept.is_pinned()


def test_an_update_prepared_for_pins_no_copy_of_a_large_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tuned on the large block itself it would pin 4 times what is allowed here, at the least."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    _compiled_update.cache_clear()
    numel = 1 << 27
    state = BlockState(
        weight=torch.ones(numel, device="cuda", dtype=torch.bfloat16),
        extra=torch.zeros(numel, device="cuda", dtype=torch.int16),
        exp_avg=torch.zeros(numel, device="cuda"),
        exp_avg_sq=torch.zeros(numel, device="cuda"),
    )
    optimizer = AdamW(Recipe(lr=1e-3), num_threads=1)
    optimizer.prepare(state)
    gradient = torch.ones_like(state.weight)
    hyper = optimizer.hyper_tensor(0).cuda()
    free_pinned_cache()
    torch.cuda.reset_peak_memory_stats()  # tuning may clone on the device what stays below the peak
    before = _pss()
    with torch.no_grad():
        optimizer.device_step(state, gradient, hyper=hyper, scale=hyper.new_ones(()))
    torch.cuda.synchronize()
    assert _pss() - before < 1 << 27
    assert state.exp_avg[0] != 0


def _pss() -> int:
    """Bytes of this process's memory, shared pages by their part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    told = dict(line.split(":") for line in lines)
    return int(told["Pss"].split()[0]) * 1024
