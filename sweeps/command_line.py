"""What every command of the project shares: a wrong flag is one line, and standard streams that can
be written to.

Invariant: imports the standard library alone, so any room may use it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose complaint is one line without the usage; exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the allowed is told."""
        told = " ".join(message.split()).removeprefix("argument ")
        flag = f"command line: {told}, allowed what `{self.prog} --help` lists; correct it"
        print(flag, file=sys.stderr, flush=True)
        sys.exit(2)


def count(least: int, most: int) -> Callable[[str], int]:
    """A type for add_argument: an integer from `least` to `most`."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"got {text}, allowed an integer from {least} to {most}"
            )
        return int(text)

    return read


def asks_help(arguments: Sequence[str]) -> bool:
    """Whether a command is to say what it does, whatever else it is given."""
    return not {"--help", "-h"}.isdisjoint(arguments)


def mend_streams() -> None:
    """Make the standard streams writable: closed ones lead nowhere, and what an encoding lacks is
    written as a question mark.

    A closed descriptor would be given to the next file or pipe that is opened, and printing would
    write into that.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_nowhere(number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _open_nowhere(number: int) -> None:
    """Give the descriptor `number` to /dev/null, unless something else has it by now."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
