"""Draws one optimizer step from its schedule, and lists its operations with what each waits for.

python -m engine 3 2 3 1       # layers, depth, streams, checkpoint interval
python -m engine 3 2 3 1 2     # and ranks
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.blocks import Blocks
from engine.step import LANES, Kind, Op, operations
from engine.timeline import Interval, simulate

USAGE = (
    "usage: python -m engine LAYERS DEPTH STREAMS CHECKPOINT_INTERVAL [RANKS], each an "
    "integer >= 1, STREAMS at most 3"
)
LETTERS = {
    Kind.EMBED: ("E", 4),
    Kind.FORWARD: ("F", 4),
    Kind.TAIL: ("T", 11),
    Kind.RECOMPUTE: ("R", 4),
    Kind.BACKWARD: ("B", 14),
    Kind.EMBED_BACKWARD: ("E'", 4),
    Kind.LOAD: ("L", 4),
    Kind.GATHER: ("G", 3),
    Kind.SCATTER: ("+", 3),
    Kind.STORE: ("S", 4),
    Kind.PARK: ("P", 2),
    Kind.UPDATE: ("U", 4),
    Kind.MOMENTS: ("M", 4),
}
"""Kind -> its letter, and for how many columns it is drawn."""
LEGEND = (
    "E embed, F forward, T head and loss, R recomputed forward, B recompute and backward, "
    "L load weights, S store gradients, P park them, U update weights, M update moments, "
    "G gather weights, + sum gradients of all ranks; durations are made up"
)


def columns(op: Op) -> float:
    """Width of an operation in the drawing; what takes next to no time has none."""
    return LETTERS[op.kind][1] if op.kind in LETTERS else 0


def drawing(blocks: Blocks) -> list[str]:
    """One line a lane over one steady step: a letter and a block where an operation begins."""
    ops = operations(blocks)
    letters = {op.label: f"{LETTERS[op.kind][0]}{op.block}" for op in ops if op.kind in LETTERS}
    step = simulate(ops, columns)
    lines = []
    for lane in dict.fromkeys(("cpu", *LANES[blocks.streams].values())):
        mine = [i for i in step.intervals if i.lane == lane]
        if not mine:
            continue
        lines.append(f"{lane:9}{_line(mine, letters, round(step.step_s))}".rstrip())
    return lines


def _line(intervals: Sequence[Interval], letters: dict[str, str], width: int) -> str:
    cells = [" "] * (width + 1)
    for interval in intervals:
        start, end = round(interval.start_s), round(interval.end_s)
        cells[start:end] = f"|{letters[interval.label]}".ljust(end - start)[: end - start]
        cells[end] = "|"
    return "".join(cells)


def listed(op: Op) -> str:
    """One line: lane, name, places and waits."""
    places = (("slot", op.slot), ("slab", op.slab), ("host", op.host_slab))
    place = " ".join(f"{name} {number}" for name, number in places if number >= 0)
    waits = " ".join(f"#{index}" + ("'" if offset else "") for offset, index in op.waits)
    return f"{op.lane:8}{op.label:27}{place:20}" + (f"after {waits}" if waits else "")


def main() -> int:
    """Print the step for the four numbers on the command line; 2 and one line where they are not
    that."""
    try:
        given = [int(argument) for argument in sys.argv[1:]]
        layers, depth, streams, interval, ranks = given if len(given) == 5 else (*given, 1)
    except ValueError:
        layers = depth = streams = interval = ranks = 0
    if min(layers, depth, interval, ranks) < 1 or streams not in LANES:
        print(f"{USAGE}; got {' '.join(sys.argv[1:]) or 'nothing'}", file=sys.stderr)
        return 2
    blocks = Blocks(
        num_layers=layers,
        depth=depth,
        streams=streams,
        checkpoint_interval=interval,
        late_moments=True,
        num_ranks=ranks,
    )
    print("\n".join(drawing(blocks)), f"{LEGEND}\n", sep="\n")
    print("Operations in issue order; `'` is one of the step before.")
    for index, op in enumerate(operations(blocks)):
        print(f"{index:4} {listed(op)}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
