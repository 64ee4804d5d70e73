"""Products of the layers in float8: operands are scaled to its range as they are met, tensor by
tensor.

Weights, gradients, activations and the fp32 master stay what they are; nothing is remembered from
one product to the next. The recipe is torchao's `tensorwise`: activations and weights as e4m3,
gradients as e5m2, sums in fp32, in the forward with the tensor cores' fast accumulation. Invariant:
no scale is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from engine.config import RefusedError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Every side of a product must be a multiple of it, or the device has no kernel."""
LEAST = 1e-12
"""The largest element of a tensor is taken to be at least that, so that zeros have a scale."""
ROUTERS = {"gate", "router"}
"""What models call the module that chooses experts, or a part of it."""
CAPABILITY = (8, 9)
"""Of the first NVIDIA GPUs that multiply float8."""
Scaled = tuple[torch.Tensor, torch.Tensor]
"""A float8 tensor, and what it is to be multiplied by, fp32 and 0-dim."""


class Float8Linear(nn.Linear):
    """A linear layer of bfloat16 whose three products, of a forward and a backward, are in
    float8."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        flat = input.reshape(-1, self.in_features)
        product: torch.Tensor = _Product.apply(flat, self.weight)  # type: ignore[no-untyped-call]
        output = product.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def use_float8(layers: Iterable[nn.Module]) -> int:
    """Have the modules of these layers that can multiply in float8 do so; how many parameters they
    have. RefusedError where there is none."""
    found = [
        module
        for layer in layers
        for path, module in layer.named_modules()
        if multiplies_in_float8(module, path)
    ]
    if not found:
        raise RefusedError(
            "system.products: got float8, allowed where layers have linear modules whose sides are "
            f"multiples of {MULTIPLE}; set system.products=plain"
        )
    for module in found:
        module.__class__ = Float8Linear
    return sum(module.weight.numel() for module in found)


def multiplies_in_float8(module: nn.Module, path: str) -> bool:
    """Whether the module, at that path in its layer, is a linear one whose sides are multiples of
    16. A router is not: which expert is taken hangs on what float8 rounds."""
    if type(module) is not nn.Linear or ROUTERS & set(path.split(".")):
        return False
    return not any(side % MULTIPLE for side in module.weight.shape)


def require_float8(
    dtype: torch.dtype, device: torch.device, num_tokens: int, *, chunk: int = 0
) -> None:
    """RefusedError where there are no such products. num_tokens: those that a layer is given; its
    MLP takes `chunk` of them at a time, 0 all."""
    if dtype != torch.bfloat16:
        raise RefusedError(
            f"system.products: got float8 with system.dtype={str(dtype).removeprefix('torch.')}, "
            "allowed with bfloat16; change one of them"
        )
    odd = next((num for num in (num_tokens, chunk) if num % MULTIPLE), None)
    if odd is not None:
        raise RefusedError(
            f"system.products: got float8 with {odd} tokens in a product, allowed a multiple of "
            f"{MULTIPLE}; change the shape or set system.products=plain"
        )
    here = device.type == "cuda" and torch.cuda.is_available()  # or a plan for elsewhere
    if here and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise RefusedError(
            f"system.products: got float8, allowed from compute capability 8.9 on, which "
            f"{torch.cuda.get_device_name(device)} lacks; set system.products=plain"
        )


class _Product(torch.autograd.Function):
    """hidden [tokens, in] times the transpose of weight [out, in]."""

    @staticmethod
    def forward(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _times(_scaled(hidden, E4M3), _scaled(weight, E4M3), fast=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        grad = _scaled(grads[0], E5M2)
        grad_hidden = _times(grad, _turned(_scaled(weight, E4M3)))
        grad_weight = _times(_turned(grad), _turned(_scaled(hidden, E4M3)))
        return grad_hidden, grad_weight


def _scaled(tensor: torch.Tensor, dtype: torch.dtype) -> Scaled:
    """The tensor in float8, row by row in memory, its largest element the largest there."""
    tensor, most = tensor.contiguous(), torch.finfo(dtype).max
    # in float64, or compiled code would round the quotient otherwise
    scale = (most / tensor.abs().amax().double().clamp(min=LEAST)).float()
    return (tensor.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def _turned(scaled: Scaled) -> Scaled:
    """Its transpose, in memory too."""
    return scaled[0].t().contiguous(), scaled[1]


def _times(first: Scaled, second: Scaled, *, fast: bool = False) -> torch.Tensor:
    """first [m, k] times the transpose of second [n, k], as bfloat16."""
    product: torch.Tensor = torch._scaled_mm(
        first[0],
        second[0].t(),
        scale_a=first[1],
        scale_b=second[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product
