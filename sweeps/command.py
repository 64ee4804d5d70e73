"""What a command line asks for: every cell of it, composed and validated before the first one runs.

Invariant: nothing is measured here, and what a user can get wrong is an error of one line. A sweep
over measure.repeat goes in rounds, one repeat of everything after the other.

The cells are composed through Hydra's Compose API, and a sweep is the product of its overrides, in
order, as Hydra's own sweeper has it. This is no Sweeper plugin for three reasons: Hydra takes
plugins from a top-level package `hydra_plugins` alone; a single cell has no sweeper and a search
has Optuna's, so a plugin would be a third way beside both; and a plugin's launcher composes every
cell a second time. Whatever Hydra must do itself is left to it (`Command.by_hydra`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from sweeps import auto, tuner
from sweeps.cluster import Submission, fields_of, kind_of
from sweeps.config import Cell, cell_from
from sweeps.errors import parse
from sweeps.text import stream_of

REPEAT = "measure.repeat"
SYSTEMS = auto.CONF / "system"
MOST_CELLS = 1000
"""Composing takes a quarter of a second a cell."""
MANY_CELLS = 100
"""Sweeps of more cells say that they are being composed."""
OURS = ("hydra.mode", "hydra.sweeper.params", "hydra.sweeper.max_batch_size")
"""Settings of Hydra that a sweep here follows; with any other one Hydra runs the cells."""
LAUNCHER = ("hydra/launcher=", "hydra.launcher.")
"""How an override begins that says where a command runs, and not what."""
GPUS = "process.num_gpus="
SWITCHES = (
    ("--help", "-h"),
    ("--hydra-help",),
    ("--resolve",),
    ("--run", "-r"),
    ("--multirun", "-m"),
    ("--shell-completion", "-sc"),
)
VALUED = (
    ("--package", "-p"),
    ("--config-path", "-cp"),
    ("--config-name", "-cn"),
    ("--config-dir", "-cd"),
    ("--experimental-rerun",),
)
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Hydra's flags, as its manual lists them."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line asks for."""

    cells: list[Cell] = field(default_factory=list)
    """Every cell, validated, in order; none where Hydra shows something or its sweeper chooses."""
    by_hydra: bool = False
    """Whether Hydra shows something, or runs the cells with another launcher or sweeper."""
    argv: list[str] = field(default_factory=list)
    """What Hydra is to be given then: flags first, sweeps in rounds."""
    tune: str | None = None
    """The search asked for; its one cell is where it starts."""
    system: str = ""
    """The file of conf/system that the search starts from."""
    submission: Submission | None = None
    """The job that the command is to be, where a cluster's launcher is asked for."""


def command_of(argv: Sequence[str]) -> Command:
    """The command that `argv` (without the program's name) stands for.

    ValueError or Hydra's own errors for what is wrong with it.
    """
    args, argv = _parsed(argv)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return Command(argv=argv, by_hydra=True)
    tuner.require(args.overrides)
    folder = str(args.config_path or auto.CONF)
    with initialize_config_dir(folder, version_base="1.3"):
        return _composed(args, argv)


def _composed(args: argparse.Namespace, argv: list[str]) -> Command:
    """The command, where Hydra is initialised."""
    added = args.config_dir and os.path.abspath(args.config_dir)
    extra = [f"hydra.searchpath=[file://{added}]"] if added else []
    name = args.config_name or "config"
    parsed = parse(args.overrides)
    fixed = [item.input_line for item in parsed if not item.is_sweep_override()]
    base = compose(name, [*fixed, *extra], return_hydra_config=True)
    if kind := kind_of(base.hydra.launcher):
        return _submitted(kind, base, args, argv)
    by_hydra = any(_is_hydra_s(item.key_or_group) for item in parsed)
    if not args.multirun and base.hydra.mode != RunMode.MULTIRUN:
        swept = len(fixed) < len(parsed)  # which composing refuses
        alone = compose(name, [*args.overrides, *extra]) if swept else _without_hydra(base)
        cell = compose_cell(alone)
        system = str(base.hydra.runtime.choices["system"])
        _require_some([cell] if not left_out(cell, system) else [], cell)
        return Command(cells=[cell], argv=argv, by_hydra=by_hydra)
    tune = base.hydra.runtime.choices.get("tune")
    own_launcher, own_sweeper = _is_basic(base.hydra.launcher), _is_basic(base.hydra.sweeper)
    if base.get("time_limit_s") is not None and not ((tune or own_sweeper) and own_launcher):
        raise ValueError(
            f"time_limit_s: got {base.time_limit_s}, allowed null with any sweeper or launcher but "
            "Hydra's own and a search's (+tune=NAME); leave it out"
        )
    if tune:
        tuner.require_trials(base.hydra.sweeper)
        HydraConfig.instance().set_config(base)  # the study is called after runtime.choices.system
        start = compose_cell(compose(name, [*fixed, *extra]))
        system = str(base.hydra.runtime.choices["system"])
        return Command(cells=[start], argv=argv, by_hydra=True, tune=tune, system=system)
    if not own_sweeper:
        return Command(argv=argv, by_hydra=True)
    overrides, argv = _in_order(base.hydra.sweeper, args.overrides, argv)
    cells = _swept(name, overrides, extra, base)
    said = any(item.lstrip("+~").startswith(("model=", "model.")) for item in overrides)
    own_model = base.model.get("name") == "auto" and not said
    if own_model and len({cell.model.name for cell in cells}) > 1:
        only = auto.smallest(cells, base.model)  # it fits every cell: one study compares one model
        cells = _swept(name, [*overrides, only], extra, base)
        argv = [*argv, only]
    return Command(cells=cells, argv=argv, by_hydra=by_hydra or not own_launcher)


def _submitted(kind: str, base: DictConfig, args: argparse.Namespace, argv: list[str]) -> Command:
    """The same command as a job, its cells checked here already, as far as they can be: a machine
    that jobs are submitted on may have no GPU."""
    launcher = fields_of(base.hydra.launcher, base.machine.host_bytes)
    args.overrides = [item for item in args.overrides if not item.lstrip("+").startswith(LAUNCHER)]
    argv = [item for item in argv if not item.lstrip("+").startswith(LAUNCHER)]
    if not torch.cuda.is_available():
        args.overrides = [item for item in args.overrides if not item.startswith(GPUS)]
    command = _composed(args, argv)
    submission = Submission(
        kind=kind,
        launcher=launcher,
        argv=argv,
        rows=list(dict.fromkeys(cell.rows_path for cell in command.cells)),
    )
    if base.get("time_limit_s") is None and command.cells:
        argv.append(f"time_limit_s={submission.limit_s:.0f}")
    return replace(command, submission=submission)


def compose_cell(cfg: DictConfig) -> Cell:
    """The validated cell of a composed config, the text's digest filled in. ValueError, one
    line."""
    plain = auto.resolve(cfg)
    cell = cell_from(plain)
    plain["data"]["digest"] = stream_of(cell).digest  # lazy: it refuses, and makes no batch
    return cell_from(plain)


def _without_hydra(composed: DictConfig) -> DictConfig:
    """The job's part of a composed config, as `compose` gives it on its own."""
    alone = composed.copy()
    with open_dict(alone):
        del alone["hydra"]
    return alone


class _Flags(argparse.ArgumentParser):
    """Hydra's flags; ValueError, one line, for any other."""

    def error(self, message: str) -> NoReturn:
        _refuse_flag(message)


def _flags() -> _Flags:
    parser = _Flags(add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=INFO)
    for names in SWITCHES:
        parser.add_argument(*names, action="store_true")
    for names in VALUED:
        parser.add_argument(*names)
    return parser


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags and overrides, and both in the order that Hydra takes: flags first."""
    args = _flags().parse_intermixed_args(list(argv))
    if args.experimental_rerun:
        _refuse_flag(f"--experimental-rerun {args.experimental_rerun}, which would load a pickle")
    if args.package and not args.cfg:
        _refuse_flag(f"--package {args.package} without --cfg")
    if args.run and args.multirun:
        _refuse_flag("--run and --multirun")
    for flag, folder in (("--config-dir", args.config_dir), ("--config-path", args.config_path)):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"{flag}: got {folder!r}, allowed a folder of YAML files; correct it")
    return args, [*(item for item in argv if item not in args.overrides), *args.overrides]


def _refuse_flag(message: str) -> NoReturn:
    raise ValueError(
        f"command line: got {message}, allowed key=value and Hydra's own flags; see python -m "
        "sweeps.run --help"
    )


def _is_hydra_s(key: str) -> bool:
    """Whether an override asks of Hydra what only Hydra does: a folder, a variable, a callback."""
    return key.startswith("hydra") and not any(key.startswith(ours) for ours in OURS)


def _is_basic(plugin: DictConfig) -> bool:
    """Whether a sweeper or launcher is Hydra's own, which runs the cells here and in order."""
    return str(plugin._target_).rpartition(".")[2] in ("BasicSweeper", "BasicLauncher")


def _in_order(
    sweeper: DictConfig, given: Sequence[str], argv: list[str]
) -> tuple[list[str], list[str]]:
    """The overrides of a sweep, those of its files before those given, and Hydra's arguments."""
    batch = sweeper.max_batch_size
    if batch is not None and batch < 1:
        raise ValueError(
            f"hydra.sweeper.max_batch_size: got {batch}, allowed null or >= 1; leave it out"
        )
    overrides = [*(f"{key}={value}" for key, value in (sweeper.params or {}).items()), *given]
    if not any(override.startswith(f"{REPEAT}=") for override in overrides):
        return overrides, argv
    overrides = in_rounds(overrides)
    flags = argv[: len(argv) - len(given)]
    return overrides, [*flags, *overrides, "hydra.sweeper.params=null"]


def in_rounds(overrides: Sequence[str]) -> list[str]:
    """One override a key, the last, where the key first stood; a sweep over measure.repeat first.

    The first override varies slowest.
    """
    last = {override.partition("=")[0]: override for override in overrides}
    first = [last.pop(REPEAT)] if REPEAT in last else []
    return [*first, *last.values()]


def _swept(
    name: str, overrides: Sequence[str], extra: Sequence[str], base: DictConfig
) -> list[Cell]:
    """The cells of a sweep, but those that measure.repeated leaves out."""
    parsed = parse(overrides)
    _require_countable(parsed)
    jobs = _jobs(parsed)
    if len(jobs) > MANY_CELLS:
        seconds = f"{0.25 * len(jobs):.0f} s or more"
        print(f"{base.experiment}: composing {len(jobs)} cells, {seconds}", flush=True)
    first = compose_cell(compose(name, [*jobs[0], *extra]))
    system = str(base.hydra.runtime.choices["system"])
    # Composing takes a quarter of a second a job, which those left out are spared.
    kept = [
        job for job in jobs if not left_out(first, _value(job, "system") or system, _repeat(job))
    ]
    _require_some(kept, first)
    return [compose_cell(compose(name, [*job, *extra])) for job in kept]


def _jobs(parsed: Sequence[Any]) -> list[tuple[str, ...]]:
    """The overrides of every cell: the product of what they sweep over, the last varying
    fastest."""
    choices: dict[str, list[str]] = {}
    for item in parsed:
        key = item.get_key_element()
        swept = item.is_sweep_override()
        values = item.sweep_string_iterator() if swept else [item.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    return list(product(*choices.values()))


def _require_countable(parsed: Sequence[Any]) -> None:
    """ValueError for a sweep over nothing, or over more cells than anybody means to measure."""
    num_cells = 1
    for item in parsed:
        if not item.is_sweep_override():
            continue
        given = f"{item.key_or_group}: got {item.get_value_string()}"
        if not item.is_discrete_sweep():
            allowed = "values that can be counted; give them one by one, or by range(...)"
            raise ValueError(f"{given}, allowed {allowed}")
        try:
            length = len(list(islice(item.sweep_string_iterator(), MOST_CELLS + 1)))
        except (IndexError, ValueError):  # Hydra's, for a range that runs away or stands still
            length = 0
        if not length:
            raise ValueError(f"{given}, which is no value at all, allowed one or more; correct it")
        num_cells *= length
        if num_cells > MOST_CELLS:
            raise ValueError(
                f"{given}, which makes more than {MOST_CELLS} cells, allowed as many in one "
                "command; split the sweep"
            )


def _require_some(kept: Sequence[Any], cell: Cell) -> None:
    if not kept:
        raise ValueError(
            f"measure.repeated: got {list(cell.measure.repeated)}, which leaves no cell of this "
            "sweep, allowed one of its systems; add it"
        )


def left_out(cell: Cell, choice: str | None, repeat: int | None = None) -> bool:
    """Whether a further repeat is not meant for a system (measure.repeated).

    choice: the system's file in conf/system. repeat: the cell's own where it is None.
    """
    repeated, number = cell.measure.repeated, repeat or cell.measure.repeat
    paths = [path for path in SYSTEMS.rglob("*.yaml") if path.parent.name != "common"]
    files = sorted(str(path.relative_to(SYSTEMS).with_suffix("")) for path in paths)
    for system in repeated:
        if system not in files:
            allowed = ", ".join(files)
            raise ValueError(
                f"measure.repeated: got {system!r}, allowed {allowed}; choose among these"
            )
    return number > 1 and bool(repeated) and choice not in repeated


def _value(job: Sequence[str], key: str) -> str | None:
    """What a job's overrides say of `key`."""
    found = (item.partition("=")[2] for item in reversed(job) if item.startswith(f"{key}="))
    return next(found, None)


def _repeat(job: Sequence[str]) -> int | None:
    """A job's own repeat; None where it names none, or something that composing it refuses."""
    value = _value(job, REPEAT) or ""
    return int(value) if value.isdecimal() else None
