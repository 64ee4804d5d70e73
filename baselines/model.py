"""The model of a `ModelSpec`, built from transformers: configuration, skeleton, initial weights.

Invariant: no other module builds a model of transformers, and every system starts from the
numbers of `initial_weights`, which depend on (spec, seed, device type) alone and are exact in
bfloat16, or from those of a checkpoint (`baselines.checkpoint`).
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from baselines.checkpoint_folder import config_in
from baselines.system import ModelSpec, Unsupported
from engine import RefusedError, document_numbers, find_layers, is_packed

LEGACY_ROPE = ("rope_theta", "rope_scaling")
"""Keys of transformers 4 that transformers 5 still turns into `rope_parameters`."""
HUGE = 1 << 24
"""Elements."""


def config_of(spec: ModelSpec) -> Any:
    """The transformers configuration: no KV cache, every dropout and jitter 0.

    ValueError, in one line, for what the user mistyped.
    """
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if spec.model_type not in causal:
        near = difflib.get_close_matches(spec.model_type, causal, n=3, cutoff=0.5)
        near = near or ["llama", "qwen2", "mistral"]
        raise ValueError(
            f"model.model_type: got {spec.model_type!r}, allowed the {len(causal)} causal-LM types "
            f"of transformers such as {', '.join(near)}; choose one of these or upgrade "
            "transformers"
        )
    known = _known_keys(AutoConfig.for_model(spec.model_type))
    if spec.checkpoint is not None:  # whose config.json may have keys that nothing reads
        known = sorted({*known, *config_in(Path(spec.checkpoint))})
    for key in spec.config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
            near = near or ["hidden_size", "num_hidden_layers", "vocab_size"]
            raise ValueError(
                f"model.config.{key}: got {spec.config[key]!r}, allowed the keys of the "
                f"{spec.model_type} config such as {', '.join(near)}; remove it or correct its name"
            )
    _check_attention(spec)
    try:
        config = AutoConfig.for_model(spec.model_type, **copy.deepcopy(dict(spec.config)))
    except Exception as error:
        strict = type(error).__name__.startswith("StrictDataclass")
        if not strict and not isinstance(error, (ValueError, TypeError, KeyError)):
            raise
        raise ValueError(
            f"model.config: got {dict(spec.config)}, allowed what the {spec.model_type} config "
            f"accepts; {_one_line(error)}"
        ) from None
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "model.config.output_router_logits: got True, allowed False; remove it, for every "
            "system's loss is the cross-entropy alone, without the auxiliary one of the routers"
        )
    config.use_cache = False
    for key, value in config.to_dict().items():
        random = any(part in key for part in ("dropout", "layerdrop", "jitter"))
        if (random or key.endswith("_pdrop")) and isinstance(value, (int, float)):
            setattr(config, key, 0.0)
    return config


def _known_keys(config: Any) -> list[str]:
    known = {
        *inspect.signature(type(config).__init__).parameters,
        *config.to_dict(),
        *config.attribute_map,
    }
    known -= {"self", "args", "kwargs", "model_type"}
    return sorted(known | set(LEGACY_ROPE) if "rope_parameters" in known else known)


def _check_attention(spec: ModelSpec) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    allowed = ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS if "|" not in name)]
    if spec.attn_implementation not in allowed:
        raise ValueError(
            f"model.attn_implementation: got {spec.attn_implementation!r}, allowed "
            f"{', '.join(allowed)}; choose one of these"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class _HugeOnMeta(TorchFunctionMode):
    """torch.empty makes a meta tensor of any matrix of HUGE elements: memory may be too small."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            alone = len(args) == 1 and isinstance(args[0], (tuple, list))
            size = kwargs.get("size") or (args[0] if alone else args)
            if len(size) >= 2 and math.prod(size) >= HUGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _large_parameters_on_meta() -> Iterator[None]:
    """Modules register matrices as meta tensors; ties stay one object."""
    register: Callable[..., None] = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.ndim >= 2:
            if not param.is_meta:
                on_meta = torch.empty_like(param, device="meta")
                param = nn.Parameter(on_meta, requires_grad=param.requires_grad)
            # Nothing to draw, which would be most of the time spent here.
            param._is_hf_initialized = True  # type: ignore[attr-defined]
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with _HugeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_skeleton(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """The library's own causal LM in `dtype`, in training mode; parameters of two or more
    dimensions on meta.

    One-dimensional parameters and all buffers (rotary frequencies stay fp32) are real, on the CPU,
    with the library's initial values. Raises Unsupported where the attention implementation is not
    installed.
    """
    from transformers import AutoModelForCausalLM

    config, from_config = config_of(spec), cast(Any, AutoModelForCausalLM.from_config)
    skip_packed_sequence_check()
    with torch.random.fork_rng(devices=[]), _large_parameters_on_meta():
        torch.manual_seed(0)
        try:
            model: nn.Module = from_config(
                config, dtype=dtype, attn_implementation=spec.attn_implementation
            )
        except ImportError as error:
            raise Unsupported(
                f"model.attn_implementation={spec.attn_implementation}: {_one_line(error)}"
            ) from None
        except ValueError as error:
            if "attention" not in str(error):
                raise
            raise ValueError(
                f"model.attn_implementation: got {spec.attn_implementation!r}, allowed what "
                f"{spec.model_type} supports (eager always is); choose another: {_one_line(error)}"
            ) from None
    model.train()
    return model


class _RandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def refuse_random(spec: ModelSpec) -> None:
    """ValueError where the model draws random numbers though every dropout and jitter is 0, as
    PhiMoE does.

    No two systems draw them in the same order. Runs the skeleton on the meta device, which has no
    numbers: a forward that looks at some ends there, and what it would have drawn later is not
    found.
    """
    key = repr((spec.model_type, spec.config, spec.attn_implementation))
    if drawn := _random_ops(_Asked(key, spec)):
        raise ValueError(
            f"model.model_type: got {spec.model_type!r}, whose forward draws random numbers "
            f"({drawn}), allowed are types that draw none with dropout and jitter at 0; choose "
            "another model_type"
        )


@dataclass(frozen=True)
class _Asked:
    """A model that is looked at once in a process, whatever it is called."""

    key: str
    spec: ModelSpec = field(compare=False)


@functools.lru_cache
def _random_ops(asked: _Asked) -> str:
    model = build_skeleton(asked.spec, torch.bfloat16).to("meta")
    with _RandomOps() as ops, torch.no_grad(), contextlib.suppress(Exception):
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device="meta"), use_cache=False)
    return ", ".join(sorted(ops.found))


def skip_packed_sequence_check() -> None:
    """Have transformers take our word for whether a batch packs several documents into a sequence.

    It would look for packing in the position ids of every forward without a mask, and read the
    answer on the host: one device synchronisation for every forward and every chunk of the loss, in
    every system.
    """
    from transformers import masking_utils

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = _documents


def _documents(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number of each token's document; None where none are packed."""
    return document_numbers(position_ids) if is_packed() else None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, found by the engine's rule; Unsupported where there are none."""
    return find_decoder(model)[1]


def find_decoder(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The name of the list of decoder layers in the model, and `decoder_layers`."""
    try:
        return find_layers(model)
    except RefusedError as error:
        raise Unsupported(str(error)) from None


class initial_weights:  # noqa: N801 - reads as the function it is: an iterable that can be walked again
    """Re-iterable (name, tensor) of every parameter, a tied one once, named as `named_parameters`
    names it.

    Two or more dimensions: normal(0, initializer_range) from a generator seeded by (seed, name), so
    a parameter's values do not depend on the others nor on the order; one dimension: the library's
    own value. All values are rounded to bfloat16 before the cast to `dtype`. One tensor is alive at
    a time. CPU and CUDA draw different numbers.
    """

    def __init__(
        self, spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.seed, self.dtype, self.device = seed, dtype, device
        skeleton = build_skeleton(spec, torch.float32)
        self.std = float(getattr(skeleton.config, "initializer_range", None) or 0.02)
        self.values = {name: param.detach() for name, param in skeleton.named_parameters()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self[name]) for name in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The parameter `name` alone: the same numbers as in the iteration."""
        value = self.values[name]
        if value.is_meta:
            digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            generator = torch.Generator(device=self.device).manual_seed(seed)
            value = torch.empty(value.shape, dtype=torch.float32, device=self.device)
            value.normal_(0.0, self.std, generator=generator)
        return value.to(self.device).to(torch.bfloat16).to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Numbers of parameters, tied ones counted once."""

    num_layers: int
    largest_layer: int
    in_layers: int
    outer: int
    """Embedding, final norm and head."""
    sizes: Sequence[int]
    """Elements of each parameter, in the model's order."""

    @property
    def largest(self) -> int:
        """Elements of the largest single parameter."""
        return max(self.sizes)

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.in_layers + self.outer

    @cached_property
    def per_layer(self) -> float:
        """Mean parameters of a decoder layer."""
        return self.in_layers / self.num_layers


@functools.lru_cache(maxsize=8)
def count_params(spec: ModelSpec) -> ParamCount:
    """Parameters by kind, from the skeleton: no memory at any size, and for the 48 layers of a 14B
    a tenth of a second, once: a plan asks often."""
    model = build_skeleton(spec, torch.bfloat16)
    layers = decoder_layers(model)
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    every = tuple(param.numel() for param in model.parameters())
    return ParamCount(
        num_layers=len(layers),
        largest_layer=max(sizes),
        in_layers=sum(sizes),
        outer=sum(every) - sum(sizes),
        sizes=every,
    )


def num_params(spec: ModelSpec) -> int:
    """Parameters of the whole model, tied ones once."""
    return count_params(spec).total


def materialise(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    weights: Iterable[tuple[str, torch.Tensor]],
) -> nn.Module:
    """The model in `dtype` on `device` with copies of `weights`; ties stay tied."""
    model = build_skeleton(spec, dtype)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((module, attribute))
    missing = dict(model.named_parameters())
    for name, value in weights:
        own = missing.pop(name, None)
        if own is None or own.shape != value.shape:
            raise ValueError(
                f"weights: got {name} of shape {tuple(value.shape)}, allowed the parameters of "
                f"{spec.name}; rebuild them"
            )
        copied = value.detach().to(device=device, dtype=dtype, copy=True)
        loaded = nn.Parameter(copied, own.requires_grad)
        for module, attribute in owners[own]:
            setattr(module, attribute, loaded)
    if missing:
        raise ValueError(
            f"weights: {', '.join(list(missing)[:3])} not given, allowed all parameters of "
            f"{spec.name}; rebuild them"
        )
    return model.to(device)
