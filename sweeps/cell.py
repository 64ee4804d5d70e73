"""The process of one cell: build, plan, set up, measure, report. Started by sweeps.isolate, never by hand.

Invariant: it refuses before it allocates. Its stdin is the plain config with, as `rates`, what the study knows of the
machine; its events leave on a pipe as JSON lines, and its stdout and stderr are a log that nobody parses.

    python -m sweeps.cell --events-fd FD < config.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from sweeps import environment, flops
from sweeps.config import Cell, cell_from
from sweeps.isolate import guarded


class Emitter:
    """emit(event, **fields): one JSON line on the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: str, **fields: Any) -> None:
        """Write one event whole; infinities and NaN pass as Python's own JSON words."""
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


def fits(plan: Any, model: str, device: str, had: Mapping[str, Any]) -> str | None:
    """None when the plan fits what the machine has, else the one-line refusal. On the CPU both shares are host memory."""
    host = plan.host_bytes + (plan.device_bytes if device == "cpu" else 0)
    needs = [("host", host, had["host_bytes"], "machine.host_bytes")]
    if device != "cpu":
        needs.insert(0, ("device", plan.device_bytes, had["device_bytes"], "machine.device_bytes"))
    for kind, needed, has, path in needs:
        if has is not None and needed > has:
            return (
                f"model: got {model}, which needs {needed:,} bytes of {kind} memory, allowed {has:,}; choose a smaller model "
                f"or shape, or set {path} if the machine has more"
            )
    return None


def outlook(system: Any, cell: Cell) -> tuple[list[dict[str, Any]], str | None]:
    """What a system that is built expects of itself, as events (`plan`; `predicted` where the cost model knows it), and why it
    has no room, if it has none. Nothing stays allocated."""
    from baselines.model import config_of, count_params
    from engine import MegaTrain

    plan, model, num_params = system.plan(), cell.model, count_params(cell.model).total
    chosen = {"placement": system.placement} if hasattr(system, "placement") else {}
    planned = {
        "event": "plan",
        "plan": {"device": dict(plan.device), "host": dict(plan.host), **chosen},
        "dtypes": system.dtypes(),
        "caveat": getattr(system, "caveat", None),
        "num_params": num_params,
        "flops_per_token": flops.per_token(config_of(model), num_params, cell.shape.seq_len),
        "tokens_per_step": cell.shape.num_tokens,
    }
    told = [planned]
    if cell.machine.device == "cuda" and cell.dtype == "bfloat16" and isinstance(system, MegaTrain):  # rates are those of bf16
        rates, placement = dataclasses.asdict(system.rates), system.placement
        num_steps = cell.measure.steps_per_window
        seconds = {"step_s": system.predict().step_s, "window_step_s": system.predict_window(num_steps) / num_steps}
        prediction = {**seconds, "rates": rates, "placement": placement}
        told.append({"event": "predicted", "prediction": prediction})  # of a cell without room too: figures draw it as what it is
    return told, fits(plan, model.name, cell.machine.device, environment.machine(cell.machine, None))


def cap_device_memory(num_bytes: int) -> None:
    """Let torch's allocator reserve no more than `num_bytes` of the device in this process; more than there is caps nothing.

    What is outside that allocator, the CUDA context above all (about half a GB), comes on top.
    """
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


def work(cell: Cell, emit: Emitter, rates: Mapping[str, float] | None = None) -> None:
    """The whole life of one cell. rates: what the engine would otherwise probe."""
    emit("phase", name="import")
    import torch

    from baselines import megatrain
    from baselines.model import initial_weights
    from baselines.model_check import require_runnable
    from baselines.registry import build
    from engine import Rates
    from sweeps import bench, data, heldout

    spec = cell.spec()
    if cell.machine.device == "cuda" and cell.machine.device_bytes:
        cap_device_memory(cell.machine.device_bytes)
    try:
        require_runnable(cell.model)
        system = build(cell.system, spec) if rates is None else megatrain.build(spec, rates=Rates(**rates))
        told, refusal = outlook(system, cell)
        steps = data.batches(data.corpus_of(cell.data), cell.shape, cell.seed)
    except ValueError as error:
        emit("invalid", reason=" ".join(str(error).split()))
        return
    for event in told:
        emit(**event)
    if refusal:
        emit("failed", status="wont_fit", reason=refusal)
        return
    emit("phase", name=getattr(system, "setup_phase", "setup"))
    model = None
    try:
        system.setup(initial_weights(spec.model, cell.seed, spec.dtype, spec.device))
        bench.measure(system, steps, cell.measure, emit)
        cuda = spec.device.type == "cuda"
        emit(
            "done",
            counters={name: float(value) for name, value in system.counters().items()},
            allocated_bytes=torch.cuda.max_memory_allocated() if cuda else None,
            reserved_bytes=torch.cuda.max_memory_reserved() if cuda else None,
        )
        if cell.measure.heldout_tokens:
            model = heldout.trained(system, cell)
        if cell.measure.trace:
            path = cell.output_dir / "traces" / f"{cell.hash}-{cell.system}.json"
            if hasattr(system, "record"):
                bench.record(system, steps, cell.measure.steps_per_window, path.with_suffix(".timeline.json"))
            bench.trace(system, steps, cell.measure.steps_per_window, path)
    finally:
        system.close()
    if model is not None:  # its device may have had no room before
        emit("heldout", loss=heldout.loss(model, cell))


def main() -> int:
    """Exit code 0 when the cell said `done`, was refused or was invalid; 1 when it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events-fd", type=int, required=True)
    emit = Emitter(parser.parse_args().events_fd)
    config = json.load(sys.stdin)
    rates = config.pop("rates", None)
    cell = cell_from(config)
    return guarded(lambda: work(cell, emit, rates), emit)


if __name__ == "__main__":
    sys.exit(main())
