"""Rivals that need a GPU, as far as a CPU can tell: their configuration, their plan, what they
refuse and in which words."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baselines.deepspeed import infinity
from baselines.deepspeed.base import DeepSpeed
from baselines.deepspeed.options import (
    DeepSpeedOptions,
    SuperOffloadOptions,
    ZenFlowOptions,
    Zero3Options,
)
from baselines.model import count_params, initial_weights, num_params
from baselines.registry import build
from baselines.rival import adamw_groups, set_lr
from baselines.system import ModelSpec, Shape, SystemSpec, Unsupported
from engine import Recipe, SwapFolder, left_behind
from engine.swap import MARKER
from tests.baselines import test_baseline_parity as parity
from tests.baselines.test_model import TINY
from tests.baselines.test_systems import QWEN_14B, without

pytestmark = pytest.mark.slow

CUDA_ONLY = ["superoffload", "torchao_offload", "roundpipe", "slideformer", "published_megatrain"]


def make_spec(config=TINY, device="cuda", clip_norm=1.0, micro_batches=1, **options) -> SystemSpec:
    return SystemSpec(
        model=ModelSpec(name="m", model_type="qwen2", config=config),
        shape=Shape(batch_size=32, seq_len=1024, num_micro_batches=micro_batches),
        recipe=Recipe(clip_norm=clip_norm),
        device=torch.device(device),
        options=options,
    )


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_on_the_cpu_it_is_unsupported_in_one_line(name):
    with pytest.raises(
        Unsupported, match=r"runs on NVIDIA GPUs alone, and machine\.device is cpu"
    ) as caught:
        build(name, make_spec(device="cpu"))
    assert "\n" not in str(caught.value)


def test_state_that_deepspeed_does_not_save_is_refused(tmp_path):
    twinflow = build("zero3", make_spec(sub_group_size=1000, offload_ratio=0.5))
    for system in (twinflow, build("superoffload", make_spec()), build("zenflow", make_spec())):
        with pytest.raises(Unsupported, match=r"^save: DeepSpeed's checkpoint lacks the moments"):
            system.save(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_superoffload_is_configured_for_a_host_on_pcie():
    zero = SuperOffloadOptions().config(make_spec())["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert zero["stage3_param_persistence_threshold"] > num_params(make_spec(QWEN_14B).model)
    assert zero["sub_group_size"] == zero["reduce_bucket_size"] == 400_000_000
    assert zero["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
        "super_offload": True,
        "cpuadam_cores_perc": 0.75,
    }


def test_deepspeed_takes_the_configurations():
    """DeepSpeed's own validation knows every key, and means by it what we mean."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for options in (SuperOffloadOptions(offload_ratio=0.9), Zero3Options(offload_ratio=0.8)):
        zero = DeepSpeedZeroConfig(**options.config(make_spec())["zero_optimization"])
        assert zero.offload_optimizer.ratio == options.offload_ratio
        assert zero.offload_optimizer.super_offload is isinstance(options, SuperOffloadOptions)
        assert set(zero.offload_optimizer.model_extra or {}) == set()


@pytest.mark.parametrize(
    ("clip_norm", "clip", "clipped"), [(1.0, False, 0.0), (1.0, True, 1.0), (0.0, False, 0.0)]
)
def test_superoffload_says_that_it_does_not_clip(clip_norm, clip, clipped):
    spec = make_spec(clip_norm=clip_norm, clip=clip)
    system = build("superoffload", spec)
    assert system.options.config(spec)["gradient_clipping"] == clipped
    assert bool(system.caveat) == (clipped != clip_norm)
    if system.caveat:
        assert system.caveat.startswith("no clipping, where the recipe clips at 1")


def test_superoffload_plan_at_14b(monkeypatch):
    spec = make_spec(QWEN_14B)
    total = num_params(spec.model)
    plan = build("superoffload", spec).plan()
    assert plan.device["weights"] == 2 * total
    assert "optimizer" not in plan.device
    assert {
        kind: size / total for kind, size in plan.host.items() if kind not in ("staging", "other")
    } == {"weights": 2, "master": 4, "moments": 8, "gradients": 6}
    assert 4 < plan.host["staging"] / total < 10
    with monkeypatch.context() as pageable:
        pageable.setattr(DeepSpeedOptions, "pins", lambda *_: False)
        unpinned = build("superoffload", make_spec(QWEN_14B)).plan()
    assert unpinned.host["staging"] < 0.25 * total
    on_the_device = build(
        "superoffload", make_spec(QWEN_14B, offload_param=False, offload_ratio=0.9)
    ).plan()
    assert on_the_device.host["weights"] == 0
    assert on_the_device.device["weights"] == 2 * total
    assert on_the_device.device["optimizer"] > 16 * 0.05 * total


@pytest.mark.parametrize(("name", "least"), [("superoffload", 8), ("zenflow", 16)])
def test_shared_memory_is_checked_before_anything_is_allocated(monkeypatch, name, least):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    needed = least * num_params(make_spec(QWEN_14B).model)
    with pytest.raises(
        Unsupported,
        match=rf"shares {needed:,} bytes between .* and /dev/shm has 67,108,864 free; enlarge",
    ):
        build(name, make_spec(QWEN_14B)).setup([])


def test_zenflow_is_configured_as_its_authors_do_and_deepspeed_takes_it():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = ZenFlowOptions().config(make_spec())
    zenflow = DeepSpeedZeroConfig(**config["zero_optimization"]).zenflow
    assert (
        zenflow.topk_ratio,
        zenflow.update_interval,
        zenflow.select_strategy,
        zenflow.overlap_step,
    ) == (0.1, 4, "auto", True)
    assert config["zero_optimization"]["stage"] == 2
    assert config["optimizer"]["params"]["weight_decay"] == Recipe().weight_decay


def test_zenflow_refuses_micro_batches_and_says_what_it_does():
    with pytest.raises(Unsupported, match=r"shape\.num_micro_batches is 2, use 1$"):
        build("zenflow", make_spec(micro_batches=2))
    assert build("zenflow", make_spec()).caveat.startswith(
        "bounded staleness: a step updates 10% of the columns, in bfloat16"
    )


def test_zenflow_trains_the_same_model_from_the_same_weights():
    """Runs without a GPU. The first loss is exact (weights in their places); staleness makes the
    others fall more slowly."""
    spec, cores = parity.make_spec(torch.float32, clip_norm=0.0), os.sched_getaffinity(0)
    expected = run("in_memory", spec)
    losses = run(
        "zenflow", parity.make_spec(torch.float32, clip_norm=0.0, update_interval=1, topk_share=0.5)
    )
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    assert losses[1] == pytest.approx(expected[1], abs=2e-3)
    assert expected[-1] < losses[-1] < losses[0] - 0.4
    assert os.sched_getaffinity(0) == cores
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def run(name: str, spec: SystemSpec) -> list[float]:
    system = build(name, spec)
    weights = dict(initial_weights(spec.model, 0, spec.dtype, spec.device))
    system.setup(weights.items())
    try:
        for key, value in system.parameters():
            assert torch.equal(value, weights[key]), key
        return parity.train(system, spec, range(12))
    finally:
        system.close()


def test_zenflow_plan_at_14b():
    spec = make_spec(QWEN_14B)
    plan, total = build("zenflow", spec).plan(), num_params(spec.model)
    assert {
        kind: size / total
        for kind, size in plan.host.items()
        if kind not in ("staging", "weights", "other")
    } == {"master": 8, "moments": 16, "gradients": 10}
    assert plan.device["optimizer"] == pytest.approx(0.8 * total)


def test_torchao_is_told_to_be_missing_in_one_line(monkeypatch):
    without(monkeypatch, module="torchao")
    with pytest.raises(Unsupported, match=r"^torchao is not installed; pip install [^\n]*$"):
        build("torchao_offload", make_spec())


def test_roundpipe_is_told_to_be_missing_in_one_line(monkeypatch):
    without(monkeypatch, module="roundpipe")
    with pytest.raises(Unsupported, match=r"^roundpipe is not installed; pip install [^\n]*$"):
        build("roundpipe", make_spec())


@pytest.fixture
def with_roundpipe(monkeypatch):
    """Its plan and what it refuses need nothing of it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: name == "roundpipe" or find(name, *rest)
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compile": True}, r"^system\.compile: got True, allowed False with RoundPipe"),
        ({"keep_activations": -1}, r"^system\.keep_activations: got -1, allowed 0 with RoundPipe"),
        ({"pinned": "none"}, r"^system\.pinned: got 'none', allowed alloc or register"),
    ],
)
def test_what_roundpipe_cannot_be_asked_is_one_line(options, told, with_roundpipe):
    with pytest.raises(ValueError, match=told):
        build("roundpipe", make_spec(**options))


def test_roundpipe_takes_models_that_attend_to_all_before_them(with_roundpipe):
    windowed = {**TINY, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(Unsupported, match=r"got qwen2 of full_attention, sliding_attention"):
        build("roundpipe", make_spec(config=windowed))


def test_roundpipe_takes_no_packed_documents(with_roundpipe):
    with pytest.raises(Unsupported, match=r"no packed documents here; set data=stdlib$"):
        build("roundpipe", dataclasses.replace(make_spec(), packed=True))


@pytest.mark.parametrize("stale", [False, True])
def test_roundpipe_plans_twenty_bytes_a_parameter_and_says_when_it_is_late(stale, with_roundpipe):
    system = build("roundpipe", make_spec(config=QWEN_14B, stale=stale))
    plan, total = system.plan(), num_params(system.spec.model)
    held = [plan.host[kind] for kind in ("weights", "master", "moments", "gradients")]
    assert sum(held) == 20 * total
    assert plan.device_bytes < 60e9
    assert system.caveat == (
        "its weights are one update behind, as RoundPipe's are by default" if stale else None
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decayed", ["all", "matrices"])
def test_the_adamw_given_to_torchao_is_the_recipes(dtype, decayed):
    """Against torch's AdamW on an fp32 master, 50 steps: the weights are that master rounded,
    whatever the learning rate does."""
    from baselines.torchao_offload import MasterAdamW

    settings = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(size, generator=generator).to(dtype).requires_grad_()
        for size in ((300, 10), (7,))
    ]
    masters = [weight.detach().float().clone().requires_grad_() for weight in weights]
    recipe = Recipe(decayed=decayed)
    mine = MasterAdamW(adamw_groups(recipe, weights), **settings)
    plain = torch.optim.AdamW(adamw_groups(recipe, masters), **settings)
    assert len(plain.param_groups) == (1 if decayed == "all" else 2)
    for step in range(50):
        for weight, master in zip(weights, masters, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
            master.grad = weight.grad.float()
        for optimizer in (mine, plain):
            set_lr(optimizer, 1e-4 * (step + 1))
            optimizer.step()
    for weight, held, master in zip(weights, mine.masters, masters, strict=True):
        torch.testing.assert_close(held, master.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(weight.detach(), held.to(dtype))


def test_zero_infinity_wants_a_folder_with_room(tmp_path, monkeypatch):
    for path, got in ((None, "nothing"), (str(tmp_path / "no"), "what is no folder")):
        with pytest.raises(
            Unsupported,
            match=rf"^machine\.nvme_path: got {got}, allowed a folder on a local disk; [^\n]*=PATH$",
        ):
            build("zero_infinity", make_spec(nvme_path=path))
    system = build("zero_infinity", make_spec(QWEN_14B, nvme_path=str(tmp_path)))
    monkeypatch.setattr(infinity, "_require_async_io", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    needed = 16 * num_params(make_spec(QWEN_14B).model)
    with pytest.raises(
        Unsupported,
        match=rf"has 1,000,000,000 bytes free and needs {needed:,}; free some or name another$",
    ):
        system.setup([])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with (
        pytest.raises(
            OSError, match=r"^machine\.nvme_path: the disk is full \(1,000 bytes free\); free some$"
        ),
        system._disk(),
    ):
        raise RuntimeError("aio wrote nothing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", ["9.0a", "Hopper;8.0", "8.0 9.0+PTX;10.0", ""])
def test_architectures_that_deepspeed_cannot_read_are_one_line(asked, monkeypatch):
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/usr/local/cuda")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    builder = SimpleNamespace(
        AsyncIOBuilder=lambda: SimpleNamespace(is_compatible=lambda verbose: False)
    )
    told = f"TORCH_CUDA_ARCH_LIST: got {asked}, of which DeepSpeed reads numbers alone"
    line = told if asked in ("9.0a", "Hopper;8.0") else "libaio is missing"
    with pytest.raises(Unsupported, match=f"^{line}[^\n]*$"):
        infinity._require_async_io(
            SimpleNamespace(ops=SimpleNamespace(op_builder=builder)), torch.device("cuda")
        )


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def swapping(root: Path) -> SwapFolder:
    """A folder of ours with something in it, held by this process."""
    folder = SwapFolder.new(root)
    (folder.path / "zero_stage_3").mkdir()
    (folder.path / "zero_stage_3" / "moments").write_bytes(b"1" * 100_000)
    return folder


@pytest.fixture
def shared_disk(tmp_path) -> Path:
    """With things of others, whose names begin as ours do, and with what a process of ours left
    that was killed."""
    for name in ("megatrain-disk-mydata", "megatrain-disk-1", "megatrain-disk-4194303"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("mine")
    (tmp_path / "megatrain-disk-file").write_text("mine")
    (tmp_path / "megatrain-disk-link").symlink_to(tmp_path / "megatrain-disk-mydata")
    (tmp_path / "megatrain-disk-1" / f"like-{MARKER}").write_text("mine")
    return tmp_path


def test_only_what_a_dead_process_of_ours_left_may_go(shared_disk):
    """The living one is told by its lock alone: of what its process is called nobody asks."""
    theirs = files(shared_disk)
    child = multiprocessing.get_context("fork").Process(target=swapping, args=(shared_disk,))
    child.start()
    child.join()
    alive = swapping(shared_disk)
    with left_behind(shared_disk) as found:
        (dead,) = found
        assert dead.path != alive.path
        assert dead.num_bytes() >= 100_000
        with left_behind(shared_disk) as again:
            assert again == [], "two that start together do not share what they remove"
        dead.remove()
        assert not dead.path.exists()
    assert {name for name in files(shared_disk) if alive.path.name not in name} == set(theirs)
    alive.remove()
    alive.release()
    assert files(shared_disk) == theirs


def test_a_marker_of_another_user_or_a_link_to_one_of_ours_makes_no_folder_ours(shared_disk):
    ours = swapping(shared_disk)
    ours.release()
    (shared_disk / "megatrain-disk-1" / MARKER).symlink_to(ours.path / MARKER)
    (shared_disk / "megatrain-disk-to-ours").symlink_to(ours.path)
    assert SwapFolder.taken(shared_disk / "megatrain-disk-1") is None
    assert SwapFolder.taken(shared_disk / "megatrain-disk-to-ours") is None
    if os.geteuid() == 0:
        os.chown(ours.path / MARKER, 65534, 65534)
        assert SwapFolder.taken(ours.path) is None


def test_a_removal_that_was_cut_short_can_be_taken_up_again(shared_disk, monkeypatch):
    folder = swapping(shared_disk)
    (folder.path / "another").write_text("1")
    monkeypatch.setattr("engine.swap.shutil.rmtree", lambda path, **_: None)
    folder.remove()
    folder.release()
    monkeypatch.undo()
    assert SwapFolder.taken(folder.path) is not None


def test_zero_infinity_touches_nothing_where_it_does_not_run(shared_disk, monkeypatch):
    swapping(shared_disk).release()
    before = files(shared_disk)
    for reason, free in (("libaio", 10**15), ("bytes free", 10**6)):
        system = build(
            "zero_infinity", make_spec(QWEN_14B, device="cpu", nvme_path=str(shared_disk))
        )
        if reason == "bytes free":
            monkeypatch.setattr(infinity, "_require_async_io", lambda *_: None)
        else:
            monkeypatch.setattr(
                "deepspeed.ops.op_builder.AsyncIOBuilder.is_compatible", lambda *_, **__: False
            )
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        with pytest.raises(Unsupported, match=reason):
            system.setup([])
        system.close()
        assert files(shared_disk) == before


def test_zero_infinity_makes_room_and_takes_its_own_folder_with_it(shared_disk, monkeypatch):
    """What the dead one's folder has counts as free; setting up stops where the GPU would be
    needed."""
    theirs = files(shared_disk)
    swapping(shared_disk).release()
    system = build("zero_infinity", make_spec(device="cpu", nvme_path=str(shared_disk)))
    needed = 16 * num_params(system.spec.model)
    monkeypatch.setattr(infinity, "_require_async_io", lambda *_: None)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=max(0, needed - 100_000))
    )
    seen = []
    monkeypatch.setattr(
        DeepSpeed, "setup", lambda self, weights: seen.append(self.options.nvme_path)
    )
    system.setup([])
    assert [name for name in files(shared_disk) if name not in theirs] == [
        f"{Path(seen[0]).name}/{MARKER}"
    ]
    system.close()
    system.close()
    assert files(shared_disk) == theirs


def test_zero_infinity_is_taken_by_deepspeed_and_its_plan_has_the_first_moments_alone(
    tmp_path, monkeypatch
):
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    spec = make_spec(QWEN_14B, nvme_path=str(tmp_path))
    system = build("zero_infinity", spec)
    config = system.options.config(spec)
    offload = DeepSpeedZeroConfig(**config["zero_optimization"]).offload_optimizer
    assert (offload.device, offload.nvme_path, offload.buffer_count) == ("nvme", tmp_path, 12)
    assert offload.pipeline_read
    assert offload.pipeline_write
    assert {"use_gds": False, **config["aio"]} == get_aio_config(config)
    assert (config["aio"]["queue_depth"], config["aio"]["intra_op_parallelism"]) == (32, 8)
    host, total = system.plan().host, num_params(spec.model)
    assert (host["weights"], host["gradients"]) == (2 * total, 2 * total)
    assert host["moments"] == 8 * total
    assert "master" not in host
    monkeypatch.setattr(DeepSpeedOptions, "pins", lambda *_: False)
    pageable = system.plan().host
    sizes = [2 * size for size in count_params(spec.model).sizes]
    blocks = [
        1 << (size - 1).bit_length() for size in (*sizes, sum(sizes), 2 * total)
    ]  # one by one, in one, accumulated gradients
    assert host["staging"] - pageable["staging"] == sum(blocks) - 4 * total
    assert pageable["staging"] < 4 * total
    assert system.caveat == "optimizer state on a disk, whose speed this is"
