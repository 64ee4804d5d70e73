"""Execute every notebook in a fresh kernel, and write its outputs into it.

    python -m analysis.notebooks                  # all
    python -m analysis.notebooks throughput paper # some

Invariant: the same rows give the same file: no times, no counters, no paths of this machine.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from analysis import whole
from sweeps.command_line import Parser

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
SOCKETS = Config(KernelManager={"transport": "ipc"})
"""A kernel is spoken to through files of this user, not through ports."""


def executed(name: str) -> nbformat.NotebookNode:
    """The notebook with its outputs, cells numbered. CellExecutionError where a cell raises."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder  # nothing of the user's profile, no history left in it
        known = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *known])
        options: Any = {"timeout": 120, "record_timing": False}
        place = {"metadata": {"path": str(ROOT)}}
        NotebookClient(notebook, config=SOCKETS, resources=place, **options).execute()
    for number, cell in enumerate(notebook.cells):
        cell |= {"id": f"cell-{number}", "metadata": {}}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    known_as = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook.metadata = nbformat.from_dict(known_as)
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 where a name is unknown, 1 where a cell raises, with one line."""
    parser = Parser(prog="python -m analysis.notebooks", description="Execute the notebooks again.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(NAMES)}")
    names = parser.parse_args(arguments).names or NAMES
    if unknown := ", ".join(sorted(set(names) - set(NAMES))):
        remedy = "make analysis/notebooks/NAME.ipynb"
        told = f"error: NAME: got {unknown}, allowed {', '.join(NAMES)}; {remedy}"
        print(told, file=sys.stderr)
        return 2
    for name in names:
        try:
            text = nbformat.writes(executed(name))
        except CellExecutionError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
        whole.write(FOLDER / f"{name}.ipynb", f"{text}\n".encode())
        print(FOLDER / f"{name}.ipynb", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
