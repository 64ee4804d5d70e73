"""Weights in and out: the parameters of a checkpoint as a system's initial weights, and a system's
parameters as a checkpoint again.

Invariant: which stored tensors make which parameter, and how, is what transformers says (its
`conversion_mapping`), in both directions. One parameter is alive at a time when reading, one file
and a parameter when writing.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import nn

from baselines.checkpoint_folder import (
    INDEX,
    WEIGHTS,
    BadCheckpointError,
    Stored,
    config_in,
    stored_in,
)
from baselines.model import build_skeleton, initial_weights
from baselines.system import ModelSpec
from engine import sync, whole_directory

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of stored parameters that training can start from."""
SHARD_BYTES = 5 * 10**9
GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
"""Files of a tokenizer, which go with the weights as they are."""
Read = Callable[[Stored], torch.Tensor]


def starting_weights(
    spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device
) -> Iterable[tuple[str, torch.Tensor]]:
    """What every system is set up with: `CheckpointWeights` of a model that has a checkpoint, else
    `initial_weights`. In `dtype`, for not every system can start from more bits than that."""
    if spec.checkpoint is not None:
        return CheckpointWeights(spec, dtype)
    return initial_weights(spec, seed, dtype, device)


def require_causal(spec: ModelSpec) -> None:
    """ValueError where the checkpoint is not of a causal language model of transformers."""
    from transformers.models.auto import modeling_auto

    assert spec.checkpoint is not None
    folder = Path(spec.checkpoint)
    config = config_in(folder)
    allowed: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"], ())
    allowed = (allowed,) if isinstance(allowed, str) else allowed
    found = config.get("architectures") or allowed
    if not set(found) & set(allowed):
        what = ", ".join(found) or f"model_type {config['model_type']}"
        raise BadCheckpointError(
            folder,
            f"which is of {what}",
            "a decoder-only causal language model of transformers such as LlamaForCausalLM",
            "choose another checkpoint",
        )


@dataclass(kw_only=True)
class _Group:
    """Stored tensors that become parameters together; one alone where none is converted."""

    name: str
    """Of the first parameter."""
    converter: Any = None
    """WeightConverter of transformers, None where the tensor is the parameter."""
    sources: list[tuple[Stored, str | None]] = field(default_factory=list)
    """With the pattern of the converter that each matched."""


class CheckpointWeights:
    """Re-iterable (name, tensor) of every parameter of a checkpoint, a tied one once, named as
    `named_parameters` names it.

    On the CPU and in `dtype`; None is the dtype that each is stored in, so that a system that keeps
    an fp32 master has the checkpoint's own. ValueError, before any tensor is
    read, where the checkpoint has not exactly the model's parameters. The values are read again in
    every iteration: the folder must stay.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype | None = None) -> None:
        assert spec.checkpoint is not None
        self.dtype = dtype
        self.folder = Path(spec.checkpoint)
        require_causal(spec)
        stored = stored_in(self.folder)
        self._model = build_skeleton(spec, torch.float32)
        self._buffers = _persistent_buffers(self._model)
        names = {id(value): name for name, value in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        self._owner = {name: names[id(value)] for name, value in every}
        self._groups, extra = _groups(self._model, stored)
        self._require_exact(extra)
        self._require_ties()
        self._require_buffers()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        given = set()
        for group in self._groups:
            if self._owner.get(group.name) in given:  # the other copy of a tied parameter
                continue
            made = self._made(group, Stored.read)
            for name in list(made):
                if name in self._owner and self._owner[name] not in given:
                    given.add(self._owner[name])
                    value = made.pop(name)
                    yield self._owner[name], value.to(self.dtype or value.dtype)

    def _made(self, group: _Group, read: Read) -> dict[str, torch.Tensor]:
        """The parameters and buffers that a group becomes."""
        if group.converter is None:
            return {group.name: read(group.sources[0][0])}
        converter = copy.deepcopy(group.converter)
        for stored, pattern in group.sources:
            converter.add_tensor(group.name, stored.name, pattern, partial(read, stored))
        made = converter.convert(group.name, model=self._model, config=self._model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

    def _require_exact(self, extra: list[str]) -> None:
        """ValueError unless the stored tensors make all parameters and nothing else."""
        shapes = {name: value.shape for name, value in self._model.named_parameters()}
        missing = dict(shapes)
        for group in self._groups:
            for name, shape in self._shapes(group).items():
                own = self._owner.get(name)
                if own is None and name not in self._buffers:
                    extra.append(group.sources[0][0].name)
                elif own is not None:
                    missing.pop(own, None)
                    self._require_shape(name, shape, shapes[own])
        if missing:
            self._refuse(f"which lacks {_listed(missing)}", f"all {len(shapes)} parameters")
        if extra := _not_ignored(self._model, extra):
            self._refuse(
                f"which has {_listed(extra)} too", f"the model's {len(shapes)} parameters alone"
            )

    def _shapes(self, group: _Group) -> dict[str, torch.Size]:
        """Of what a group becomes. ValueError where it cannot, or is not of floating point."""
        for stored, _ in group.sources:
            if stored.dtype not in FLOATS and group.name in self._owner:
                self._refuse(f"whose {stored.name} is {stored.dtype}", " or ".join(FLOATS))
        try:
            return {name: value.shape for name, value in self._made(group, Stored.on_meta).items()}
        except Exception as error:
            names = _listed([stored.name for stored, _ in group.sources])
            self._refuse(
                f"whose {names} do not make {group.name} ({' '.join(str(error).split())[:200]})",
                "tensors that fit",
            )

    def _require_shape(self, name: str, got: torch.Size, allowed: torch.Size) -> None:
        if got != allowed:
            self._refuse(f"whose {name} is of shape {tuple(got)}", f"{tuple(allowed)}")

    def _require_ties(self) -> None:
        """ValueError where two stored copies of a tied parameter differ."""
        first: dict[str, Stored] = {}
        for group in self._groups:
            if group.converter is not None or group.name not in self._owner:
                continue
            mine = group.sources[0][0]
            other = first.setdefault(self._owner[group.name], mine)
            if other is not mine and not torch.equal(other.read(), mine.read()):
                self._refuse(
                    f"whose {other.name} and {mine.name} differ",
                    "one tensor, for they are tied",
                    "give +model.config.tie_word_embeddings=false",
                )

    def _require_buffers(self) -> None:
        """ValueError where a stored buffer is not what the model computes it to be: no system loads
        any."""
        for group in self._groups:
            own = self._buffers.get(group.name)
            if own is None or own.is_meta:
                continue
            value = self._made(group, Stored.read)[group.name]
            if not torch.equal(value.to(own.dtype), own):
                self._refuse(
                    f"whose {group.name} was trained and is no parameter",
                    "buffers that follow from the config, for no system loads others",
                    "choose another checkpoint",
                )

    def _refuse(self, got: str, allowed: str, remedy: str = "") -> NoReturn:
        raise BadCheckpointError(
            self.folder,
            got,
            allowed,
            remedy or "take config.json and the weights from one checkpoint, whole",
        )


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint has beside the parameters."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _groups(model: Any, stored: Mapping[str, Stored]) -> tuple[list[_Group], list[str]]:
    """What becomes what, by the rules that transformers loads with, and the names of tensors that
    become nothing."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, _Group] = {}
    extra = []
    for key in sorted(stored, key=dot_natural_key):  # experts are merged in this order
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        twice = name in groups and groups[name].converter is None
        if name not in known or twice:
            extra.append(key)
            continue
        converter = of_pattern[pattern] if pattern else None
        group = groups.setdefault(name, _Group(name=name, converter=converter))
        group.sources.append((stored[key], pattern))
    return list(groups.values()), extra


def _not_ignored(model: Any, names: Iterable[str]) -> list[str]:
    """Without the names that transformers ignores: buffers of older versions, heads of further
    tokens."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]


def _listed(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def export(
    parameters: Iterable[tuple[str, torch.Tensor]],
    spec: ModelSpec,
    directory: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what `from_pretrained` of transformers loads: the parameters in `dtype` as safetensors
    of at most `max_shard_bytes` each (or one tensor), their index, and the configs; beside them the
    tokenizer of the checkpoint that the model came from.

    parameters: as a system's `parameters()` yields them, in any order. ValueError where they are
    not the model's, or `directory` exists, which appears whole or not at all.
    """
    model = build_skeleton(spec, dtype)
    with whole_directory(directory) as folder:
        shards = _Shards(folder, max_shard_bytes)
        for name, value in _reverted(model, _checked(model, parameters, dtype)):
            shards.add(name, value)
        shards.finish()
        _write_configs(spec, type(model).__name__, dtype, folder)
        if spec.checkpoint is not None:
            _copy_tokenizer(Path(spec.checkpoint), folder)
        for path in (*folder.iterdir(), folder):
            sync(path)


def _checked(
    model: nn.Module, parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters in `dtype`, then the buffers; ValueError unless they are the model's, each
    once."""
    missing = {name: value.shape for name, value in model.named_parameters()}
    for name, value in parameters:
        if missing.pop(name, None) != value.shape:
            raise ValueError(
                f"export: got {name} of shape {tuple(value.shape)}, allowed each parameter of the "
                "model once; give a system's parameters()"
            )
        yield name, value.detach().to("cpu", dtype)
    if missing:
        raise ValueError(
            f"export: got no {_listed(missing)}, allowed all parameters of the model; give a "
            "system's parameters()"
        )
    for name, buffer in _persistent_buffers(model).items():
        if not buffer.is_meta:
            yield name, buffer


def _reverted(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, each as soon as all that it is made of is there."""
    from transformers.core_model_loading import revert_weight_conversion

    group_of = _reverse_groups(model)
    sizes = dict.fromkeys(group_of.values(), 0)
    for group in group_of.values():
        sizes[group] += 1
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors:
        group = group_of[name]
        waiting.setdefault(group, {})[name] = value
        if len(waiting[group]) == sizes[group]:
            yield from revert_weight_conversion(model, waiting.pop(group)).items()


def _reverse_groups(model: Any) -> dict[str, str]:
    """Name of each parameter and buffer -> the one that stands for all that are converted with
    it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    converters: Any = [
        rule.reverse_transform() for rule in rules if isinstance(rule, WeightConverter)
    ]
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, buffer in _persistent_buffers(model).items() if not buffer.is_meta]
    return {name: rename_source_key(name, [], converters)[0] for name in names}


class _Shards:
    """Files of safetensors, each written when the next tensor would make it too large."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._open: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []
        """Names of the tensors in each file."""
        self._total_bytes = self._total_numel = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, which is kept until its file is written."""
        held = sum(value.nbytes for value in self._open.values())
        if self._open and held + tensor.nbytes > self._limit:
            self._write()
        self._open[name] = tensor.contiguous()
        self._total_bytes += tensor.nbytes
        self._total_numel += tensor.numel()

    def _write(self) -> None:
        save_file(self._open, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._open))
        self._open = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.part"

    def finish(self) -> None:
        """Write what is left, and give all files their names."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self._folder / WEIGHTS)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        total = {"total_parameters": self._total_numel, "total_size": self._total_bytes}
        index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_configs(spec: ModelSpec, architecture: str, dtype: torch.dtype, folder: Path) -> None:
    """config.json, with the dropout that training leaves out, and generation_config.json: the
    checkpoint's, or what follows from the config."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.for_model(spec.model_type, **copy.deepcopy(dict(spec.config)))
    config.architectures = [architecture]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    given = spec.checkpoint and Path(spec.checkpoint) / GENERATION
    if given and given.is_file():
        shutil.copyfile(given, folder / GENERATION)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for path in sorted({path for pattern in TOKENIZER for path in source.glob(pattern)}):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
