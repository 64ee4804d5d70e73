"""The state that a cell saved, resumed by another process, which takes the steps after it again.

Invariant: that process has nothing of the first one but its config and the state. Unless it begins
with a checkpoint, or trains adapters beside frozen weights, it has other weights before, so that
what is not resumed shows in its losses.

    python -m sweeps.again --events-fd FD < config.json     (started by sweeps.study)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from sweeps import ranks
from sweeps.agreement import ADAPTERS, LOSS_TOLERANCE
from sweeps.cell import Emit, built, given_back, main, state_folder
from sweeps.config import Cell
from sweeps.isolate import Outcome

MODULE = "sweeps.again"
NOT_RESUMED = "its state was not resumed: {}"
NUM_STEPS = 2
"""One step shows the weights of a state, the next its moments."""


def work(
    cell: Cell, emit: Emit, rates: Mapping[str, float] | None = None, *, first_step: int
) -> None:
    """Resume the cell's state, which is that before `first_step`, and train on: a `resumed`
    event."""
    with ranks.joined(cell.machine.device, cell.process.timeout_s, emit):
        _work(cell, ranks.heard(emit), rates, first_step)


def _work(cell: Cell, emit: Emit, rates: Mapping[str, float] | None, first_step: int) -> None:
    from baselines import distributed
    from baselines.checkpoint import starting_weights
    from sweeps.text import stream_of

    spec, system, batches = cell.spec(), built(cell, rates), stream_of(cell)
    with given_back(system):
        seed = cell.seed + (cell.system not in ADAPTERS)  # their state is not that of the rest
        system.setup(starting_weights(spec.model, seed, spec.dtype, spec.device))
        for _ in range(first_step):
            next(batches)
        started = time.perf_counter()
        system.resume(state_folder(cell))
        system.drain()
        seconds = distributed.slowest(time.perf_counter() - started)
        losses = [system.train_step(next(batches)) for _ in range(NUM_STEPS)]
        system.drain()
        emit("resumed", seconds=seconds, losses=[float(loss) for loss in losses])


def hold_against(outcome: Outcome, start: Callable[..., Outcome], deadline: float) -> None:
    """Add what the row's counters have of it: resume_s, seconds that the state of the last window
    took to be checked and read; resumed_difference, the largest difference between the losses of
    the window's first steps and of the same ones again, nats. A reason is added where it is larger
    than two systems may differ, and where the state was not resumed, which costs no number.

    start: runs a module, with what is given beside the cell's config. deadline: on time.monotonic's
    clock.
    """
    print("  another process resumes the state of its last window", flush=True)
    try:
        wrong = _held_against(outcome, start) if time.monotonic() < deadline else ""
    except OSError as error:
        wrong = NOT_RESUMED.format(error.strerror or error)
    if not outcome.resumed and time.monotonic() >= deadline:
        wrong = NOT_RESUMED.format("time_limit_s was up")
    outcome.reason = "; ".join(filter(None, (outcome.reason, wrong)))


def _held_against(outcome: Outcome, start: Callable[..., Outcome]) -> str:
    """What was wrong with it, if anything was."""
    window, predicted = outcome.last("losses"), outcome.last("predicted")
    rates = {"rates": predicted["prediction"]["rates"]} if predicted else {}
    again = start(MODULE, on_event=lambda _: None, first_step=window["first_step"], **rates)
    outcome.cell_s = (outcome.cell_s or 0.0) + (again.cell_s or 0.0)
    resumed = again.last("resumed")
    if not resumed:
        return NOT_RESUMED.format(again.reason)
    pairs = zip(resumed["losses"], window["losses"], strict=False)
    difference = max(abs(mine - theirs) for mine, theirs in pairs)
    outcome.resumed = {"resume_s": resumed["seconds"], "resumed_difference": difference}
    told = f"resumed by another process, its first losses differ by {difference:.2g} nats"
    return "" if difference <= LOSS_TOLERANCE else told


if __name__ == "__main__":
    sys.exit(main(work))
