"""Stands between a study and a cell, and ends whatever the cell started when either of them ends.

Invariant: when it has ended, no descendant of the cell is alive. Orphans (ninja's compilers,
daemons in sessions of their own) become its children, so none can leave; a study that is killed
closes its end of the socket, and the cell of a keeper that is killed dies with it. A cell of a
study whose keeper was killed by hand may leave orphans, which `sweeps.isolate` ends in the same
way.

It starts with every cell, so it is a file of its own and needs the standard library alone.

    python keeper.py SOCKET PIPE COMMAND...      (started by sweeps.isolate)

SOCKET: to it go the cell's pid and, if the cell ended by itself, its exit code, in a line each; the
other end closes when the cell is to be ended. PIPE: the cell's, which the keeper lets go.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection

POLL_S = 0.05
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""linux/prctl.h"""


def adopt_orphans(yes: bool) -> None:
    """Whether descendants of this process that lose their parent become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def descendants(besides: Collection[int] = ()) -> set[int]:
    """What this process and its children started and nobody waited for; not `besides` and
    theirs."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level} - found - set(besides)
        found |= level
    return found


def end_descendants(besides: Collection[int] = ()) -> None:
    """Kill them and wait until none is left."""
    while left := descendants(besides):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # its own parent is still to be reaped
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def start(command: tuple[str, ...]) -> int:
    """The pid of `command`, in a session of its own; it dies with this process."""
    keeper = os.getpid()
    if cell := os.fork():
        return cell
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def tell(study: socket.socket, number: int) -> None:
    """One line; nobody hears it where the study is gone."""
    with contextlib.suppress(OSError):
        study.sendall(b"%d\n" % number)


def main(descriptor: str, pipe: str, *command: str) -> None:
    """Start the cell, and end with it or with the study, whichever is first."""
    study = socket.socket(fileno=int(descriptor))
    study.set_inheritable(False)
    adopt_orphans(True)
    cell = start(command)
    os.close(int(pipe))
    tell(study, cell)
    ended = (0, 0)
    while not ended[0] and not select.select([study], [], [], POLL_S)[0]:
        ended = os.waitpid(cell, os.WNOHANG)
    end_descendants()
    if ended[0]:
        tell(study, os.waitstatus_to_exitcode(ended[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
