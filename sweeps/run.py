"""The Hydra entry: composes cells, has each measured, reports. Launchers, sweepers and --multirun work unchanged.

Invariant: every cell of a sweep is composed and checked before the first one runs, its system's own options too; what a
user can get wrong ends in one line on stderr and exit code 2 (HYDRA_FULL_ERROR=1 shows the traceback).

    python -m sweeps.run +experiment=quickstart                     # what `make bench` runs
    python -m sweeps.run system=megatrain system.depth=3
    python -m sweeps.run --multirun system=megatrain system.depth=1,2,3 shape=quick
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeps import auto, forecast, study
from sweeps.config import Cell
from sweeps.errors import USER_ERRORS, one_line, parse

PLANNED: list[Cell] = []
"""The cells of this command, in order; empty in a process that a launcher started, and under other sweepers."""
FORECAST = forecast.Forecast([], {})
"""Of PLANNED."""


def planned_cells(argv: Sequence[str]) -> list[Cell] | None:
    """Every cell that the command line asks for, validated; None where Hydra only shows something.

    Under a sweeper other than Hydra's basic one only the sweep knows its cells: then the list is empty.
    """
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    args = parser.parse_args(list(argv))
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion or args.experimental_rerun:
        return None
    extra = [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"] if args.config_dir else []
    name = args.config_name or "config"
    parsed = parse(args.overrides)
    with initialize_config_dir(str(args.config_path or auto.CONF), version_base="1.3"):
        fixed = [item.input_line for item in parsed if not item.is_sweep_override()]
        base = compose(name, [*fixed, *extra], return_hydra_config=True)
        if not args.multirun and base.hydra.mode != RunMode.MULTIRUN:
            return [study.compose_cell(compose(name, [*args.overrides, *extra]))]
        if not base.hydra.sweeper._target_.endswith("BasicSweeper"):
            return []
        params = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
        jobs = BasicSweeper.split_arguments(parse([*params, *args.overrides]), None)[0]
        return [study.compose_cell(compose(name, [*job, *extra])) for job in jobs]


def _refuse_flag(message: str) -> NoReturn:
    raise ValueError(f"command line: got {message}, allowed key=value and Hydra's own flags; see python -m sweeps.run --help")


def _label() -> str:
    config = HydraConfig.get()
    number = int(config.job.num) + 1 if config.mode == RunMode.MULTIRUN else 1
    return f"[{number}/{len(PLANNED)}]" if PLANNED else f"[{number}]"


@hydra.main(config_path=str(auto.CONF), config_name="config", version_base="1.3")
def _job(cfg: DictConfig) -> None:
    try:
        cell = study.compose_cell(cfg)
        with FORECAST.watching(cell):
            study.run_cell(cell, _label())
    except USER_ERRORS as error:
        if _full_error():
            raise
        fail(error)  # SystemExit passes Hydra, which would run the other jobs before it raised this


def _full_error() -> bool:
    return os.environ.get("MEGATRAIN_FULL_ERROR") == "1"


def fail(error: BaseException) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(one_line(error, [argument for argument in sys.argv[1:] if "=" in argument]), file=sys.stderr, flush=True)
    sys.exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Validate, run, report; the exit code is 0 when at least one cell has its number."""
    global FORECAST
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        os.environ["MEGATRAIN_FULL_ERROR"] = "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands us its errors instead of printing them
    signal.signal(signal.SIGTERM, _interrupt)
    auto.register()
    try:
        cells = planned_cells(sys.argv[1:])
        study.check(cells or [])
        PLANNED[:] = cells or []
        FORECAST = forecast.announce(PLANNED)
        _job()
        return study.finish(PLANNED) if PLANNED else 0
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if _full_error():
            raise
        fail(error)
    except KeyboardInterrupt:
        print("interrupted: the running cell was stopped and has no row; run the same command again to go on", file=sys.stderr)
        return 130
    finally:
        for folder in {cell.output_dir for cell in PLANNED}:
            study.tidy(folder)


if __name__ == "__main__":
    sys.exit(main())
