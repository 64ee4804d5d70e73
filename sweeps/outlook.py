"""What a cell would need, whether there is room for it, how long its step would take.

Everybody who asks that asks here: the command, of every cell before the first one runs; the cell's
own process, before it allocates; `sweeps.plan`; and `sweeps.auto`, which chooses a model by it.

Invariant: nothing stays allocated, and the command asks in a process of its own, so that it imports
no measured library. A ValueError ends the sweep, a plan without room is the cell's outcome;
whatever else a system raises here is left for its cell.

    python -m sweeps.outlook --events-fd FD < {"cells": [config, ...]}     (started by `outlooks`)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baselines import megatrain
from baselines.model import config_of, count_params, refuse_random
from baselines.model_check import require_runnable
from baselines.registry import build
from engine import Machine, MegaTrain, Plan, Rates, free_bytes
from sweeps import environment, flops
from sweeps.config import Cell, cell_from
from sweeps.events import Emitter
from sweeps.identity import PLAIN, configuration, drives_of, products_of
from sweeps.isolate import Event, Outcome, guarded, run_isolated
from sweeps.memory import NoDevice, host_bytes

FEWER_INPUTS = {"checkpoint_interval": -1, "offload_activations": 0}
"""Options of the engine that take least of a device, at the price of recomputing more."""
SPARE = 0.05
"""Share of the host's memory that copies of states leave free beside the plan."""
OUTLOOKS_S = 120.0
PREDICTIONS_S = 30.0
"""No prediction begins later than that; a step without one is of unknown length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known of a cell before it runs."""

    events: Sequence[Event]
    """What the cell would say of it: `plan`, and `predicted` where the cost model knows its
    step."""
    refusal: str | None
    """Why there is no room for it, one line; None where there is."""

    @property
    def plan(self) -> Mapping[str, Any]:
        """Bytes by kind on device and host, and the placement where the system has one."""
        plan: Mapping[str, Any] = self.events[0]["plan"]
        return plan

    @property
    def prediction(self) -> Mapping[str, Any] | None:
        """Seconds a step, steady and in windows, and what they follow from; None: unknown."""
        last = self.events[-1]
        return last["prediction"] if last["event"] == "predicted" else None

    @property
    def step_s(self) -> float | None:
        """Seconds a step; 0 without room, None where the cost model does not know the cell."""
        if self.refusal:
            return 0.0
        return None if self.prediction is None else float(self.prediction["step_s"])

    @property
    def outcome(self) -> Outcome | None:
        """What becomes of a cell without room, which needs no process."""
        if self.refusal is None:
            return None
        return Outcome(status="wont_fit", reason=self.refusal, events=list(self.events))


def built(cell: Cell, machine: Machine | None = None, rates: Rates | None = None) -> Any:
    """The cell's system, which allocates nothing that grows with the model before its setup.

    machine: one that is not here, which the engine plans for. rates: what the engine would
    otherwise probe of this one. ValueError for an option that the system does not have, and for a
    model that draws random numbers.
    """
    if cell.system != "megatrain" or (machine is None and rates is None):
        return build(cell.system, cell.spec())
    engine = megatrain.build(cell.spec(), machine=machine, rates=rates)
    refuse_random(cell.model)
    return engine


def outlook_of(system: Any, cell: Cell, *, elsewhere: bool = False) -> Outlook:
    """What a system that is built expects of itself, and whether there is room for it. elsewhere:
    on a machine that is not here and has the GPUs that are asked for."""
    plan, num_params = system.plan(), count_params(cell.model).total
    placement = {"placement": system.placement} if hasattr(system, "placement") else {}
    disk = {"disk": dict(plan.disk)} if plan.disk else {}
    events: list[Event] = [
        {
            "event": "plan",
            "plan": {"device": dict(plan.device), "host": dict(plan.host), **disk, **placement},
            "dtypes": system.dtypes(),
            "caveat": getattr(system, "caveat", None),
            "num_params": num_params,
            "flops_per_token": flops.per_token(
                config_of(cell.model), num_params, cell.shape.seq_len
            ),
            "tokens_per_step": cell.shape.num_tokens,
        }
    ]
    on_gpu = cell.machine.device == "cuda"
    plain = cell.dtype == "bfloat16" and products_of(cell.config) == PLAIN  # as rates are
    if on_gpu and plain and isinstance(system, MegaTrain):
        events.append({"event": "predicted", "prediction": _prediction(system, cell)})
    refusal = refusal_of(plan, cell)
    if refusal and on_gpu and isinstance(system, MegaTrain):
        refusal += _what_fits(system, cell)
    if not elsewhere:
        refusal = lacks_gpus(cell) or refusal or lacks_disk(plan, cell)
    return Outlook(events=events, refusal=refusal)


def _what_fits(engine: MegaTrain, cell: Cell) -> str:
    """The options with which the same model and shape have room, where there are such."""
    spec = cell.spec()
    spec = dataclasses.replace(spec, options={**spec.options, **FEWER_INPUTS})
    if refusal_of(megatrain.build(spec, rates=engine.rates).plan(), cell):
        return ""
    told = " ".join(f"system.{name}={value}" for name, value in FEWER_INPUTS.items())
    return f"; or set {told}, with which it fits"


def lacks_gpus(cell: Cell) -> str | None:
    """That the machine has fewer GPUs than the cell asks for, one line; None where it has them."""
    there, asked = environment.machine(cell.machine, None)["num_gpus"], cell.process.num_gpus
    if cell.machine.device == "cpu" or asked <= (there or 1):
        return None
    return (
        f"process.num_gpus: got {asked}, which is more than the {there} of this machine: such a "
        "cell is predicted, where its system is the engine, and not run"
    )


def lacks_disk(plan: Plan, cell: Cell) -> str | None:
    """That the disks of machine.nvme_path have less free than the plan puts there, one line; None
    where they have as much, or the system itself looks for the folders."""
    needed = cell.process.num_ranks * sum(plan.disk.values())
    folders = [Path(name).expanduser() for name in cell.machine.folders]
    if not needed or not all(folder.is_dir() for folder in folders):
        return None
    free = free_bytes(folders)
    if needed <= free:
        return None
    return (
        f"machine.nvme_path: got room for {free:,} bytes there, allowed at least {needed:,} for "
        f"{cell.model.name}; free some, or name another folder"
    )


def require_memory(cells: Iterable[Cell]) -> None:
    """ValueError for a limit above the memory of this machine: a cell that filled it would be
    killed."""
    there = host_bytes()
    for cell in cells:
        if (asked := cell.machine.host_bytes) is not None and asked > there:
            raise ValueError(
                f"machine.host_bytes: got {asked:,}, allowed at most {there:,}, which is all that "
                "this process may use; lower it, or predict with python -m sweeps.plan"
            )


def spare_host_bytes(outlook: Outlook, cell: Cell) -> int:
    """A rank's share of the host memory that the plans of all leave, but for SPARE of it all."""
    plan, spec = outlook.plan, cell.spec()
    needed: int = sum(plan["host"].values())
    needed += sum(plan["device"].values()) if spec.device.type == "cpu" else 0
    return max(0, int((spec.host_memory or 0) * (1 - SPARE)) // spec.num_ranks - needed)


def _prediction(engine: MegaTrain, cell: Cell) -> dict[str, Any]:
    num_steps = cell.measure.steps_per_window
    return {
        "step_s": engine.predict().step_s,
        "window_step_s": engine.predict_window(num_steps) / num_steps,
        "rates": dataclasses.asdict(engine.rates),
        "placement": engine.placement,
    }


def refusal_of(plan: Plan, cell: Cell, share: float = 1.0) -> str | None:
    """Why the plan has no room in that share of the machine, one line; None where it has.

    On the CPU both parts of the plan are host memory. Ranks share the host.
    """
    device, machine = cell.machine.device, environment.machine(cell.machine, None)
    host = plan.host_bytes + (plan.device_bytes if device == "cpu" else 0)
    host *= cell.process.num_ranks
    needs = [("host", host)]
    if device != "cpu":
        needs.insert(0, ("device", plan.device_bytes))
    for kind, needed in needs:
        has, name = machine[f"{kind}_bytes"], f"{kind}_bytes"
        if has is not None and needed > share * has:
            limited = getattr(cell.machine, name) is not None
            more = f", or raise machine.{name} if the machine has more" if limited else ""
            return (
                f"model: got {cell.model.name}, which needs {needed:,} bytes of {kind} memory, "
                f"allowed {has:,}; choose a smaller model or shape{more}"
            )
    return None


def outlooks(cells: Sequence[Cell], timeout_s: float = OUTLOOKS_S) -> dict[str, Outlook]:
    """The outlooks of `cells` by hash, as far as the time goes.

    ValueError, one line, for the first cell that its system refuses.
    """
    repeats: dict[str, list[Cell]] = {}  # of one configuration, which is asked about once
    for cell in cells:
        repeats.setdefault(configuration(cell.config), []).append(cell)
    asked = {group[0].hash: group for group in repeats.values()}
    outcome = run_isolated(
        "sweeps.outlook",
        {"cells": [group[0].config for group in asked.values()]},
        log=Path(os.devnull),
        timeout_s=timeout_s,
        device=NoDevice(),
        on_event=lambda event: None,
        env=environment.cell_variables(),
    )
    found: dict[str, Outlook] = {}
    for event in (event for event in outcome.events if event["event"] == "outlook"):
        outlook = Outlook(events=event["events"], refusal=event["refusal"])
        found |= {cell.hash: outlook for cell in asked.get(event["cell"], [])}
    return found


def require_models(cells: Sequence[Cell]) -> None:
    """ValueError for the first model that cannot be built or run; each is asked about once."""
    for number, model in enumerate(models := [cell.model for cell in cells]):
        if model not in models[:number]:
            require_runnable(model)


def outlook_here(cell: Cell, probed: dict[Any, Rates], *, predict: bool = True) -> Outlook | None:
    """The outlook of one of many cells; None where only the cell itself can tell.

    probed: rates so far, by what they depend on; AdamW's are those on a layer of the first model,
    for all models. Without `predict` the engine on a GPU, whose placement needs them, is left to
    its cell.
    """
    on_cpu = dataclasses.replace(cell.spec(), device=torch.device("cpu"))
    system = build(cell.system, on_cpu)  # it says what is wrong with its options
    if cell.machine.device == "cpu":
        return outlook_of(system, cell)
    if cell.system != "megatrain":
        return outlook_of(built(cell), cell)
    if not predict or cell.dtype != "bfloat16":
        return None
    process = cell.process.num_ranks > 1, cell.process.omp_num_threads
    options = cell.options.get("pinned"), cell.options.get("torch_adamw")
    key = options, process, drives_of(cell.config)
    engine = built(cell, rates=probed.get(key))
    probed[key] = engine.rates
    return outlook_of(engine, cell)


def say(work: Callable[[], Outlook | None], cell: str, emit: Emitter) -> None:
    """Say the outlook that `work` finds, or what it refuses."""
    try:
        outlook = work()
    except ValueError as error:
        emit("invalid", reason=" ".join(str(error).split()))
        return
    if outlook is not None:
        emit("outlook", cell=cell, events=list(outlook.events), refusal=outlook.refusal)


def main() -> int:
    """Always 0: what is wrong leaves on the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events-fd", type=int, required=True)
    emit = Emitter(parser.parse_args().events_fd)
    probed, started = dict[Any, Rates](), time.monotonic()

    def ignore(event: str, **fields: Any) -> None:
        """Not a ValueError: the cell will say it in its row."""

    cells = [cell_from(config) for config in json.load(sys.stdin)["cells"]]
    guarded(partial(say, partial(require_models, cells), "", emit), ignore)
    for cell in cells:
        predict = time.monotonic() - started < PREDICTIONS_S
        work = partial(outlook_here, cell, probed, predict=predict)
        guarded(partial(say, work, cell.hash, emit), ignore)
    return 0


if __name__ == "__main__":
    sys.exit(main())
