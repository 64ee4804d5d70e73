"""The native kernel, the torch fallback and torch.optim.AdamW; the split master against the fp32
master."""

import dataclasses
import math
import threading
import time

import pytest
import torch

from engine import KernelError, Recipe, native
from engine.adamw import AdamW, Pass, clip_scale
from engine.master import BlockState, read_master, write_master

RECIPE = Recipe(lr=1e-3, weight_decay=0.1, schedule="cosine", warmup_steps=5, total_steps=300)
FIELDS = ("weight", "extra", "exp_avg", "exp_avg_sq")


def make_state(master: str, start: torch.Tensor) -> BlockState:
    if master == "plain":
        return BlockState(
            weight=start.clone(),
            extra=None,
            exp_avg=torch.zeros_like(start),
            exp_avg_sq=torch.zeros_like(start),
        )
    dtype = {"split": torch.int16, "fp32": torch.float32, "bf16": None}[master]
    extra = None if dtype is None else torch.zeros(len(start), dtype=dtype)
    state = BlockState(
        weight=torch.empty(len(start), dtype=torch.bfloat16),
        extra=extra,
        exp_avg=torch.zeros_like(start),
        exp_avg_sq=torch.zeros_like(start),
    )
    write_master(start, state.weight, state.extra)
    return state


def run(
    master: str,
    use_native: bool,
    num_steps: int,
    numel: int = 10_007,
    threads: int = 2,
    two_passes: bool = False,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = make_state(master, torch.randn(numel, generator=generator) * 0.02)
    optimizer = AdamW(RECIPE, num_threads=threads, use_native=use_native)
    for step in range(num_steps):
        gradient = (
            torch.randn(numel, generator=generator)
            .mul_(10.0 ** (step % 5 - 3))
            .to(state.weight.dtype)
        )
        if two_passes:
            moments = state.exp_avg.clone(), state.exp_avg_sq.clone()
            optimizer.step(state, gradient, step=step, scale=0.37, taken=Pass.WEIGHTS)
            assert torch.equal(state.exp_avg, moments[0])
            assert torch.equal(state.exp_avg_sq, moments[1])
            weight = state.weight.clone()
            optimizer.step(state, gradient, step=step, scale=0.37, taken=Pass.MOMENTS)
            assert torch.equal(state.weight, weight)
        else:
            optimizer.step(state, gradient, step=step, scale=0.37)
    return [read_master(state.weight, state.extra), state.exp_avg, state.exp_avg_sq, state.weight]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {4: 1.0, 8: 1.0, 11: 1.0, 12: 1.0, 99: 1.0}),
        ("linear", {4: 1.0, 5: 0.875, 8: 0.5, 11: 0.125, 12: 0.0, 99: 0.0}),
        ("cosine", {4: 1.0, 6: 0.8535534, 8: 0.5, 10: 0.1464466, 12: 0.0, 99: 0.0}),
    ],
)
def test_learning_rates_are_these(schedule, expected):
    """Four steps of warm-up, then eight of decay to zero, which stays zero."""
    recipe = Recipe(lr=3.0, schedule=schedule, warmup_steps=4, total_steps=12)
    expected = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, **expected}
    found = {step: recipe.lr_at(step) for step in expected}
    assert found == pytest.approx({step: 3.0 * share for step, share in expected.items()}, abs=1e-6)


@pytest.mark.parametrize("master", ["plain", "split", "fp32", "bf16"])
@pytest.mark.parametrize(("threads", "numel"), [(1, 10_007), (3, 10_007), (2, 300_001), (4, 63)])
def test_fallback_and_native_kernel_give_the_same_bits(master, threads, numel):
    """Whole blocks and a rest, several runs and chunks, fewer elements than threads have blocks."""
    for fast, slow in zip(
        run(master, True, 20, numel, threads), run(master, False, 20, numel), strict=True
    ):
        assert torch.equal(fast, slow)


@pytest.mark.parametrize("use_native", [True, False])
@pytest.mark.parametrize("master", ["plain", "split", "fp32", "bf16"])
def test_two_passes_give_the_bits_of_one(master, use_native):
    both = run(master, use_native, 20, two_passes=True), run(master, use_native, 20)
    for two, one in zip(*both, strict=True):
        assert torch.equal(two, one)


def test_split_master_is_bit_identical_to_fp32_master_over_200_steps():
    for split, full in zip(run("split", True, 200), run("fp32", True, 200), strict=True):
        assert torch.equal(split, full)


def test_plain_agrees_with_torch():
    generator = torch.Generator().manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(10_007, generator=generator) * 0.02)
    reference = torch.optim.AdamW(
        [parameter], lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
    )
    for step in range(50):
        reference.param_groups[0]["lr"] = RECIPE.lr_at(step)
        parameter.grad = (
            torch.randn(10_007, generator=generator).mul_(10.0 ** (step % 5 - 3)) * 0.37
        )
        reference.step()
    torch.testing.assert_close(run("plain", True, 50)[0], parameter.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "bits", [0, 0x8000, 0x7FFF, 0x3F808000, 0x3F807FFF, -0x407F8000, -0x407F7FFF, 1, -2147483648]
)
def test_split_round_trip_at_the_edges(bits):
    master = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    weight, extra = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
    write_master(master, weight, extra)
    assert torch.equal(read_master(weight, extra).view(torch.int32), master.view(torch.int32))
    assert abs(weight.float() - master) <= abs(master.bfloat16().float() - master)


def test_bf16_weights_alone_lose_small_updates_that_the_split_master_keeps():
    """The published code's defect: near 0.02 a step of 1e-5 is under half a bf16 step of 1.2e-4."""
    start = torch.full((64,), 0.02).bfloat16().float()
    state = make_state("split", start)
    optimizer = AdamW(Recipe(lr=1e-5, weight_decay=0.0), num_threads=1)
    for step in range(40):
        optimizer.step(state, torch.ones(64, dtype=torch.bfloat16), step=step, scale=1.0)
    assert torch.allclose(read_master(state.weight, state.extra), start - 40e-5, rtol=1e-3)
    lossy = make_state("bf16", start)
    for step in range(40):
        optimizer.step(lossy, torch.ones(64, dtype=torch.bfloat16), step=step, scale=1.0)
    assert torch.equal(lossy.weight.float(), start)


@pytest.mark.parametrize("use_native", [True, False])
def test_a_bf16_master_is_rounded_to_nearest_even_as_torch_does(use_native):
    """Halfway between two bf16 values: down to the even one, up to the even one."""
    halfway = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    state = make_state("bf16", torch.ones(2))
    recipe = Recipe(lr=1.0, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-12)
    away = 1.0 - halfway  # of one step without memory, lr * sign(g)
    for place, gap in enumerate(away.tolist()):
        one = BlockState(
            **{
                name: None if name == "extra" else getattr(state, name)[place:][:1]
                for name in FIELDS
            }
        )
        AdamW(dataclasses.replace(recipe, lr=abs(gap)), num_threads=1, use_native=use_native).step(
            one, torch.full((1,), math.copysign(1.0, gap), dtype=torch.bfloat16), step=0, scale=1.0
        )
    assert torch.equal(state.weight, halfway.bfloat16())
    assert state.weight.view(torch.int16).tolist() == [0x3F80, 0x3F82]


def test_clip_scale_is_that_of_torch():
    gradient = torch.nn.Parameter(torch.zeros(1000))
    gradient.grad = torch.randn(1000)
    clipped = gradient.grad * clip_scale(gradient.grad.norm(), 1.0)
    torch.nn.utils.clip_grad_norm_([gradient], 1.0)
    torch.testing.assert_close(gradient.grad, clipped)
    assert clip_scale(torch.tensor(0.5), 1.0) == 1.0
    assert clip_scale(torch.tensor(1e-6), 1e-6) == 0.5
    for bad in (torch.inf, torch.nan):
        assert clip_scale(torch.tensor(bad), 1.0).isnan()


def test_the_kernel_releases_the_gil():
    state = make_state("split", torch.zeros(40_000_000))
    optimizer = AdamW(RECIPE, num_threads=1)
    gradient = torch.zeros(40_000_000, dtype=torch.bfloat16)
    optimizer.step(state, gradient, step=0, scale=1.0)
    worker = threading.Thread(target=lambda: optimizer.step(state, gradient, step=0, scale=1.0))
    ticks = 0
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks >= 3


def test_without_a_compiler_the_fallback_runs_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.cache_clear()
    with pytest.raises(KernelError, match=r"or set system\.torch_adamw=true"):
        AdamW(RECIPE, num_threads=1)
    assert run("split", use_native=False, num_steps=1)
    native.cache_clear()
