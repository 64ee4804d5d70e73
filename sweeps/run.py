"""The Hydra entry: composes cells, has each measured, reports. Launchers, sweepers and --multirun work unchanged.

Invariant: every cell of a sweep is composed and checked before the first one runs, its system's own options too; a sweep over
measure.repeat goes in rounds, one repeat of everything after the other; what a user can get wrong ends in one line on stderr and
exit code 2 (HYDRA_FULL_ERROR=1 shows the traceback).

    python -m sweeps.run +experiment=quickstart                     # what `make bench` runs
    python -m sweeps.run system=megatrain system.depth=3
    python -m sweeps.run --multirun system=megatrain system.depth=1,2,3 shape=quick
    python -m sweeps.run +tune=zero3                                # sweeps/tuner.py
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
import psutil
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from sweeps import auto, forecast, study, tuner
from sweeps.command_line import mend_streams
from sweeps.config import Cell
from sweeps.errors import USER_ERRORS, one_line, overrides_in, parse


def _process_began() -> float:
    try:
        return time.monotonic() - (time.time() - psutil.Process().create_time())
    except (psutil.Error, OSError):  # no /proc
        return time.monotonic()


REPEAT = "measure.repeat"
SYSTEMS = auto.CONF / "system"
PLANNED: list[Cell] = []
"""The cells of this command, in order; empty in a process that a launcher started, and under other sweepers."""
FORECAST = forecast.Forecast([], {})
"""Of PLANNED."""
STARTED = _process_began()
"""When this process began, on time.monotonic's clock: what a time limit counts from."""
LATE: list[Cell] = []
"""Cells that the time limit left out or stopped."""
MOST_CELLS = 1000
"""Composing takes a quarter of a second a cell."""
TOLD_JOBS = 100
"""Sweeps of more cells say that they are being composed."""
UNFINISHED = 75
"""Exit code where there are some, for a script that gives the command again: EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line asks for."""

    cells: list[Cell] | None = None
    """Every cell, validated, in order; None where Hydra only shows something, empty where only the sweeper knows."""
    argv: list[str] = field(default_factory=list)
    """What Hydra is to be given instead."""
    tune: str | None = None
    """The search asked for; its one cell is where it starts."""
    system: str = ""
    """The file of conf/system that the search starts from."""


def command_of(argv: Sequence[str]) -> Command:
    """The command that `argv` (without the program's name) stands for, everything in it validated.

    ValueError or Hydra's own errors for what is wrong with it.
    """
    args, argv = _parsed(argv)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return Command(argv=argv)
    tuner.require(args.overrides)
    extra = [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"] if args.config_dir else []
    name = args.config_name or "config"
    with initialize_config_dir(str(args.config_path or auto.CONF), version_base="1.3"):
        parsed = parse(args.overrides)
        fixed = [item.input_line for item in parsed if not item.is_sweep_override()]
        base = compose(name, [*fixed, *extra], return_hydra_config=True)
        if not args.multirun and base.hydra.mode != RunMode.MULTIRUN:
            swept = len(fixed) < len(parsed)  # which composing refuses
            alone = compose(name, [*args.overrides, *extra]) if swept else _without_hydra(base)
            return Command(cells=[study.compose_cell(alone)], argv=argv)
        tune = base.hydra.runtime.choices.get("tune")
        if base.get("time_limit_s") is not None and not ((tune or _basic(base.hydra.sweeper)) and _basic(base.hydra.launcher)):
            raise ValueError(
                f"time_limit_s: got {base.time_limit_s}, allowed null with any sweeper or launcher but Hydra's own and a search's "
                "(+tune=NAME); leave it out"
            )
        system = str(base.hydra.runtime.choices["system"])
        if tune:
            tuner.require_trials(base.hydra.sweeper)
            HydraConfig.instance().set_config(base)  # the study is called after hydra:runtime.choices.system
            start = study.compose_cell(compose(name, [*fixed, *extra]))
            return Command(cells=[start], argv=argv, tune=tune, system=system)
        if not _basic(base.hydra.sweeper):
            return Command(cells=[], argv=argv)
        overrides = [*(f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()), *args.overrides]
        if any(override.startswith(f"{REPEAT}=") for override in overrides):
            overrides = in_rounds(overrides)
            argv = [*argv[: -len(args.overrides) or None], *overrides, "hydra.sweeper.params=null"]
        batch = base.hydra.sweeper.max_batch_size
        if batch is not None and batch < 1:
            raise ValueError(f"hydra.sweeper.max_batch_size: got {batch}, allowed null or >= 1; leave it out")
        _require_countable(parse(overrides))
        jobs = BasicSweeper.split_arguments(parse(overrides), None)[0]
        if len(jobs) > TOLD_JOBS:
            print(f"{base.experiment}: composing {len(jobs)} cells, {0.25 * len(jobs):.0f} s or more", flush=True)
        first = study.compose_cell(compose(name, [*jobs[0], *extra])).measure
        # Composing takes a quarter of a second a job, which those left out are spared.
        kept = [job for job in jobs if not left_out(_repeat(job) or first.repeat, first.repeated, _value(job, "system") or system)]
        if not kept:
            repeated = list(first.repeated)
            raise ValueError(
                f"measure.repeated: got {repeated}, which leaves no cell of this sweep, allowed one of its systems; add it"
            )
        return Command(cells=[study.compose_cell(compose(name, [*job, *extra])) for job in kept], argv=argv)


def _without_hydra(composed: DictConfig) -> DictConfig:
    """The job's part of a composed config, as `compose` gives it on its own."""
    alone = composed.copy()
    with open_dict(alone):
        del alone["hydra"]
    return alone


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line as Hydra reads it, and in the order that Hydra takes: flags first. ValueError, one line."""
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(list(argv))
    if args.experimental_rerun:
        _refuse_flag(f"--experimental-rerun {args.experimental_rerun}, which would load a pickle")
    if args.package and not args.cfg:
        _refuse_flag(f"--package {args.package} without --cfg")
    for flag, folder in (("--config-dir", args.config_dir), ("--config-path", args.config_path)):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"{flag}: got {folder!r}, allowed a folder of YAML files; correct it")
    return args, [*(item for item in argv if item not in args.overrides), *args.overrides]


def _require_countable(parsed: Sequence[Any]) -> None:
    """ValueError, one line, for a sweep over nothing, or over more cells than anybody means to measure."""
    num_cells = 1
    for item in parsed:
        if not item.is_sweep_override():
            continue
        given = f"{item.key_or_group}: got {item.get_value_string()}"
        if not item.is_discrete_sweep():
            raise ValueError(f"{given}, allowed values that can be counted; give them one by one, or by range(...)")
        try:
            length = len(list(islice(item.sweep_string_iterator(), MOST_CELLS + 1)))
        except (IndexError, ValueError):  # Hydra's, for a range that runs away from its end or stands still
            length = 0
        if not length:
            raise ValueError(f"{given}, which is no value at all, allowed one or more; correct it")
        num_cells *= length
        if num_cells > MOST_CELLS:
            raise ValueError(f"{given}, which makes more than {MOST_CELLS} cells, allowed as many in one command; split the sweep")


def _basic(plugin: DictConfig) -> bool:
    """Whether a sweeper or launcher is Hydra's own, which runs the jobs in this process and in order."""
    return str(plugin._target_).rpartition(".")[2] in ("BasicSweeper", "BasicLauncher")


def in_rounds(overrides: Sequence[str]) -> list[str]:
    """One override a key, the last, where the key first stood; a sweep over measure.repeat before all: the first varies slowest."""
    last = {override.partition("=")[0]: override for override in overrides}
    first = [last.pop(REPEAT)] if REPEAT in last else []
    return [*first, *last.values()]


def left_out(repeat: int, repeated: Sequence[str], choice: str | None) -> bool:
    """Whether a further repeat is not meant for this system (measure.repeated); `choice` is its file in conf/system."""
    paths = [path for path in SYSTEMS.rglob("*.yaml") if path.parent.name != "common"]
    files = sorted(str(path.relative_to(SYSTEMS).with_suffix("")) for path in paths)
    for system in repeated:
        if system not in files:
            raise ValueError(f"measure.repeated: got {system!r}, allowed {', '.join(files)}; choose among these")
    return repeat > 1 and bool(repeated) and choice not in repeated


def _value(job: Sequence[str], key: str) -> str | None:
    """What a job's overrides say of `key`."""
    return next((item.partition("=")[2] for item in reversed(job) if item.startswith(f"{key}=")), None)


def _repeat(job: Sequence[str]) -> int | None:
    """A job's own repeat; None where it names none, or something that composing it refuses."""
    value = _value(job, REPEAT) or ""
    return int(value) if value.isdecimal() else None


def _refuse_flag(message: str) -> NoReturn:
    raise ValueError(f"command line: got {message}, allowed key=value and Hydra's own flags; see python -m sweeps.run --help")


def _label(cell: Cell) -> str:
    hashes = [planned.hash for planned in PLANNED]
    if cell.hash in hashes:
        told = FORECAST.names.get(cell.hash)
        return f"[{hashes.index(cell.hash) + 1}/{len(hashes)}]{f' {told},' if told else ''}"
    config = HydraConfig.get()
    return f"[{int(config.job.num) + 1 if config.mode == RunMode.MULTIRUN else 1}]"


@hydra.main(config_path=str(auto.CONF), config_name="config", version_base="1.3")
def _job(cfg: DictConfig) -> float:
    """Tokens/s, which a search maximises: 0 without a number."""
    choices = HydraConfig.get().runtime.choices
    try:
        cell = study.compose_cell(cfg)
        if left_out(cell.measure.repeat, cell.measure.repeated, choices.get("system")):
            return 0.0
        limit_s, deadline = cell.time_limit_s, _deadline(cell.time_limit_s)
        if limit_s and (why := FORECAST.too_long(cell, deadline - time.monotonic(), limit_s)):
            if not (choices.get("tune") and LATE):  # the sampler asks for all of its trials
                print(f"{_label(cell)} {cell.system}: not begun: {why}", flush=True)
            LATE.append(cell)
            return 0.0
        with FORECAST.watching(cell), _truthful(cell):
            row = study.run_cell(tuner.pruned(cell) if choices.get("tune") else cell, _label(cell), deadline)
        return row.tokens_per_s or 0.0
    except study.TimeIsUpError:
        _time_is_up(cell)
        return 0.0
    except USER_ERRORS as error:
        if _full_error():
            raise
        if choices.get("tune") and isinstance(error, ValueError):  # two knobs that do not go together
            print(f"refused: {one_line(error)}", flush=True)
            return 0.0
        fail(error)  # SystemExit passes Hydra, which would run the other jobs before it raised this


def _deadline(limit_s: float | None) -> float:
    """When this command's time is up, on time.monotonic's clock."""
    return STARTED + (limit_s or math.inf)


def _time_is_up(cell: Cell) -> None:
    LATE.append(cell)
    print("  stopped, no row: time_limit_s is up; the same command goes on (raise it if this was the first cell)", flush=True)


def _begin(start: Cell) -> bool:
    """Measure the cell that a search starts from; whether there is anything to search."""
    try:
        with _truthful(start):
            return study.run_cell(start, "default,", _deadline(start.time_limit_s)).status != "unsupported"
    except study.TimeIsUpError:
        _time_is_up(start)
        return False


@contextmanager
def _truthful(cell: Cell) -> Iterator[None]:
    """An interrupt here says what became of the cell: its row may be there, and W&B not fed yet."""
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        yield
    except KeyboardInterrupt:
        row = study.latest(cell)
        there = row is not None and (row.started_at >= began or study.stands(cell))
        told = "the cell's row is there" if there else "the running cell was stopped and has no row"
        raise KeyboardInterrupt(told) from None


def _finish(command: Command) -> int:
    """Report what there is; the exit code, were it not for the time limit."""
    try:
        if command.tune:
            return tuner.finish(PLANNED[0], command.system)
        return study.finish(PLANNED) if PLANNED else 0
    except KeyboardInterrupt:
        raise KeyboardInterrupt("every row is there, the report was not finished") from None


def _full_error() -> bool:
    return os.environ.get("MEGATRAIN_FULL_ERROR") == "1"


def _require_report() -> None:
    """ValueError, one line, where the report after the last cell could not be made."""
    for package in ("matplotlib", "pandas", "rich", "scipy", "tabulate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"command line: got no package {package}, allowed with it, for the report; run pip install -e .")


def fail(error: BaseException) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(one_line(error, overrides_in(sys.argv[1:])), file=sys.stderr, flush=True)
    sys.exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Validate, run, report; the exit code is 0 when at least one cell has its number, UNFINISHED where time was up first."""
    global FORECAST
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        os.environ["MEGATRAIN_FULL_ERROR"] = "1"
    mend_streams()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands us its errors instead of printing them
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGINT, _interrupt)
    auto.register()
    try:
        _require_report()
        command = command_of(sys.argv[1:])
        PLANNED[:] = command.cells or []
        limit_s = next((cell.time_limit_s for cell in PLANNED), None)
        if len(PLANNED) > 1:
            print(f"{PLANNED[0].experiment}: looking at {len(PLANNED)} cells", flush=True)
        predicted = study.check(PLANNED, max(1.0, _deadline(limit_s) - time.monotonic()))
        FORECAST = forecast.announce(PLANNED, predicted)
        sys.argv[1:] = command.argv
        if not command.tune or _begin(PLANNED[0]):
            _job()
        code = _finish(command)
        return UNFINISHED if LATE else code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if _full_error():
            raise
        fail(error)
    except KeyboardInterrupt as interrupt:
        told = str(interrupt) or "no cell was running"
        print(f"interrupted: {told}; run the same command again to go on", file=sys.stderr)
        return 130
    finally:
        for folder in {cell.output_dir for cell in PLANNED}:
            with contextlib.suppress(OSError):  # what it is about has been said
                study.tidy(folder)


if __name__ == "__main__":
    sys.exit(main())
