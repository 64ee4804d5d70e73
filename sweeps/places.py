"""What a row says of places: names, in place of one machine's paths.

Invariant: no folder of a user or a machine reaches a row. What lies in the output folder is
named relative to it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sweeps.config import Cell
from sweeps.environment import ROOT
from sweeps.identity import PATHS

EVERYWHERE = ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")
"""Folders of the root that are nobody's, and the same on every machine."""
_PART = r"""[^\s/'"`,;:()<>|\[\]]+"""
ABSOLUTE = re.compile(rf"(?<![\w.:/~$-])/(?:{_PART}/)+(?:{_PART})?")
"""A path of two folders or more; no URL, no fraction, nothing below a name."""


def named(text: str, cell: Cell) -> str:
    """`text` with every path by what it is called: ~, $TMPDIR, machine.nvme_path, logs/NAME.log.

    Of a path that has no such name the last part is left.
    """
    text = text.replace("file://", "")
    text = re.sub(rf"(?<![\w./~-]){re.escape(str(cell.output_dir))}/logs/", "logs/", text)
    for place, name in sorted(_places(cell), key=lambda item: -len(item[0])):
        below = "" if name == "output_dir" else f"{name}/"
        text = re.sub(rf"(?<![\w./~-]){re.escape(place)}/", below, text)
        text = re.sub(rf"(?<![\w./~-]){re.escape(place)}(?![\w-]|\.\w)", name, text)
    return ABSOLUTE.sub(lambda found: _last_part(found[0]), text)


def _last_part(path: str) -> str:
    first, last = path.split("/")[1], path.rstrip("/").rpartition("/")[2]
    return path if first in EVERYWHERE else f".../{last}"


def _places(cell: Cell) -> Iterator[tuple[str, str]]:
    """(absolute path as it may stand in a message, name)."""
    places: list[tuple[str | Path | None, str]] = [(cell.output_dir, "output_dir")]
    for option in PATHS:
        several = (getattr(cell.machine, option) or "").split(os.pathsep)
        for at, place in enumerate(several):
            places += [(place, f"machine.{option}{f'[{at}]' if several[1:] else ''}")]
    places += [(os.environ.get("XDG_CACHE_HOME"), "$XDG_CACHE_HOME")]
    places += [(os.path.expanduser("~"), "~"), (tempfile.gettempdir(), "$TMPDIR")]
    places += [(ROOT, "megatrain-bench")]
    places += [] if sys.prefix.split("/")[1] in EVERYWHERE else [(sys.prefix, "sys.prefix")]
    for given, name in places:
        for path in _spellings(given) if given else ():
            yield path, name


def _spellings(given: str | Path) -> set[str]:
    """How messages write the path: as given, absolute, resolved; its spaces joined, or escaped."""
    path = Path(given).expanduser()
    known = {str(one) for one in (given, path, path.absolute(), path.resolve())}
    known |= {" ".join(one.split()) for one in known} | {repr(one)[1:-1] for one in known}
    return {one for one in known if one.startswith(("/", "~/")) and one != "/"}
