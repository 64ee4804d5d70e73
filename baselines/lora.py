"""Lora and QLora: small adapters trained beside frozen weights, through peft; all on one device.

Invariant: the function that is trained is another than the other systems', so the caveat says it
and nothing ranks it; `parameters()` yields the weights with their adapters merged into them.
Clipping, AdamW and the verdict on a step are those of `in_memory`, on the adapters alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from baselines import footprint
from baselines.in_memory import InMemory
from baselines.loss import loss_of
from baselines.model import build_skeleton, count_params, decoder_layers, materialise
from baselines.options import CommonOptions, at_least
from baselines.rival import FiniteFlag, adamw_settings
from baselines.system import SystemSpec, Unsupported
from engine import Plan, dtype_name

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A quantised weight, its share of the scale of 64, and of the scale of 256 of these scales."""
BLOCK = 64
"""Weights with one scale. bitsandbytes 0.50 reads other rows wrongly on the CPU."""
SEED = 0
"""Of the adapters' initial values, which no seed of the weights should change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraOptions(CommonOptions):
    """Options of `Lora` and `QLora`."""

    rank: int = 16
    """Columns of an adapter's first matrix."""
    alpha: int = 32
    """An adapter's output is scaled by alpha / rank."""
    lr_times: int = at_least(1, 10)
    """The adapters' learning rate over the recipe's: they start from nothing, and need more."""


class Lora(InMemory):
    """peft's LoRA on every linear layer of the decoder. Unsupported where peft is missing."""

    options_class = LoraOptions
    options: LoraOptions
    packages: tuple[str, ...] = ("peft",)

    def __init__(self, spec: SystemSpec) -> None:
        recipe = spec.recipe
        super().__init__(spec)
        lr = recipe.lr * self.options.lr_times
        self.spec = dataclasses.replace(spec, recipe=dataclasses.replace(recipe, lr=lr))
        self.caveat = (
            f"trains adapters of rank {self.options.rank} beside frozen weights, another function "
            f"than the others, at {self.options.lr_times} times the recipe's learning rate"
        )
        lacking = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if lacking:
            raise Unsupported(f"{lacking[0]} is not installed; pip install 'megatrain-bench[lora]'")

    def dtypes(self) -> dict[str, str]:
        """Masters, moments and gradients are the adapters'."""
        return super().dtypes() | {"weights": f"{self._base_dtype()}, frozen"}

    def _base_dtype(self) -> str:
        return dtype_name(self.spec.dtype)

    def plan(self) -> Plan:
        """Closed-form bytes: the frozen weights, and 16 a parameter of the adapters."""
        model = build_skeleton(self.spec.model, torch.bfloat16)
        shapes = [module.weight.shape for module in _linear(model).values()]
        adapted = sum(rows * columns for rows, columns in shapes)
        trained = self.options.rank * sum(rows + columns for rows, columns in shapes)
        device = {
            "weights": self._weight_bytes(count_params(self.spec.model).total, adapted),
            "master": 4 * trained,
            "moments": 8 * trained,
            "gradients": 4 * trained,
            **footprint.activation_bytes(self.spec, self.options),
        }
        return footprint.plan_on(self.spec.device, device, {})

    def _weight_bytes(self, total: int, adapted: int) -> int:
        return self.spec.dtype.itemsize * total

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the frozen weights, put the adapters beside them and make their optimizer."""
        from peft import LoraConfig, inject_adapter_in_model

        spec, options = self.spec, self.options
        model = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
        model.requires_grad_(False)
        self._prepare(model)
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=0.0,
            target_modules=list(_linear(model)),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            inject_adapter_in_model(config, model)
        for param in model.parameters():
            if param.requires_grad:  # peft makes them in the dtype of the weight beside them
                param.data = param.data.float()
        model.to(spec.device)
        self.loss = loss_of(model, options)
        if spec.dtype != torch.float32:  # fp32 adapters, whose products are not in fp32
            autocast = torch.autocast(spec.device.type, dtype=spec.dtype)
            self.loss.__dict__["forward"] = autocast(self.loss.forward)
        self._params = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._masters = self._params
        self._optimizer = torch.optim.AdamW(
            self._params.values(), **adamw_settings(spec.recipe), fused=True
        )
        self._flag = FiniteFlag(spec.device)

    def _prepare(self, model: nn.Module) -> None:
        """Change the frozen weights before there are adapters."""

    @torch.no_grad()
    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor on the host) of every parameter of the model, adapters merged."""
        from peft.tuners.lora import LoraLayer

        assert self.loss is not None, "setup comes first"
        model: Any = self.loss.model
        adapted: dict[str, Any] = {
            f"{name}.base_layer.weight": module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        for name, param in model.named_parameters():
            if name in self._params:
                continue
            value = self._whole(param)
            if name in adapted:
                value = value + adapted[name].get_delta_weight("default").float()
            yield name.replace(".base_layer.", "."), value.to("cpu", copy=True)

    def _whole(self, param: torch.Tensor) -> torch.Tensor:
        return param.detach().float()


class QLora(Lora):
    """LoRA beside weights of four bits (nf4, scales quantised too). Unsupported where bitsandbytes
    is missing or cannot."""

    packages = ("peft", "bitsandbytes")

    def _base_dtype(self) -> str:
        return "nf4"

    def _weight_bytes(self, total: int, adapted: int) -> int:
        kept = self.spec.dtype.itemsize * (total - adapted)
        return kept + int(NF4_BYTES * adapted)

    def _prepare(self, model: nn.Module) -> None:
        odd = [one.in_features for one in _linear(model).values() if one.in_features % BLOCK]
        if odd and self.spec.device.type == "cpu":
            raise Unsupported(
                f"bitsandbytes on the CPU reads rows of a multiple of {BLOCK} weights alone, and "
                f"{self.spec.model.name} has rows of {odd[0]}; leave qlora out here"
            )
        model.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft asks
        try:
            for name, module in _linear(model).items():
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, self._quantised(module))
        except (RuntimeError, NotImplementedError, ImportError) as error:
            why = " ".join(str(error).split())[:200]
            raise Unsupported(
                f"bitsandbytes cannot quantise on {self.spec.device.type} here ({why}); leave "
                "qlora out, or install another version of it"
            ) from None

    def _quantised(self, module: nn.Linear) -> nn.Module:
        import bitsandbytes

        library: Any = bitsandbytes.nn
        frozen = library.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=self.spec.dtype,
            quant_type="nf4",
            device="meta",
        )
        frozen.weight = library.Params4bit(
            module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        frozen.bias = module.bias
        quantised: nn.Module = frozen.to(self.spec.device)
        return quantised

    def _whole(self, param: torch.Tensor) -> torch.Tensor:
        state = getattr(param, "quant_state", None)
        if state is None:
            return super()._whole(param)
        from bitsandbytes.functional import dequantize_4bit

        whole: torch.Tensor = dequantize_4bit(param.data, state)
        return whole.float()


def _linear(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers within the decoder's layers, by name."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
