"""The bench: Hydra entry, a process per cell, the loop, samplers, rows and sinks.

Ctrl-C ends a command of it in one line from the first import on, which takes seconds; `sweeps.run`
has more to say once it is there.
"""

import os
import signal
import sys
from types import FrameType


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted: run the same command again\n")
    os._exit(130)


# So python -m has it while it imports the package.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)
