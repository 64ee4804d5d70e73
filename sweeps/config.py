"""One cell's configuration: the composed Hydra config as plain, validated, frozen values.

Invariant: a DictConfig never leaves sweeps, and a cell's identity covers everything that can change
its measurement and nothing else. What a user mistyped is a ValueError of one line: config path,
what it got, what is allowed, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from baselines.registry import require_known, require_ranked
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import Recipe
from sweeps import checks
from sweeps.groups import Data, Logging, Machine, Measure, Process
from sweeps.identity import (
    IMPLEMENTATION,
    PATHS,
    RETIRED,
    current,
    digest,
    flat,
    hashed,
    identity,
)
from sweeps.memory import host_bytes

OWN_MICRO_BATCHES = "num_micro_batches"
"""Knob that any system's group may add (+system.num_micro_batches=N): it replaces
shape.num_micro_batches, for the best value differs from system to system. 0 replaces nothing."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One composed config: everything needed to train and time one system once."""

    experiment: str
    seed: int
    output_dir: Path
    system: str
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The system's own knobs: the rest of the system group."""
    implementation: str | None = None
    """MODULE:CLASS of a system that is not built in (system.implementation)."""
    time_limit_s: float | None = None
    """Seconds that the whole command may take; None is no limit."""
    process: Process
    model: ModelSpec
    shape: Shape
    recipe: Recipe
    data: Data
    measure: Measure
    logging: Logging
    machine: Machine
    config: Mapping[str, Any]
    """The plain composed config that the fields above were read from."""

    @property
    def rows_path(self) -> Path:
        """The JSONL file that this cell's row is appended to."""
        return self.output_dir / "rows.jsonl"

    @property
    def hash(self) -> str:
        """What rows, logs and messages call the cell: a digest of its settings and their label."""
        return digest(hashed(self.config))

    @property
    def identity(self) -> str:
        """What the cell is known by: the same without the label, which changes no measurement."""
        return identity(self.config)

    def spec(self) -> SystemSpec:
        """What the system is built from."""
        return SystemSpec(
            model=self.model,
            shape=self.shape,
            recipe=self.recipe,
            dtype=DTYPES[self.dtype],
            device=torch.device(self.machine.device),
            host_memory=self.machine.host_bytes or host_bytes(),
            device_memory=self.machine.device_bytes,
            num_ranks=self.process.num_ranks,
            packed=bool(self.data.paths),
            options={**self.options, **self._given()},
            implementation=self.implementation,
        )

    def _given(self) -> dict[str, Any]:
        """Options that stand in other groups: a path of the machine, the threads of the process."""
        threads = self.process.omp_num_threads
        given = {"num_threads": threads} if threads and self.system == "megatrain" else {}
        paths = [name for name, systems in PATHS.items() if self.system in systems]
        return given | {name: getattr(self.machine, name) or None for name in paths}


def cell_from(recorded: Mapping[str, Any]) -> Cell:
    """The cell of a plain composed config, or of the config of a row of any age.

    `recorded` has its device and total_steps settled. ValueError, one line, for what is wrong.
    """
    config = current(recorded)
    _check_groups(config)
    system = dict(config["system"])
    _refuse_old_names(system)
    name, dtype = str(system.pop("name", None)), str(system.pop("dtype", None))
    implementation = system.pop(IMPLEMENTATION, None)
    require_known(name, implementation)
    checks.allow("system.dtype", dtype, tuple(DTYPES))
    num_micro_batches = checks.count(
        f"system.{OWN_MICRO_BATCHES}", system.pop(OWN_MICRO_BATCHES, 0)
    )
    preset = system.get("preset")
    if not isinstance(preset, (str, type(None))):
        raise ValueError(
            f"system.preset: got {preset!r}, allowed null or text; write '\"{preset}\"'"
        )
    cell = Cell(
        experiment=checks.text("experiment", config["experiment"]),
        seed=checks.seed_of(config["seed"]),
        output_dir=checks.folder("output_dir", config["output_dir"]),
        system=name,
        dtype=dtype,
        options=system,
        implementation=implementation,
        time_limit_s=checks.limit("time_limit_s", config.get("time_limit_s")),
        process=checks.build_group(Process, "process", config),
        model=_model(config),
        shape=_shape(config, num_micro_batches),
        recipe=_recipe(config),
        data=checks.build_group(Data, "data", config),
        measure=checks.build_group(Measure, "measure", config),
        logging=checks.build_group(Logging, "logging", config),
        machine=checks.build_group(Machine, "machine", config),
        config=recorded,
    )
    _check_text(cell)
    _check_ranks(cell)
    return cell


def _check_groups(config: Mapping[str, Any]) -> None:
    """ValueError, one line, for a group that is missing or unknown, or a number that is none."""
    known = {item.name for item in fields(Cell)} - {"dtype", "options", "config", IMPLEMENTATION}
    checks.require("", config, sorted(known - {"time_limit_s"}))  # a row's config has no limit
    for group in config:
        if group not in known:
            allowed = ", ".join(sorted(known))
            raise ValueError(
                f"{group}: got {config[group]!r}, allowed {allowed}; remove it or correct its name"
            )
    for path, value in flat(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}: got {value}, allowed a finite number; correct it")
    checks.require("system.", config["system"], ())


def _check_text(cell: Cell) -> None:
    """ValueError, one line, where the model cannot take the bytes or the length of the text, or the
    text has no questions."""
    if cell.measure.exact_match and cell.data.prompt_field is None:
        raise ValueError(
            f"measure.exact_match: got {cell.measure.exact_match}, allowed with questions and "
            "answers; give data=text, data.files, data.prompt_field and data.answer_field"
        )
    longest = cell.model.config.get("max_position_embeddings")
    if isinstance(longest, int) and cell.shape.seq_len > longest:
        raise ValueError(
            f"shape.seq_len: got {cell.shape.seq_len}, allowed 1 to {longest} "
            f"(model.config.max_position_embeddings of {cell.model.name}); "
            "shorten the sequences or choose a model with a longer context"
        )
    vocab = cell.model.config.get("vocab_size")
    if isinstance(vocab, int) and vocab < 256:
        raise ValueError(
            f"model.config.vocab_size: got {vocab}, allowed >= 256; the text is bytes, so it needs "
            "256 tokens"
        )


def _check_ranks(cell: Cell) -> None:
    """ValueError, one line, for a number of ranks that the device, the system or the step does not
    divide into."""
    on_gpu, num = cell.machine.device == "cuda", cell.process.num_ranks
    own, other = ("num_gpus", "num_cpu_ranks") if on_gpu else ("num_cpu_ranks", "num_gpus")
    if (got := getattr(cell.process, other)) > 1:
        raise ValueError(
            f"process.{other}: got {got}, allowed 1 with machine.device={cell.machine.device}; "
            f"give process.{own}"
        )
    require_ranked(cell.system, f"process.{own}", num)
    rows = cell.shape.micro_batch_size
    if rows % num:
        raise ValueError(
            f"process.{own}: got {num}, allowed a divisor of the {rows} sequences of a micro-batch "
            "(shape.batch_size / num_micro_batches); change one of them"
        )
    if cell.measure.save and cell.measure.steps_per_window < 2:
        raise ValueError(
            "measure.save: got true with measure.steps_per_window=1, allowed with 2 or more, for "
            "the first step after a state shows its weights and the second its moments; raise it"
        )
    if num > 1 and cell.measure.save and cell.system != "megatrain":
        raise ValueError(
            f"measure.save: got true with process.{own}={num}, allowed with one process or with "
            f"system megatrain, for several of {cell.system} write no state; leave one of them out"
        )


def _shape(config: Mapping[str, Any], num_micro_batches: int) -> Shape:
    """The shape, cut into the micro-batches that its system asks for, if it asks."""
    shape = checks.build_group(Shape, "shape", config)
    if not num_micro_batches:
        return shape
    if shape.batch_size % num_micro_batches:
        raise ValueError(
            f"system.num_micro_batches: got {num_micro_batches}, allowed a divisor of "
            f"shape.batch_size ({shape.batch_size}); change one of the two"
        )
    return replace(shape, num_micro_batches=num_micro_batches)


def _refuse_old_names(system: Mapping[str, Any]) -> None:
    """ValueError, one line, for a knob of a system that has another name now, or is gone."""
    gone = RETIRED.get(str(system.get("name")), {})
    for name, value in system.items():
        checks.refuse_moved(f"system.{name}", value)
        if name in gone:
            allowed = f"nothing, for it always was {gone[name]}"
            raise ValueError(f"system.{name}: got {value!r}, allowed {allowed}; leave it out")


def _model(config: Mapping[str, Any]) -> ModelSpec:
    """A model with a name and a config, or the library's default would be trained."""
    spec = checks.build_group(ModelSpec, "model", config)
    checks.text("model.name", spec.name)
    if not spec.config and spec.checkpoint is None:
        raise ValueError(
            f"model.config: got nothing, allowed the config of {spec.name}; do not delete it "
            "(~model.config)"
        )
    return spec


def _recipe(config: Mapping[str, Any]) -> Recipe:
    recipe = checks.build_group(Recipe, "recipe", config)
    checks.at_least("recipe.total_steps", recipe.total_steps, 1)
    return recipe
