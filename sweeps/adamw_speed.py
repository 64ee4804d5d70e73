"""CPU AdamW against the host memory that it streams through: the engine's kernel, torch's fused
one, DeepSpeed's.

Invariant: every optimizer holds one parameter of the same length, takes the same threads and its
turn in the same rounds as the streams that set the ceiling (sweeps/host_memory.py); one that cannot
run here becomes a line that says why.

    python -m sweeps.ceilings            measures it after the other ceilings
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch

from baselines.deepspeed.setup import import_deepspeed, require_deepspeed, sole_builder
from baselines.system import Unsupported
from engine import KernelError, Recipe, native
from engine.adamw import AdamW, Pass
from engine.master import BlockState
from sweeps.host_memory import ROUNDS, Kernel, Speed, in_turns, streams

BYTES_PER_PARAM = {
    "engine, split master": 2 * (2 + 2 + 4 + 4) + 2,  # weight, remainder, moments; gradient read
    "engine, split master, weights": 2 * (2 + 2)
    + 4
    + 4
    + 2,  # the first of two passes reads the moments
    "engine, split master, moments": 2 * (4 + 4) + 2,  # the second
    "engine, fp32 master": 2 * (4 + 4 + 4)
    + 2
    + 2,  # master, moments; weight written, gradient read
    "engine, fp32 weight": 2 * (4 + 4 + 4) + 4,  # weight, moments; gradient read
    "torch fused, fp32 weight": 2 * (4 + 4 + 4) + 4,
    "DeepSpeed, fp32 weight": 2 * (4 + 4 + 4) + 4,
    "DeepSpeed, bf16 weight alone": 2 * (2 + 4 + 4) + 2,  # no fp32 master: small updates are lost
}
"""Row -> bytes that a step reads and writes for a parameter: twice what is updated, once what is
only read or written."""
HELD_BYTES = 12 + 14 + 14 + 10 + 16 + 16 + 16 + 16 + 12
"""Bytes of a parameter in all arrays together: three of the streams', then the rows in order."""


def _filled(num_params: int, dtype: torch.dtype, value: float) -> torch.Tensor:
    return torch.empty(num_params, dtype=dtype).fill_(
        value
    )  # a parallel first touch; nothing ever becomes denormal


def _untouched(num_params: int, dtype: torch.dtype, _: float) -> torch.Tensor:
    return torch.empty(num_params, dtype=dtype)  # takes no memory


def engine_kernel(
    name: str,
    num_params: int,
    num_threads: int,
    weight: torch.dtype,
    extra: torch.dtype | None,
    taken: Pass = Pass.BOTH,
) -> Kernel:
    """The engine's native AdamW, or one pass of it. Raises Unsupported without it: the fallback is
    not what is measured."""
    try:
        native()
    except KernelError as error:
        raise Unsupported(str(error)) from error
    make = _untouched if taken is Pass.MOMENTS else _filled
    state = BlockState(
        weight=make(num_params, weight, 0.02),
        extra=None if extra is None else make(num_params, extra, 0.02),  # as int16 that is 0
        exp_avg=_filled(num_params, torch.float32, 0.0),
        exp_avg_sq=_filled(num_params, torch.float32, 0.0),
    )
    gradient, optimizer = (
        _filled(num_params, weight, 1e-3),
        AdamW(Recipe(), num_threads=num_threads),
    )
    moments = [state.exp_avg, state.exp_avg_sq]
    weights = [tensor for tensor in (state.weight, state.extra) if tensor is not None]
    both, first, second = weights + moments, weights, moments
    updated = {Pass.BOTH: both, Pass.WEIGHTS: first, Pass.MOMENTS: second}[taken]
    passed = [gradient, *(moments if taken is Pass.WEIGHTS else [])]
    if extra == torch.float32:  # the master holds everything: the weight is only written
        passed.append(updated.pop(0))
    return Kernel(
        name=name,
        bytes_per_element=BYTES_PER_PARAM[name],
        run=lambda: optimizer.step(state, gradient, step=9, scale=1.0, taken=taken),
        updated=updated,
        passed=passed,
    )


def torch_kernel(
    name: str, num_params: int, weight: torch.dtype, make: Callable[[list[torch.nn.Parameter]], Any]
) -> Kernel:
    """Any torch optimizer on one parameter, after the first step, which allocates its state."""
    parameter = torch.nn.Parameter(_filled(num_params, weight, 0.02))
    parameter.grad = _filled(num_params, weight, 1e-3)
    optimizer = make([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    return Kernel(
        name=name,
        bytes_per_element=BYTES_PER_PARAM[name],
        run=optimizer.step,
        updated=[parameter.data, state["exp_avg"], state["exp_avg_sq"]],
        passed=[parameter.grad],
    )


def deepspeed_adam(parameters: list[torch.nn.Parameter], num_threads: int) -> Any:
    """DeepSpeedCPUAdam, fp32 moments. Raises Unsupported, in one line; its first use on a machine
    compiles for minutes."""
    require_deepspeed()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            deepspeed = import_deepspeed(
                torch.device("cuda" if torch.cuda.is_available() else "cpu")
            )
            with sole_builder():
                optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, adamw_mode=True)
    except (RuntimeError, ImportError) as error:
        raise Unsupported(
            f"DeepSpeedCPUAdam did not build: {error.__cause__ or error}".splitlines()[0]
        ) from error
    ctypes.CDLL(optimizer.ds_opt_adam.__file__).omp_set_num_threads(
        num_threads
    )  # its OpenMP may be another than torch's
    return optimizer


def contestants(num_params: int, num_threads: int) -> list[Kernel | Speed]:
    """Every optimizer of BYTES_PER_PARAM in order; a Speed with the reason in place of one that
    cannot run here."""
    bf16, fp32, int16 = torch.bfloat16, torch.float32, torch.int16

    def fused(parameters: list[torch.nn.Parameter]) -> Any:
        return torch.optim.AdamW(parameters, fused=True)

    def deepspeed(parameters: list[torch.nn.Parameter]) -> Any:
        return deepspeed_adam(parameters, num_threads)

    makers: list[Callable[[str], Kernel]] = [
        lambda name: engine_kernel(name, num_params, num_threads, bf16, int16),
        lambda name: engine_kernel(name, num_params, num_threads, bf16, int16, Pass.WEIGHTS),
        lambda name: engine_kernel(name, num_params, num_threads, bf16, int16, Pass.MOMENTS),
        lambda name: engine_kernel(name, num_params, num_threads, bf16, fp32),
        lambda name: engine_kernel(name, num_params, num_threads, fp32, None),
        lambda name: torch_kernel(name, num_params, fp32, fused),
        lambda name: torch_kernel(name, num_params, fp32, deepspeed),
        lambda name: torch_kernel(name, num_params, bf16, deepspeed),
    ]
    found: list[Kernel | Speed] = []
    for name, make in zip(BYTES_PER_PARAM, makers, strict=True):
        try:
            found.append(make(name))
        except Unsupported as missing:
            found.append(Speed(name=name, reason=str(missing)))
    return found


def measure(
    num_params: int, num_threads: int, rounds: int = ROUNDS
) -> tuple[list[Speed], list[Speed]]:
    """(streams, optimizers) from the same rounds; torch's own thread count is the caller's to
    set."""
    simple, rows = streams(num_params, num_threads), contestants(num_params, num_threads)
    kernels = [row for row in rows if isinstance(row, Kernel)]
    speeds = in_turns([*simple, *kernels], rounds)
    ran = {speed.name: speed for speed in speeds[len(simple) :]}
    return speeds[: len(simple)], [row if isinstance(row, Speed) else ran[row.name] for row in rows]
