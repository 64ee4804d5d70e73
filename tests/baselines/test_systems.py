"""The baselines' borders: options, missing dependencies, plans at full size, whole checkpoints, the
process group."""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from analysis.rows import family_and_mode
from baselines import distributed
from baselines.deepspeed.setup import sole_builder
from baselines.model import count_params, num_params
from baselines.options import parse_options
from baselines.registry import REGISTRY, build
from baselines.system import ModelSpec, Shape, SystemSpec, Unsupported
from engine import Recipe, whole_directory
from tests.baselines.test_model import TINY
from tests.made_rows import row
from tests.sweeps.test_config import GROUPS, composed

pytestmark = pytest.mark.slow

QWEN_14B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}


def make_spec(config=TINY, shape=None, dtype=torch.bfloat16, device="cpu", **options) -> SystemSpec:
    return SystemSpec(
        model=ModelSpec(name="m", model_type="qwen2", config=config),
        shape=shape or Shape(batch_size=2, seq_len=8),
        recipe=Recipe(),
        dtype=dtype,
        device=torch.device(device),
        options=options,
    )


@pytest.mark.parametrize("name", ["in_memory", "zero3", "fsdp2"])
@pytest.mark.parametrize(
    "options",
    [{"compile": 1}, {"loss_chunk": 0}, {"loss_chunk": True}, {"loss_chunk": "8"}],
)
def test_bad_values_are_one_line(name, options):
    (key,) = options
    with pytest.raises(ValueError, match=rf"^system\.{key}: got .*, allowed [^\n]*; [^\n]*$"):
        build(name, make_spec(**options))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("in_memory", {"preset": 3}, "a word or null"),
        ("fsdp2", {"compile": "yes"}, "true or false"),
        ("zero3", {"prefetch_bucket_size": -2}, "an integer >= -1; the default is -1"),
        ("zero3", {"param_persistence_threshold": -1}, "an integer >= 0; the default is 100000"),
        ("zero3", {"max_live_parameters": 0}, "an integer >= 1"),
        ("zero3", {"sub_group_size": 1e9}, "an integer >= 1"),
        ("zero3", {"overlap_comm": 1}, "true or false"),
        ("zero2", {"reduce_bucket_size": 0}, "an integer >= 1; the default is 500000000"),
        ("zero2", {"overlap_comm": None}, "true or false"),
        (
            "zero3",
            {"offload_ratio": -0.1},
            "0, or a number above 0 and up to 1; the default is 1.0",
        ),
        ("zero3", {"offload_ratio": True}, "0, or a number above 0 and up to 1"),
        ("superoffload", {"cpu_share": 1}, "a number above 0 and below 1; the default is 0.75"),
        ("zero2", {"sub_group_size": 1000}, "preset, keep_activations, .*; remove it"),
    ],
)
def test_knobs_are_checked(name, options, words):
    (key,) = options
    with pytest.raises(ValueError, match=rf"^system\.{key}: got [^\n]*, allowed {words}[^\n]*$"):
        build(name, make_spec(**options))


def test_knobs_reach_deepspeed():
    from baselines.deepspeed.options import Zero2Options, Zero3Options

    spec = make_spec(device="cuda")
    layer = count_params(spec.model).largest_layer
    third = Zero3Options(sub_group_size=7, reduce_bucket_size=5).config(spec)["zero_optimization"]
    assert third["stage"] == 3
    assert (
        third["offload_param"]
        == third["offload_optimizer"]
        == {"device": "cpu", "pin_memory": True}
    )
    assert (
        third["stage3_prefetch_bucket_size"],
        third["sub_group_size"],
        third["reduce_bucket_size"],
    ) == (layer, 7, 5)
    assert third["memory_efficient_linear"]
    tuned = Zero3Options(
        prefetch_bucket_size=10 * layer,
        offload_param=False,
        overlap_comm=False,
        compile=True,
    )
    third = tuned.config(spec)["zero_optimization"]
    assert third["stage3_prefetch_bucket_size"] == 10 * layer
    assert "offload_param" not in third
    assert third["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    on_cpu = tuned.config(make_spec())["zero_optimization"]
    assert on_cpu["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert not third["overlap_comm"]
    assert not third["memory_efficient_linear"]
    second = Zero2Options().config(spec)["zero_optimization"]
    assert second["stage"] == 2
    assert not any("stage3" in key or "param" in key for key in second)


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "megatrain"])
def test_the_yaml_of_a_baseline_says_its_defaults(name):
    """What the parity tests run without a YAML is what `system=NAME` runs."""
    module, attribute = REGISTRY[name].split(":")
    attribute = "InMemory" if name == "in_memory" else attribute  # on one rank
    kind = getattr(importlib.import_module(module), attribute).options_class
    assert parse_options(kind, composed(f"system={name}").options) == kind()


@pytest.mark.parametrize("name", [name for name in GROUPS["system"] if name.endswith("_compiled")])
def test_a_compiled_preset_is_its_system_compiled_and_is_labelled_so_once(name):
    start = name.removesuffix("_compiled")
    plain, compiled = composed(f"system={start}"), composed(f"system={name}")
    assert compiled.options == {**plain.options, "compile": True}
    assert composed(f"system={start}", "mode=compiled").config == compiled.config
    assert compiled.hash == composed(f"system={start}", "system.compile=true").hash
    preset = plain.options.get("preset")
    mine = family_and_mode(row(compiled.system, [1.0], preset=preset, config=compiled.config))
    start = family_and_mode(row(plain.system, [1.0], preset=preset, config=plain.config))
    assert mine == (start[0], f"{start[1]} compiled".strip())


def test_bad_dtype_and_system():
    with pytest.raises(
        ValueError, match=r"^system\.dtype: got torch.float16, allowed bfloat16, float32"
    ):
        build("in_memory", make_spec(dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^system: got 'nope', allowed in_memory"):
        build("nope", make_spec())


def without(monkeypatch, *, module=None, program=None):
    find_spec, which = importlib.util.find_spec, shutil.which
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == module else find_spec(name, *rest),
    )
    monkeypatch.setattr(
        shutil, "which", lambda name, **rest: None if name == program else which(name, **rest)
    )


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"module": "deepspeed"}, "deepspeed is not installed; pip install"),
        ({"program": "g++"}, "g.. is missing"),
        ({"program": "ninja"}, "ninja is missing"),
    ],
)
def test_zero3_without_a_dependency_is_unsupported(monkeypatch, missing, words):
    monkeypatch.delenv("CXX", raising=False)
    without(monkeypatch, **missing)
    with pytest.raises(Unsupported, match=words) as caught:
        build("zero3", make_spec())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["0.19.7", "0.9.12", "0.18.9+abc"])
def test_zero3_with_an_old_deepspeed_is_unsupported(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(Unsupported, match=r"0\.19\.8"):
        build("zero3", make_spec())


@pytest.mark.parametrize(
    ("name", "host_per_param", "device_gb"),
    [
        ("zero3", 24.6, (25, 60)),
        ("zero2", 19.78, (55, 70)),
        ("fsdp2", 21.95, (30, 70)),
        ("in_memory", 0, (18 * 14.77, 18 * 14.77 + 50)),
    ],
)
def test_plan_at_14b(name, host_per_param, device_gb):
    spec = make_spec(QWEN_14B, Shape(batch_size=32, seq_len=1024), device="cuda")
    plan = build(name, spec).plan()
    assert plan.host_bytes == pytest.approx(
        host_per_param * num_params(spec.model), rel=0.01, abs=1
    )
    assert device_gb[0] < plan.device_bytes / 1e9 < device_gb[1]


def test_plan_counts_what_the_options_change():
    shape, config = Shape(batch_size=32, seq_len=1024), QWEN_14B | {"num_hidden_layers": 8}

    def device_bytes(name, **options):
        return build(name, make_spec(config, shape, device="cuda", **options)).plan().device

    for name in ("in_memory", "zero3", "zero2", "fsdp2"):
        plain = device_bytes(name)
        assert device_bytes(name, keep_activations=8)["activations"] > 3 * plain["activations"]
        assert device_bytes(name, loss_chunk=32768)["activations"] > 3 * plain["activations"]
    weights = device_bytes("zero3", offload_param=False)["weights"]
    total = num_params(make_spec(config).model)
    assert weights == 2 * total
    count = count_params(make_spec(config).model)
    resharded, gathered = (
        device_bytes("fsdp2", reshard_after_forward=after)["weights"] for after in (True, False)
    )
    assert gathered - resharded == 2 * (count.in_layers - 2 * count.largest_layer)
    two_buckets, one_bucket = (
        device_bytes("zero2", overlap_comm=overlap)["gradients"] for overlap in (True, False)
    )
    assert two_buckets - one_bucket == 2 * 500_000_000
    shape = Shape(batch_size=32, seq_len=1024, num_micro_batches=2)
    assert device_bytes("zero2")["gradients"] == two_buckets + 4 * total


def test_plan_rounds_what_zero2_pins_up_to_powers_of_two():
    total = num_params(make_spec().model)
    largest = count_params(make_spec().model).largest

    def host(device, **options):
        planned = build("zero2", make_spec(device=device, **options)).plan().host
        return {kind: size for kind, size in planned.items() if kind != "other"}

    assert host("cpu") == {
        "weights": 2 * total,
        "master": 4 * total,
        "moments": 8 * total,
        "gradients": 4 * total,
    } | {"staging": 2 * largest}
    pinned = [2 * total, 4 * total, 4 * total, 2 * largest]
    rounded = sum(1 << (size - 1).bit_length() for size in pinned)
    assert sum(host("cuda").values()) == rounded + 8 * total


def write_half(target):
    with whole_directory(target) as partial:
        (partial / "file").write_text("half")
        raise KeyError(target)


def test_directory_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a" / "checkpoint"
    with pytest.raises(KeyError):
        write_half(target)
    assert list(target.parent.iterdir()) == []
    with whole_directory(target) as partial:
        (partial / "file").write_text("whole")
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]
    with pytest.raises(ValueError, match=r"^save: .* exists, allowed a new directory; "):
        write_half(target)
    assert (target / "file").read_text() == "whole"


@pytest.mark.parametrize("name", ["in_memory", "fsdp2"])
def test_resume_from_nothing_is_one_line(name, tmp_path):
    from baselines.model import initial_weights

    spec = make_spec()
    system = build(name, spec)
    system.setup(initial_weights(spec.model, 0, spec.dtype, spec.device))
    with pytest.raises(ValueError, match=r"^resume: got "):
        system.resume(tmp_path)
    system.close()


def test_process_group_is_shared_and_destroyed_by_the_last():
    assert not dist.is_initialized()
    distributed.acquire("gloo")
    distributed.acquire("gloo")
    distributed.release()
    assert dist.is_initialized()
    distributed.release()
    distributed.release()
    assert not dist.is_initialized()


def test_a_group_takes_no_port_of_its_own(monkeypatch):
    """Whatever the environment says of a master: a job of several ranks may have left it there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        distributed.acquire("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        distributed.release()
    assert value.item() == 1
    assert os.environ["MASTER_ADDR"] == "192.0.2.1"


def test_a_group_of_others_is_left_alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        distributed.acquire("gloo")
        distributed.release()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_lock_that_a_killed_builder_left_is_removed_and_a_live_one_is_waited_for(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    left_behind = tmp_path / "cpu_adam" / "lock"
    left_behind.parent.mkdir()
    left_behind.touch()
    program = "from baselines.deepspeed.setup import sole_builder\nwith sole_builder(): print('mine', flush=True)"
    with sole_builder():
        assert not left_behind.exists()
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=8)
    assert other.communicate(timeout=60)[0] == "mine\n"


def test_a_build_goes_on_alone_though_its_cell_was_killed(tmp_path, monkeypatch):
    """The next builder waits for the ninja that was left, which torch starts as this does."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    program = "import subprocess\nfrom baselines.deepspeed.setup import sole_builder\n"
    ninja = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    build = f"with sole_builder(): subprocess.run([{sys.executable!r}, '-c', {ninja!r}], stdout=1)"
    with subprocess.Popen([sys.executable, "-c", program + build], stdout=subprocess.PIPE) as cell:
        left = int(cell.stdout.readline())
        cell.kill()
        cell.wait()
        try:
            with (tmp_path / "building").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(left, signal.SIGKILL)
    with sole_builder():
        assert os.fstat(0).st_ino == (tmp_path / "building").stat().st_ino
    assert os.fstat(0).st_ino != (tmp_path / "building").stat().st_ino


def test_what_a_build_left_running_keeps_no_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with sole_builder():
        worker = subprocess.Popen(["sleep", "600"])
    with (tmp_path / "building").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    worker.kill()
    worker.wait()
