"""AdamW over a block in host memory, in one pass or with the moments later, and the exact
global-norm clipping scale.

Formula: decoupled weight decay, Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, with bias
correction as in torch.optim.AdamW. Invariant: the native kernel (csrc/adamw.cpp) and the torch
fallback give the same bits, the split master gives the same bits as an fp32 master, and `step` the
same as `step_weights` followed by `step_moments`. A ctypes call releases the GIL.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch

from engine.kernel import native
from engine.recipe import Recipe

FALLBACK_CHUNK = 1 << 18
"""Elements a fallback pass handles at a time, so that its temporaries stay in cache."""


HYPER = ("decay", "beta1_rest", "beta2", "beta2_rest", "step_size", "root_bias2", "eps", "scale")


class _Hyper(ctypes.Structure):
    """Mirrors struct Hyper of csrc/adamw.cpp."""

    _fields_ = tuple((name, ctypes.c_float) for name in HYPER)


@dataclass(frozen=True, kw_only=True)
class BlockState:
    """One block's arrays, 1-D and equally long; `extra` is the int16 remainder, the fp32 master, or
    None: no other master."""

    weight: torch.Tensor
    """bfloat16 or float32; without `extra` it is the master itself."""
    extra: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def part(self, stretch: slice) -> BlockState:
        """Some of its elements, as views."""
        return BlockState(
            weight=self.weight[stretch],
            extra=None if self.extra is None else self.extra[stretch],
            exp_avg=self.exp_avg[stretch],
            exp_avg_sq=self.exp_avg_sq[stretch],
        )


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """2-norm of all elements, fp32 and 0-dim: of each row in fp32, then of these in float64.

    torch sums a whole tensor on the CPU in a few fp32 lanes and is 1% low at 100M elements.
    An element above 1.8e19, whose square is no fp32 number, makes the norm infinite, as torch's.
    """
    rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).reshape(-1) for t in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)
    return norm.float()


def clip_scale(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """min(1, clip_norm / (norm + 1e-6)) in fp32, as torch.nn.utils.clip_grad_norm_; NaN for a norm
    that is not finite."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0) + 0.0 * norm


class AdamW:
    """Applies one optimizer step to one block at a time."""

    def __init__(self, recipe: Recipe, *, num_threads: int, use_native: bool = True) -> None:
        """use_native: false takes torch instead of the kernel, slower. Raises KernelError where
        there is no kernel."""
        self.recipe = recipe
        self.num_threads = max(1, num_threads)
        self._native = native() if use_native else None

    def step(self, state: BlockState, gradient: torch.Tensor, *, step: int, scale: float) -> None:
        """Update `state` in place. gradient: 1-D, bf16 or fp32 as the weight; step counts from 0;
        scale multiplies it."""
        self._run(
            f"adamw_{_master_of(state)}",
            state,
            gradient,
            self._hyper(step, scale),
            weights=True,
            moments=True,
        )

    def step_weights(
        self, state: BlockState, gradient: torch.Tensor, *, step: int, scale: float
    ) -> None:
        """The part of `step` that the next forward needs: master and weight. The moments stay as
        they are for `step_moments`."""
        self._run(
            f"adamw_{_master_of(state)}_weights",
            state,
            gradient,
            self._hyper(step, scale),
            weights=True,
            moments=False,
        )

    def step_moments(
        self, state: BlockState, gradient: torch.Tensor, *, step: int, scale: float
    ) -> None:
        """The rest of `step`, with the same arguments; at any time before the block's next
        update."""
        name = "adamw_moments_bf16" if gradient.dtype == torch.bfloat16 else "adamw_moments_fp32"
        self._run(name, state, gradient, self._hyper(step, scale), weights=False, moments=True)

    def _run(
        self,
        name: str,
        state: BlockState,
        gradient: torch.Tensor,
        hyper: _Hyper,
        *,
        weights: bool,
        moments: bool,
    ) -> None:
        assert gradient.numel() == state.weight.numel()
        assert gradient.dtype == state.weight.dtype
        if self._native is None:
            _torch_step(state, gradient, hyper, weights=weights, moments=moments)
            return
        master = [state.weight, state.extra] if weights else []
        tensors = [t for t in (*master, state.exp_avg, state.exp_avg_sq, gradient) if t is not None]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        kernel = getattr(self._native, name)
        kernel(
            ctypes.c_int64(gradient.numel()),
            *pointers,
            ctypes.byref(hyper),
            ctypes.c_int(self.num_threads),
        )

    def device_step(
        self, state: BlockState, gradient: torch.Tensor, *, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """The same update where `state` lives on a device, without a host synchronisation.

        hyper: `hyper_tensor` of the step, there; scale: fp32, 0-dim, there, and NaN where no step
        must be taken.
        """
        update = _compiled_update() if gradient.device.type == "cuda" else _device_update
        update(state.weight, state.extra, state.exp_avg, state.exp_avg_sq, gradient, hyper, scale)

    def hyper_tensor(self, step: int) -> torch.Tensor:
        """The step's constants as an fp32 host tensor, in the order of struct Hyper without its
        scale."""
        hyper = self._hyper(step, 1.0)
        return torch.tensor([getattr(hyper, name) for name in HYPER[:-1]], dtype=torch.float32)

    def _hyper(self, step: int, scale: float) -> _Hyper:
        r, lr = self.recipe, self.recipe.lr_at(step)
        return _Hyper(
            decay=1 - lr * r.weight_decay,
            beta1_rest=1 - r.beta1,
            beta2=r.beta2,
            beta2_rest=1 - r.beta2,
            step_size=lr / (1 - r.beta1 ** (step + 1)),
            root_bias2=1 / math.sqrt(1 - r.beta2 ** (step + 1)),
            eps=r.eps,
            scale=scale,
        )


def _master_of(state: BlockState) -> str:
    """Which of the kernels suits the kind of master that `state` holds."""
    if state.extra is None:
        return "bf16" if state.weight.dtype == torch.bfloat16 else "plain"
    return "split" if state.extra.dtype == torch.int16 else "master"


def _torch_step(
    state: BlockState, gradient: torch.Tensor, h: _Hyper, *, weights: bool, moments: bool
) -> None:
    for start in range(0, gradient.numel(), FALLBACK_CHUNK):
        part = slice(start, start + FALLBACK_CHUNK)
        g = gradient[part].float() * h.scale
        m, v = state.exp_avg[part], state.exp_avg_sq[part]
        m1 = m + (g - m) * h.beta1_rest
        v1 = v * h.beta2 + (g * g) * h.beta2_rest
        if weights:
            extra = None if state.extra is None else state.extra[part]
            p = read_master(state.weight[part], extra) * h.decay
            # Through float64, which rounds to the IEEE fp32 root: torch's own fp32 root may be one
            # ulp off.
            root = v1.double().sqrt().float()
            write_master(
                p - h.step_size * (m1 / (root * h.root_bias2 + h.eps)), state.weight[part], extra
            )
        if moments:
            m.copy_(m1)
            v.copy_(v1)


def _device_update(
    weight: torch.Tensor,
    extra: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    hyper: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    decay, beta1_rest, beta2, beta2_rest, step_size, root_bias2, eps = hyper.unbind()
    take = torch.isfinite(scale)
    g = gradient.float() * scale
    p = read_master(weight, extra)
    m = exp_avg + (g - exp_avg) * beta1_rest
    v = exp_avg_sq * beta2 + (g * g) * beta2_rest
    root = v.sqrt() if v.is_cuda else v.double().sqrt().float()  # as in _torch_step
    updated = p * decay - step_size * (m / (root * root_bias2 + eps))
    write_master(torch.where(take, updated, p), weight, extra)
    exp_avg.copy_(torch.where(take, m, exp_avg))
    exp_avg_sq.copy_(torch.where(take, v, exp_avg_sq))


@cache
def _compiled_update() -> Callable[..., None]:
    """One fused kernel for blocks of any length."""
    compiled: Callable[..., None] = torch.compile(_device_update, dynamic=True)
    return compiled


def read_master(weight: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    """The master in fp32: itself where it is held so, otherwise a new tensor."""
    if extra is None:
        return weight.float()
    if extra.dtype == torch.float32:
        return extra
    return ((weight.view(torch.int16).int() << 16) + extra.int()).view(torch.float32)


def write_master(master: torch.Tensor, weight: torch.Tensor, extra: torch.Tensor | None) -> None:
    """Store an fp32 master; the bf16 weight is it rounded to nearest (ties away from zero, or to
    even without `extra`), as in csrc/adamw.cpp."""
    if extra is None:
        weight.copy_(master)
        return
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(high)
    extra.copy_(master if extra.dtype == torch.float32 else bits - (high << 16))
