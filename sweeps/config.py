"""One cell's configuration: the composed Hydra config as plain, validated, frozen values.

Invariant: a DictConfig never leaves sweeps, and a cell's identity covers everything that can change
its measurement and nothing else. What a user mistyped is a ValueError of one line: config path,
what it got, what is allowed, what to do.
"""

from __future__ import annotations

import math
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from baselines.registry import require_known, require_ranked
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import Recipe
from sweeps.identity import (
    IMPLEMENTATION,
    MOVED,
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
VALUED = (
    "--interleave",
    "--weighted-interleave",
    "--preferred",
    "--preferred-many",
    "--membind",
    "--cpunodebind",
    "--physcpubind",
)
"""Options of numactl(8) that bind a process and take a value, which is given as OPTION=NODES."""
FLAGS = ("--localalloc", "--balancing", "--all")
"""Options of numactl(8) that bind a process and take no value."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
T = TypeVar("T")
Files = str | Sequence[str]
Word = str | None
FIELDS = ("text_field", "chat_field", "prompt_field", "answer_field")
"""Fields of data that name a field of the files."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the training text comes from (conf/data)."""

    max_bytes: int = 1 << 25
    """Bytes of the standard library read at most."""
    heldout_fraction: float = 0.02
    digest: str = ""
    """Digest of the bytes, filled in when they are read. Another text is another cell."""
    files: Files = ()
    """One file or several (data=text); () is the standard library's sources."""
    tokenizer: Word = None
    """Folder of a tokenizer of transformers; None takes bytes."""
    text_field: Word = None
    """Field that holds a document; None is `text` where no other field is named."""
    chat_field: Word = None
    """Field that holds a conversation, as a list of messages."""
    prompt_field: Word = None
    answer_field: Word = None
    """Fields of a question and of its answer, on which alone the loss is taken."""

    def __post_init__(self) -> None:
        _at_least("data.max_bytes", self.max_bytes, 1 << 16)
        for name in ("files", "tokenizer", *FIELDS):
            _check_words(f"data.{name}", getattr(self, name), several=name == "files")
        self._check_fields()
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(
                f"data.heldout_fraction: got {self.heldout_fraction}, allowed 0 <= fraction < 1; "
                "0.02 is usual"
            )

    def _check_fields(self) -> None:
        """ValueError, one line, for fields that are read together by no kind of text."""
        if self.paths and self.max_bytes != Data.max_bytes:
            raise ValueError(
                f"data.max_bytes: got {self.max_bytes}, allowed without files alone; leave it out"
            )
        named = tuple(name for name in FIELDS if getattr(self, name) is not None)
        if (named or self.tokenizer is not None) and not self.paths:
            given = named[0] if named else "tokenizer"
            raise ValueError(
                f"data.{given}: got {getattr(self, given)!r}, allowed with files alone; choose "
                "data=text and give data.files"
            )
        if named and named not in (FIELDS[:1], FIELDS[1:2], FIELDS[2:]):
            raise ValueError(
                f"data.{named[0]}: got {' and '.join(named)}, allowed text_field alone, chat_field "
                "alone, or prompt_field with answer_field; leave the others out"
            )
        if self.chat_field is not None and self.tokenizer is None:
            raise ValueError(
                f"data.chat_field: got {self.chat_field!r} without a data.tokenizer, allowed with "
                "one that has a chat template; give data.tokenizer"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files; none is the standard library."""
        return (self.files,) if isinstance(self.files, str) else tuple(self.files)


def _check_words(path: str, value: Any, *, several: bool) -> None:
    """ValueError unless `value` is text that is not blank; or a list of it, or nothing."""
    if value == () or (value is None and not several):
        return
    words = value if several and isinstance(value, (list, tuple)) and value else [value]
    for word in words:
        if not isinstance(word, str) or not word.strip():
            allowed = "a path or a list of paths" if several else "text that is not blank, or null"
            raise ValueError(f"{path}: got {value!r}, allowed {allowed}; give {path}=...")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Which steps are timed (conf/measure)."""

    warmup_steps: int = 3
    windows: int = 3
    steps_per_window: int = 3
    trace: bool = False
    repeat: int = 1
    """Number of this repeat of the measurement; each repeat is a cell of its own."""
    repeated: Sequence[str] = ()
    """Files of conf/system that every repeat measures; the first repeat measures all. Empty: every
    repeat measures all."""
    stop_below: float = 0.0
    """Tokens/s. Where the first window is slower, it is the last. A search sets this."""
    save: bool = False
    """Whether a state is saved beside every window, which then has what that costs."""
    heldout_tokens: int = 0
    """Held-out tokens on which the trained parameters are evaluated after the measurement."""
    heldout_every_window: bool = False
    """Whether the system evaluates them too, before the first step and after every window."""

    exact_match: int = 0
    """Held-out questions that the plain model answers with the trained parameters afterwards."""
    answer_pattern: Word = None
    """Regular expression whose last match in an answer is what is compared; None compares all."""

    def __post_init__(self) -> None:
        _at_least("measure.repeat", self.repeat, 1)
        _at_least("measure.exact_match", self.exact_match, 0)
        self._check_pattern()
        if not self.stop_below >= 0:
            raise ValueError(
                f"measure.stop_below: got {self.stop_below}, allowed >= 0; 0 measures every window"
            )
        _at_least("measure.heldout_tokens", self.heldout_tokens, 0)
        if self.heldout_every_window and not self.heldout_tokens:
            raise ValueError(
                "measure.heldout_every_window: got true with measure.heldout_tokens=0, allowed "
                "with some; give measure.heldout_tokens"
            )
        _at_least("measure.warmup_steps", self.warmup_steps, 0)
        _at_least("measure.windows", self.windows, 1)
        _at_least("measure.steps_per_window", self.steps_per_window, 1)

    def _check_pattern(self) -> None:
        pattern = self.answer_pattern
        if pattern is None:
            return
        got = f"measure.answer_pattern: got {pattern!r}"
        if not self.exact_match:
            raise ValueError(f"{got}, allowed with measure.exact_match; give a number of questions")
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{got} ({error}), allowed a regular expression of Python; correct it"
            ) from None

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the cell, warm-up included."""
        return self.warmup_steps + self.windows * self.steps_per_window


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Where rows are mirrored to (conf/logging)."""

    wandb: str = "offline"
    project: str = "megatrain-bench"

    def __post_init__(self) -> None:
        _allow("logging.wandb", self.wandb, ("offline", "online", "disabled"))
        if not 1 <= len(self.project) <= 128 or set(self.project) & set("/\\#?%:"):
            raise ValueError(
                f"logging.project: got {self.project!r}, allowed 1 to 128 characters without / \\ "
                "# ? % :; correct it"
            )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to plan with. None asks the machine."""

    device: str = "cpu"
    host_bytes: int | None = None
    device_bytes: int | None = None
    checkout: str | None = None
    """Folder of a clone of the authors' MegaTrain code. Neither rows nor hashes have it."""
    nvme_path: str | None = None
    """Folder on a local disk, or for the engine several on as many disks, separated by colons. Rows
    and hashes have `drives` of it."""
    drives: str | None = None
    """What a row has in its place: a digest."""

    def __post_init__(self) -> None:
        _allow("machine.device", self.device, ("cpu", "cuda"))
        for name in ("host_bytes", "device_bytes"):
            if getattr(self, name) is not None:
                _at_least(f"machine.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Process:
    """How the processes that run a cell are started (conf/process)."""

    num_gpus: int = 1
    """GPUs, each with a process of its own; no row has other than 1 on the CPU."""
    num_cpu_ranks: int = 1
    """Processes without a GPU."""
    omp_num_threads: int = 0
    """OMP_NUM_THREADS, and the threads of the engine's AdamW; 0 leaves both to the machine."""
    numactl: str = ""
    """Arguments of numactl(8), which then starts the process; empty starts it directly."""
    huge_pages: bool = False
    """Whether torch asks for transparent huge pages for host memory that is not pinned."""
    timeout_s: float = 900.0
    """Seconds after which it is killed."""

    def __post_init__(self) -> None:
        _at_least("process.num_gpus", self.num_gpus, 1)
        _at_least("process.num_cpu_ranks", self.num_cpu_ranks, 1)
        _at_least("process.omp_num_threads", self.omp_num_threads, 0)
        require_numactl(tuple(self.numactl.split()))
        if not self.timeout_s > 0:
            raise ValueError(
                f"process.timeout_s: got {self.timeout_s}, allowed > 0; give the seconds that one "
                "cell may take"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that train together; one of the two numbers is 1."""
        return max(self.num_gpus, self.num_cpu_ranks)

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The command that starts the process; empty where it is started directly."""
        return ("numactl", *self.numactl.split()) if self.numactl.strip() else ()


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
    _allow("system.dtype", dtype, tuple(DTYPES))
    num_micro_batches = _count(f"system.{OWN_MICRO_BATCHES}", system.pop(OWN_MICRO_BATCHES, 0))
    preset = system.get("preset")
    if not isinstance(preset, (str, type(None))):
        raise ValueError(
            f"system.preset: got {preset!r}, allowed null or text; write '\"{preset}\"'"
        )
    cell = Cell(
        experiment=_text("experiment", config["experiment"]),
        seed=_seed(config["seed"]),
        output_dir=_folder("output_dir", config["output_dir"]),
        system=name,
        dtype=dtype,
        options=system,
        implementation=implementation,
        time_limit_s=_limit("time_limit_s", config.get("time_limit_s")),
        process=build_group(Process, "process", config),
        model=_model(config),
        shape=_shape(config, num_micro_batches),
        recipe=_recipe(config),
        data=build_group(Data, "data", config),
        measure=build_group(Measure, "measure", config),
        logging=build_group(Logging, "logging", config),
        machine=build_group(Machine, "machine", config),
        config=recorded,
    )
    _check_text(cell)
    _check_ranks(cell)
    return cell


def _check_groups(config: Mapping[str, Any]) -> None:
    """ValueError, one line, for a group that is missing or unknown, or a number that is none."""
    known = {item.name for item in fields(Cell)} - {"dtype", "options", "config", IMPLEMENTATION}
    require("", config, sorted(known - {"time_limit_s"}))  # a row's config has no limit
    for group in config:
        if group not in known:
            allowed = ", ".join(sorted(known))
            raise ValueError(
                f"{group}: got {config[group]!r}, allowed {allowed}; remove it or correct its name"
            )
    for path, value in flat(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}: got {value}, allowed a finite number; correct it")
    require("system.", config["system"], ())


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
    shape = build_group(Shape, "shape", config)
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
        _refuse_moved(f"system.{name}", value)
        if name in gone:
            allowed = f"nothing, for it always was {gone[name]}"
            raise ValueError(f"system.{name}: got {value!r}, allowed {allowed}; leave it out")


def _refuse_moved(path: str, value: Any) -> None:
    if path in MOVED:
        new = MOVED[path]
        raise ValueError(f"{path}: got {value!r}, allowed under another name; give {new}")


@lru_cache
def require_numactl(arguments: Sequence[str]) -> None:
    """ValueError, one line, for arguments that numactl(8) does not take on this machine."""
    if not arguments:
        return
    got = f"process.numactl: got {' '.join(arguments)!r}"
    for word in arguments:  # numactl would run what is no option as a command
        name, _, value = word.partition("=")
        if name not in (VALUED if value else FLAGS):
            allowed = ", ".join([*(f"{option}=NODES" for option in VALUED), *FLAGS])
            raise ValueError(f"{got}, where {word!r} is not allowed, only {allowed}; correct it")
    if shutil.which("numactl") is None:
        raise ValueError(
            f"{got}, allowed nothing where numactl is not installed; install it or leave it out"
        )
    command = ["numactl", *arguments, "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word why"])[0]
        raise ValueError(f"{got}, allowed what numactl(8) takes here ({said}); correct it")


def _text(path: str, value: Any) -> str:
    """Text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path}: got {value!r}, allowed text that is not blank; give a name")
    return value


def _folder(path: str, value: Any) -> Path:
    """A folder that exists, or that could be made, as far as its name tells."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}: got {value!r}, allowed a path; name a folder")
    try:
        kind = Path(value).stat().st_mode
    except FileNotFoundError:
        return Path(value)
    except (OSError, ValueError) as error:  # below a file, too long a name, a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{path}: got {value!r} ({why}), allowed a folder that can be made; choose another"
        ) from None
    if not stat.S_ISDIR(kind):
        raise ValueError(f"{path}: got {value!r}, which is no folder, allowed one; choose another")
    return Path(value)


def _seed(value: Any) -> int:
    """A seed that torch takes."""
    seed = _typed("seed", value, int)
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed: got {seed}, allowed 0 to 2^63 - 1; correct it")
    return seed


def _model(config: Mapping[str, Any]) -> ModelSpec:
    """A model with a name and a config, or the library's default would be trained."""
    spec = build_group(ModelSpec, "model", config)
    _text("model.name", spec.name)
    if not spec.config and spec.checkpoint is None:
        raise ValueError(
            f"model.config: got nothing, allowed the config of {spec.name}; do not delete it "
            "(~model.config)"
        )
    return spec


def _recipe(config: Mapping[str, Any]) -> Recipe:
    recipe = build_group(Recipe, "recipe", config)
    _at_least("recipe.total_steps", recipe.total_steps, 1)
    return recipe


def _limit(path: str, value: Any) -> float | None:
    """Seconds > 0, or None."""
    if value is not None and not _typed(path, value, float) > 0:
        raise ValueError(
            f"{path}: got {value!r}, allowed seconds > 0, or null for no limit; correct it"
        )
    return None if value is None else float(value)


def _count(path: str, value: Any) -> int:
    """An integer >= 0."""
    _at_least(path, count := _typed(path, value, int), 0)
    return count


def build_group(kind: type[T], group: str, config: Mapping[str, Any]) -> T:
    """`kind` from one group. ValueError, one line, for an unknown, missing or mistyped field."""
    require(f"{group}.", config[group], ())
    values = dict(config[group])
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known:
            _refuse_moved(f"{group}.{name}", value)
            raise ValueError(
                f"{group}.{name}: got {value!r}, allowed fields {', '.join(known)}; remove it or "
                "correct its name"
            )
        typed = _TYPES.get(str(known[name].type).split(" |")[0], object)
        values[name] = _typed(f"{group}.{name}", value, typed)
    require(f"{group}.", values, [name for name, item in known.items() if _is_required(item)])
    return kind(**values)


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def require(prefix: str, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """ValueError, one line, for a group or a field that is not there.

    On the command line `~name` takes one out, and so does a value in a group's place.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{prefix.rstrip('.')}: got {config!r}, allowed a group with fields; choose one of its "
            "options"
        )
    for name in names:
        if name not in config:
            path = f"{prefix}{name}"
            raise ValueError(f"{path}: got nothing, allowed a value; do not delete it (~{path})")


_TYPES: dict[str, type] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "Mapping[str, Any]": dict,
    "Sequence[str]": list,
}
"""What a field's annotation says -> the type that a value of it must have."""


def _typed(path: str, value: Any, kind: type[T]) -> T:
    """`value` as `kind`. An integer is a float too; None stands for what only the machine knows."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and number:
        return _float(path, value)  # type: ignore[return-value]
    if value is None and path.startswith("machine."):
        return value  # type: ignore[return-value]
    truth_for_number = isinstance(value, bool) and kind is not bool
    if kind in _TYPES.values() and (truth_for_number or not isinstance(value, kind)):
        name = kind.__name__
        raise ValueError(f"{path}: got {value!r}, allowed a value of type {name}; correct it")
    return value  # type: ignore[no-any-return]


def _float(path: str, value: int) -> float:
    if abs(value) > 1 << 1000:
        bits = value.bit_length()
        raise ValueError(
            f"{path}: got an integer of {bits} bits, allowed one that a float holds; correct it"
        )
    return float(value)


def _allow(path: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ValueError(f"{path}: got {got!r}, allowed {', '.join(allowed)}; choose one of these")


def _at_least(path: str, got: int, least: int) -> None:
    if got < least:
        raise ValueError(f"{path}: got {got}, allowed >= {least}; give a larger number")
