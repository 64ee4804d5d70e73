"""Trains one system for as long as it takes: saves states, evaluates, goes on where it was.

    python -m sweeps.train system=megatrain_fast model=checkpoint model.checkpoint=PATH \\
        data=text data.files=TEXT data.tokenizer=PATH train.epochs=2 train.export=NEW

Started again with the same output_dir it goes on from the last state that was saved. SIGTERM and
Ctrl-C have it save and end with 75, time_limit_s too; a second one ends it at once. Exit code 0
where all steps were taken, 1 where the run failed, 2 where the configuration is at fault.

Invariant: what is wrong with a configuration is one line before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console as Terminal

from baselines.checkpoint import export, starting_weights
from baselines.model_check import require_runnable
from sweeps import auto, environment, lock
from sweeps.cell import cap_device_memory
from sweeps.checks import build_group, require
from sweeps.command_line import asks_help, mend_streams
from sweeps.config import DTYPES, Cell, cell_from
from sweeps.errors import USER_ERRORS, one_line, overrides_in, parse
from sweeps.follow import Follower
from sweeps.generations import Generations, replace_file
from sweeps.heldout import batches_of
from sweeps.identity import digest, published
from sweeps.isolate import verdict
from sweeps.memory import device_sampler
from sweeps.outlook import built, outlook_of, require_memory, spare_host_bytes
from sweeps.text import stream_of
from sweeps.training import Train, Training, duration

STARTED = "MEGATRAIN_TRAIN"
"""Environment variable of a process that has its environment and its numactl already."""
STOPPED = 75
"""Exit code of a run that was stopped and goes on when the command is given again."""
EVERY_S = 10.0
"""Seconds between two lines, where the output is no terminal."""
BYTES_A_PARAMETER = 12
"""Of a state: fp32 master and two moments."""


def compose_train(overrides: Sequence[str]) -> tuple[Cell, Train]:
    """The run that a command line names. ValueError, one line, for what is wrong with it."""
    for item in parse(overrides):
        if item.is_sweep_override():
            raise ValueError(
                f"{item.key_or_group}: got {item.get_value_string()!r}, allowed one value, for a "
                "run is of one system; start one after the other"
            )
    auto.register()
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        cfg = compose("train", list(overrides))
    OmegaConf.set_struct(cfg, False)
    require("", cfg, ("train", "recipe"))
    given = cfg.pop("train")
    if OmegaConf.is_config(given):
        given = OmegaConf.to_container(given, resolve=True)
    train = build_group(Train, "train", {"train": given})
    counted = cfg.recipe.get("total_steps") is None
    if counted:  # as long as it may be, until the text says how long an epoch is
        cfg.recipe.total_steps = 1 << 62
    plain = auto.resolve(cfg)
    if not counted:
        return cell_from(plain), train
    steps = train.steps
    if steps is None:
        steps = train.num_steps(stream_of(cell_from(plain)))
    plain["recipe"]["total_steps"] = steps
    return cell_from(plain), train


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    began, argv = time.monotonic(), list(sys.argv[1:] if arguments is None else arguments)
    mend_streams()
    if asks_help(argv):
        print(f"{__doc__}\n{(auto.CONF / 'train.yaml').read_text()}")
        return 0
    stop = Stop()
    try:
        with stop.heard():
            require_overrides(argv)
            cell, train = compose_train(argv)
            require_one_process(cell)
            require_memory([cell])
            start_anew(cell, argv)
            return _held(cell, train, began, stop)
    except KeyboardInterrupt as interrupt:
        return _interrupted(STOPPED if interrupt.args else 130)
    except Exception as error:
        if stop.early:  # a library made something else of the interrupt
            return _interrupted(STOPPED)
        begun = "; the same command goes on from the last saved state, if there is one"
        begun = begun if stop.training else ""
        if isinstance(error, USER_ERRORS):
            return _ended(2, one_line(error, overrides_in(argv)) + begun)
        status, reason = verdict(error)
        return _ended(1, f"{status}: {reason}{begun}")


def _interrupted(code: int) -> int:
    return _ended(code, "stopped: nothing new was saved; the same command goes on")


def _ended(code: int, why: str) -> int:
    """Say why in one line; the code. The traceback of what is being handled is for who asks."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exc()
    print(why, file=sys.stderr, flush=True)
    return code


class Stop:
    """Signals that end a run: the first asks it to save, the second ends it at once."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self.early = False
        """Whether one came before there was anything to save."""

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Listen to SIGTERM, and to Ctrl-C unless it is ignored, as under nohup."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in heard:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.training is None:
            self.early = True
            raise KeyboardInterrupt(name)
        if self.training.stop:
            raise KeyboardInterrupt
        self.training.stop = name


def require_overrides(argv: Sequence[str]) -> None:
    """ValueError, one line, for a flag."""
    for item in argv:
        if item.startswith("-"):
            raise ValueError(f"command line: got {item}, allowed key=value and --help; correct it")


def require_one_process(cell: Cell) -> None:
    """ValueError, one line, for a run on several ranks."""
    if (num := cell.process.num_ranks) > 1:
        name = "num_gpus" if cell.machine.device == "cuda" else "num_cpu_ranks"
        raise ValueError(
            f"process.{name}: got {num}, allowed 1, for a run trains in one process; leave it out"
        )


def start_anew(cell: Cell, argv: Sequence[str]) -> None:
    """Become a process with the environment and the memory policy that the cell asks for, which
    must be there before torch is."""
    variables = environment.cell_variables(cell.process)
    there = all(os.environ.get(name) == value for name, value in variables.items())
    if STARTED in os.environ or (there and not cell.process.wrapper):
        return
    os.environ.update({**variables, STARTED: "1"})
    sys.stdout.flush()
    command = [*cell.process.wrapper, sys.executable, "-m", "sweeps.train", *argv]
    os.execvp(command[0], command)


def _held(cell: Cell, train: Train, began: float, stop: Stop) -> int:
    """Train while no other process can do so in that folder."""
    folders = [cell.output_dir, *cell.output_dir.parents]
    made = [folder for folder in folders if not folder.exists()]

    def refuse(holder: str) -> None:
        raise ValueError(
            f"output_dir: got {cell.output_dir}, where {holder} trains, allowed a folder that no "
            "other run is in; wait for it or choose another"
        )

    try:
        with lock.held(cell.output_dir / ".train.lock", math.inf, refuse):
            return _Run(cell, train, began).go(stop)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()


class _Run:
    """One run from its first look at the machine to its last word."""

    def __init__(self, cell: Cell, train: Train, began: float) -> None:
        self.stream = stream_of(cell)
        data = {**cell.config["data"], "digest": self.stream.digest}
        self.cell, self.train, self.began = cell_from({**cell.config, "data": data}), train, began
        if self.cell.machine.device == "cuda" and self.cell.machine.device_bytes:
            cap_device_memory(self.cell.machine.device_bytes)
        require_runnable(self.cell.model)
        self.system = built(self.cell)
        self.outlook = outlook_of(self.system, self.cell)
        if self.outlook.refusal:
            raise ValueError(self.outlook.refusal)
        self.states = Generations(self.cell.output_dir / "states", train.keep)
        self._require_evaluation()
        self._require_export()
        spec = self.cell.spec()
        self.weights = starting_weights(spec.model, cell.seed, spec.dtype, spec.device)
        self._tell()
        self.id = self._identify()

    def _require_evaluation(self) -> None:
        """ValueError where there is no text that is held out to evaluate on."""
        wanted = self.train.evaluate_every and self.train.evaluate_tokens
        if wanted and not batches_of(self.stream, 1):
            raise ValueError(
                f"train.evaluate_every: got {self.train.evaluate_every}, allowed 0 where the text "
                "that is held out is shorter than a sequence; raise data.heldout_fraction"
            )

    def _require_export(self) -> None:
        """ValueError where the folder of the trained weights cannot become this run's, nor holds
        what an earlier start of it wrote at its end."""
        path = self.train.export
        if path is None or not Path(path).exists():
            return
        if not self.states.found() or _written(self._run_path).get("exported") != self._export_of():
            raise ValueError(
                f"train.export: got {path}, which exists, allowed a new folder; choose another "
                "name or remove it"
            )

    def _identify(self) -> str:
        """The run's name in W&B, which all its starts share. ValueError where the folder has the
        states of another run."""
        known, there = known_of(self.cell, self.train), _written(self._run_path)
        if self.states.found():
            before = there.get("known", {})  # of an older version without some
            other = {key: before.get(key, known[key]) for key in known}
            for key in (key for key in known if other[key] != known[key]):
                raise ValueError(
                    f"output_dir: got {self.cell.output_dir}, which has states of a run with {key} "
                    f"{other[key]}, allowed {key} {known[key]}, as asked for now; choose another "
                    "folder"
                )
        else:
            there = {"id": digest([known, environment.boot(), time.time_ns()])}
        config = {**published(self.cell.config), "train": dataclasses.asdict(self.train)}
        run = {"id": there.get("id") or digest(known), "known": known, "config": config}
        run |= {"exported": there["exported"]} if "exported" in there else {}
        replace_file(self._run_path, json.dumps(run, indent=1))
        return str(run["id"])

    @property
    def _run_path(self) -> Path:
        return self.cell.output_dir / "run.json"

    def _export_of(self) -> list[Any]:
        """What is exported where: the folder and the steps that its weights have seen."""
        return [os.path.abspath(str(self.train.export)), self.train.num_steps(self.stream)]

    def _tell(self) -> None:
        """What is going to be trained, and what it takes: time and energy where they are known,
        memory, and the disk for states.

        ValueError where that has no room for one.
        """
        cell, steps = self.cell, self.train.num_steps(self.stream)
        each = BYTES_A_PARAMETER * int(self.outlook.events[0]["num_params"])
        free = shutil.disk_usage(cell.output_dir).free
        if free < each and not self.states.found():
            raise ValueError(
                f"output_dir: got {cell.output_dir} with {free:,} bytes free, allowed {each:,}, "
                "which a state takes; choose another disk"
            )
        step_s, watts = self.outlook.step_s, device_sampler(cell.machine.device).power_limit()
        print(
            f"{cell.experiment}: {cell.system}, {cell.model.name} {cell.dtype}, "
            f"{cell.shape.batch_size} x {cell.shape.seq_len} tokens, {steps:,} steps on "
            f"{cell.machine.device}{time_and_energy(steps, step_s, watts)}\n  "
            f"memory: {memory_use(self.outlook.plan, environment.machine(cell.machine, None))}\n  "
            f"a state takes about {each / 1e9:.2f} GB, "
            f"{self.train.keep} are kept, {free / 1e9:.1f} GB are free"
            f"{drive_use(self.outlook.plan, steps)}",
            flush=True,
        )
        if caveat := self.outlook.events[0]["caveat"]:
            print(f"  note: {caveat}", flush=True)

    def go(self, stop: Stop) -> int:
        """Set up, train, save, export; the exit code."""
        cell, room = self.cell, self.train.room
        room = spare_host_bytes(self.outlook, cell) if room is None else room
        deadline = self.began + (cell.time_limit_s or math.inf)
        with contextlib.closing(self.system), Shown() as shown:
            self.system.setup(self.weights)
            if self.train.save_every and hasattr(self.system, "reserve"):
                self.system.reserve(room=room)
            training = Training(
                self.system,
                cell,
                self.train,
                self.stream,
                self.states,
                room=room,
                shown=shown,
                deadline=deadline,
            )
            stop.training = training
            with contextlib.closing(training), Follower(cell, self.id):
                finished = training.run()
            if finished:
                self._export()
            if training.unsaved:
                return _ended(1, f"output_dir: the last state was not saved: {training.unsaved}")
        where = f"step {training.at.step:,}, {training.at.tokens:,} tokens"
        if not finished:
            return _ended(
                STOPPED, f"stopped ({training.stop}) and saved at {where}; the same command goes on"
            )
        print(f"done: {where}, {duration(training.at.seconds)} of training", flush=True)
        return 0

    def _export(self) -> None:
        """Write the trained weights, unless an earlier start did."""
        if self.train.export is None:
            return
        path, spec = Path(self.train.export), self.cell.spec()
        if not path.exists():
            run = _written(self._run_path) | {"exported": self._export_of()}
            replace_file(self._run_path, json.dumps(run, indent=1))
            dtype = DTYPES[self.train.export_dtype or self.cell.dtype]
            export(self.system.parameters(), spec.model, path, dtype=dtype)
        print(f"  weights: {path}", flush=True)


def time_and_energy(num_steps: int, step_s: float | None, watts: float | None) -> str:
    """What the steps alone take, in words: by the cost model, and at the power limit, in W, of the
    device; nothing where the first is unknown."""
    if not step_s:
        return ""
    energy = (
        f" and at most {num_steps * step_s * watts / 3.6e6:,.2f} kWh of the device" if watts else ""
    )
    return f", about {duration(num_steps * step_s)}{energy}"


def memory_use(plan: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """What is planned of what the machine has, in words; without a device all is the host's."""
    needed = {kind: sum(plan[kind].values()) for kind in ("host", "device")}
    if machine["device_bytes"] is None:
        needed = {"host": sum(needed.values())}
    return ", ".join(
        f"{num_bytes / 1e9:.2f} of {machine[f'{kind}_bytes'] / 1e9:.1f} GB on the {kind}"
        for kind, num_bytes in needed.items()
    )


def drive_use(plan: Mapping[str, Any], num_steps: int) -> str:
    """A line for what lies on drives and what the run does to them; nothing without any."""
    if not (num_bytes := sum((plan.get("disk") or {}).values())):
        return ""
    return (
        f"\n  drives: {num_bytes / 1e9:.2f} GB of optimizer state; the run writes "
        f"{num_steps * num_bytes / 1e12:,.2f} TB, to be compared with their endurance (TBW)"
    )


def known_of(cell: Cell, train: Train) -> dict[str, Any]:
    """What a run and the states that it goes on from must share. In other batches a run of so many
    epochs would end elsewhere."""
    batch = {} if train.epochs is None else {"shape.batch_size": cell.shape.batch_size}
    return batch | {
        "system": cell.system,
        "model": cell.model.name,
        "model.config": digest([cell.model.model_type, dict(cell.model.config)]),
        "weights": cell.model.checkpoint_digest,
        "dtype": cell.dtype,
        "text": cell.data.digest,
        "data.heldout_fraction": cell.data.heldout_fraction,
        "seed": cell.seed,
        "seq_len": cell.shape.seq_len,
    }


def _written(path: Path) -> dict[str, Any]:
    """What run.json has; nothing where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found: Any = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


class Shown:
    """The last step, as a line that is replaced on a terminal, now and then on anything else."""

    def __init__(self) -> None:
        terminal = Terminal(highlight=False)
        self._status = terminal.status("setting up") if terminal.is_terminal else None
        self._next = 0.0

    def __enter__(self) -> Shown:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        """Show it."""
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
