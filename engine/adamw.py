"""AdamW over a block in host memory, in one pass or with the moments later, and the exact
global-norm clipping scale.

Formula: decoupled weight decay, Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, with bias
correction as in torch.optim.AdamW. Invariant: the native kernel (csrc/adamw.cpp) and the torch
fallback give the same bits, and `step` the same in one pass as in two. A ctypes call releases the
GIL.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch

from engine.kernel import native
from engine.master import BlockState, read_master, write_master
from engine.recipe import Recipe

FALLBACK_CHUNK = 1 << 18
"""Elements a fallback pass handles at a time, so that its temporaries stay in cache."""
TUNED_ON = 1 << 24
"""Elements of the block on which the device's update is tuned: enough to keep a GPU busy."""
HYPER = ("decay", "beta1_rest", "beta2", "beta2_rest", "step_size", "root_bias2", "eps", "scale")


class _Hyper(ctypes.Structure):
    """Mirrors struct Hyper of csrc/adamw.cpp."""

    _fields_ = tuple((name, ctypes.c_float) for name in HYPER)


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


class Pass(Enum):
    """What of an update is taken: all of it in one pass; what the next forward needs, which is
    master and weight; or the moments, with the same arguments, at any time before the block's next
    update."""

    BOTH = "both"
    WEIGHTS = "weights"
    MOMENTS = "moments"


class AdamW:
    """Applies one optimizer step to one block at a time."""

    def __init__(self, recipe: Recipe, *, num_threads: int, use_native: bool = True) -> None:
        """use_native: false takes torch instead of the kernel, slower. Raises KernelError where
        there is no kernel."""
        self.recipe = recipe
        self.num_threads = max(1, num_threads)
        self._native = native() if use_native else None

    def step(
        self,
        state: BlockState,
        gradient: torch.Tensor,
        *,
        step: int,
        scale: float,
        taken: Pass = Pass.BOTH,
        decays: bool = True,
    ) -> None:
        """Update `state` in place. gradient: 1-D, bf16 or fp32 as the weight; step counts from 0;
        scale multiplies it; decays: whether the weights do."""
        assert gradient.numel() == state.weight.numel()
        assert gradient.dtype == state.weight.dtype
        hyper = self._hyper(step, scale, decays)
        if self._native is None:
            _torch_step(state, gradient, hyper, taken)
            return
        master = [] if taken is Pass.MOMENTS else [state.weight, state.extra]
        tensors = [t for t in (*master, state.exp_avg, state.exp_avg_sq, gradient) if t is not None]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        kernel = getattr(self._native, _kernel(state, taken))
        threads, numel = ctypes.c_int(self.num_threads), ctypes.c_int64(gradient.numel())
        kernel(numel, *pointers, ctypes.byref(hyper), threads)

    def device_step(
        self, state: BlockState, gradient: torch.Tensor, *, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """The same update where `state` lives on a device, without a host synchronisation.

        hyper: `hyper_tensor` of the step, there; scale: fp32, 0-dim, there, and NaN where no step
        must be taken.
        """
        update = _compiled_update() if gradient.device.type == "cuda" else _device_update
        update(state.weight, state.extra, state.exp_avg, state.exp_avg_sq, gradient, hyper, scale)

    @torch.no_grad()
    def prepare(self, like: BlockState) -> None:
        """Compile and tune `device_step` on a small block of the dtypes and the device of `like`.

        The compiler's tuning copies to pinned host memory what a kernel changes. In the first step
        that would be a whole block: 9 GB for a vocabulary's embedding (docs/log.md, 156).
        """
        weight = like.weight.new_zeros(TUNED_ON)
        extra = None if like.extra is None else like.extra.new_zeros(TUNED_ON)
        moments = [like.exp_avg.new_zeros(TUNED_ON) for _ in range(2)]
        hyper = self.hyper_tensor(0).to(weight.device)
        self.device_step(
            BlockState(weight=weight, extra=extra, exp_avg=moments[0], exp_avg_sq=moments[1]),
            torch.zeros_like(weight),
            hyper=hyper,
            scale=hyper.new_ones(()),
        )

    def hyper_tensor(self, step: int, *, decays: bool = True) -> torch.Tensor:
        """The step's constants as an fp32 host tensor, in the order of struct Hyper without its
        scale."""
        hyper = self._hyper(step, 1.0, decays)
        return torch.tensor([getattr(hyper, name) for name in HYPER[:-1]], dtype=torch.float32)

    def _hyper(self, step: int, scale: float, decays: bool) -> _Hyper:
        r, lr = self.recipe, self.recipe.lr_at(step)
        return _Hyper(
            decay=1 - lr * r.weight_decay if decays else 1.0,
            beta1_rest=1 - r.beta1,
            beta2=r.beta2,
            beta2_rest=1 - r.beta2,
            step_size=lr / (1 - r.beta1 ** (step + 1)),
            root_bias2=1 / math.sqrt(1 - r.beta2 ** (step + 1)),
            eps=r.eps,
            scale=scale,
        )


def _kernel(state: BlockState, taken: Pass) -> str:
    """The function of csrc/adamw.cpp that suits the kind of master that `state` holds."""
    bf16 = state.weight.dtype == torch.bfloat16
    if taken is Pass.MOMENTS:
        return "adamw_moments_bf16" if bf16 else "adamw_moments_fp32"
    if state.extra is None:
        kernel = "adamw_bf16" if bf16 else "adamw_plain"
    else:
        kernel = "adamw_split" if state.extra.dtype == torch.int16 else "adamw_master"
    return kernel if taken is Pass.BOTH else f"{kernel}_weights"


def _torch_step(state: BlockState, gradient: torch.Tensor, hyper: _Hyper, taken: Pass) -> None:
    constants = [getattr(hyper, name) for name in HYPER[:-1]]
    for start in range(0, gradient.numel(), FALLBACK_CHUNK):
        chunk = slice(start, start + FALLBACK_CHUNK)
        part, g = state.part(chunk), gradient[chunk].float() * hyper.scale
        m, v = part.exp_avg, part.exp_avg_sq
        p1, m1, v1 = _updated(read_master(part.weight, part.extra), m, v, g, constants)
        if taken is not Pass.MOMENTS:
            write_master(p1, part.weight, part.extra)
        if taken is not Pass.WEIGHTS:
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
    take, p, g = torch.isfinite(scale), read_master(weight, extra), gradient.float() * scale
    p1, m1, v1 = _updated(p, exp_avg, exp_avg_sq, g, hyper.unbind())
    write_master(torch.where(take, p1, p), weight, extra)
    exp_avg.copy_(torch.where(take, m1, exp_avg))
    exp_avg_sq.copy_(torch.where(take, v1, exp_avg_sq))


def _updated(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, constants: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Master, first and second moment after one update by the gradient `g`."""
    decay, beta1_rest, beta2, beta2_rest, step_size, root_bias2, eps = constants
    m1 = m + (g - m) * beta1_rest
    v1 = v * beta2 + (g * g) * beta2_rest
    # On the CPU through float64: torch's own fp32 root may be one ulp off the IEEE root.
    root = v1.sqrt() if v1.is_cuda else v1.double().sqrt().float()
    return p * decay - step_size * (m1 / (root * root_bias2 + eps)), m1, v1


@cache
def _compiled_update() -> Callable[..., None]:
    """One fused kernel for blocks of any length."""
    compiled: Callable[..., None] = torch.compile(_device_update, dynamic=True)
    return compiled
