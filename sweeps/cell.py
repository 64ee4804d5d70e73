"""The process of one cell, or of one of its ranks: build, plan, set up, measure, report. Started by
sweeps.isolate or the launcher of sweeps.ranks, never by hand.

Invariant: it refuses before it allocates. Its stdin is the plain config with, as `rates`, what the
study knows of the machine; its events leave on a pipe as JSON lines, and its stdout and stderr are
a log that nobody parses.

    python -m sweeps.cell --events-fd FD < config.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sweeps import ranks
from sweeps.config import Cell, cell_from
from sweeps.events import Emitter
from sweeps.isolate import guarded

Emit = Callable[..., None]
BESIDE = ("rates", "first_step")
"""What comes with a config and is no part of it."""


def cap_device_memory(num_bytes: int) -> None:
    """Let torch's allocator reserve no more than `num_bytes` of the device in this process; more
    than there is caps nothing.

    What is outside that allocator, the CUDA context above all (about half a GB), comes on top.
    """
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


def work(cell: Cell, emit: Emit, rates: Mapping[str, float] | None = None) -> None:
    """The whole life of one cell. rates: what the engine would otherwise probe."""
    say = ranks.heard(emit)
    say("phase", name="import")
    with ranks.joined(cell.machine.device, cell.process.timeout_s, emit):
        _work(cell, say, rates)


def built(cell: Cell, rates: Mapping[str, float] | None) -> Any:
    """The cell's system, in this process. Raises ValueError for what it cannot train."""
    from baselines.model_check import require_runnable
    from engine import Rates
    from sweeps import outlook

    if cell.machine.device == "cuda" and cell.machine.device_bytes:
        cap_device_memory(cell.machine.device_bytes)
    require_runnable(cell.model)
    return outlook.built(cell, rates=Rates(**rates) if rates else None)


def state_folder(cell: Cell) -> Path:
    """Where the state that is saved beside a window lies."""
    return cell.output_dir / f".state-{cell.hash}"


def _work(cell: Cell, emit: Emit, rates: Mapping[str, float] | None) -> None:
    import torch

    from baselines import distributed
    from baselines.checkpoint import starting_weights
    from sweeps import bench, exact_match, heldout, outlook
    from sweeps.text import stream_of

    spec = cell.spec()
    try:
        system = built(cell, rates)
        expected = outlook.outlook_of(system, cell)
        steps = stream_of(cell)
        asked = exact_match.questions(cell, steps)
    except ValueError as error:
        emit("invalid", reason=" ".join(str(error).split()))
        return
    for event in expected.events:
        emit(**event)
    if expected.refusal:
        emit("failed", status="wont_fit", reason=expected.refusal)
        return
    emit("phase", name=getattr(system, "setup_phase", "setup"))
    model, room = None, outlook.spare_host_bytes(expected, cell)
    with given_back(system):
        system.setup(starting_weights(spec.model, cell.seed, spec.dtype, spec.device))
        follow = heldout.batches(cell) if cell.measure.heldout_every_window else ()
        saves = bench.Saves(system, state_folder(cell), room=room) if cell.measure.save else None
        if saves:
            saves.reserve()
        counted = bench.measure(system, steps, cell.measure, emit, heldout=follow, saves=saves)
        cuda = spec.device.type == "cuda"
        allocated = distributed.gathered(torch.cuda.max_memory_allocated() if cuda else 0)
        reserved = distributed.gathered(torch.cuda.max_memory_reserved() if cuda else 0)
        emit(
            "done",
            counters={name: float(v) for name, v in counted.items()},
            allocated_bytes=max(allocated) if cuda else None,
            reserved_bytes=max(reserved) if cuda else None,
            all_allocated_bytes=sum(allocated) if cuda else None,
        )
        if cell.measure.heldout_tokens or asked:
            model = _trained(system, cell)
        if cell.measure.trace:
            path = cell.output_dir / "traces" / f"{cell.hash}-{cell.system}.json"
            if hasattr(system, "record"):
                bench.record(
                    system, steps, cell.measure.steps_per_window, path.with_suffix(".timeline.json")
                )
            bench.trace(system, steps, cell.measure.steps_per_window, path)
    if ranks.rank():  # they have no more to say
        return
    if model is not None and cell.measure.heldout_tokens:  # its device may have had no room before
        emit("heldout", loss=heldout.loss(model, cell))
    if model is not None and asked:
        share = exact_match.share(model, cell, asked)
        emit("exact_match", share=share, num_questions=len(asked))


@contextlib.contextmanager
def given_back(system: Any) -> Iterator[None]:
    """At the end give back what a system holds; a rank that raises does not, see `ranks.joined`."""
    try:
        yield
    finally:
        if not (ranks.is_rank() and sys.exception()):
            system.close()


def _trained(system: Any, cell: Cell) -> Any:
    """The plain model as it was trained; None of the ranks that only give it their part."""
    from sweeps import heldout

    if not ranks.rank():
        return heldout.trained(system, cell)
    for _ in system.parameters():
        pass
    return None


def main(life: Callable[..., None] = work) -> int:
    """Read the config and do what there is to do: `work`, or what sweeps.again does. Exit code 0
    when the cell said `done`, was refused or was invalid; 1 when it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events-fd", type=_descriptor, required=True)
    emit = Emitter(parser.parse_args().events_fd)
    with open("/proc/self/fd/0") as config_file:  # from its beginning, which ranks share
        config = json.load(config_file)
    beside = {name: config.pop(name) for name in BESIDE if name in config}
    cell = cell_from(config)
    return guarded(lambda: life(cell, emit, **beside), ranks.naming(emit))


def _descriptor(text: str) -> int:
    """A file descriptor, given as its number or as the path of what it writes to."""
    return int(text) if text.isdecimal() else os.open(text, os.O_WRONLY)


if __name__ == "__main__":
    sys.exit(main())
