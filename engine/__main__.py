"""Prints the operations of one optimizer step, with what each waits for (`'`: in the step before).

python -m engine 3 2 3 1     # layers, depth, streams, checkpoint interval
"""

import sys

from engine.pipeline import LANES, Pipeline
from engine.step import build

USAGE = "usage: python -m engine LAYERS DEPTH STREAMS CHECKPOINT_INTERVAL, each an integer >= 1, STREAMS at most 3"


def main() -> int:
    """Print the schedule for the four numbers on the command line; 2 and one line where they are not that."""
    try:
        layers, depth, streams, interval = (int(argument) for argument in sys.argv[1:])
    except ValueError:
        layers = depth = streams = interval = 0
    if min(layers, depth, interval) < 1 or streams not in LANES:
        print(f"{USAGE}; got {' '.join(sys.argv[1:]) or 'nothing'}", file=sys.stderr)
        return 2
    for index, op in enumerate(build(Pipeline(num_layers=layers, depth=depth, streams=streams, checkpoint_interval=interval))):
        print(f"{index:4} {op}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
