"""Execute every notebook: its percent script in a fresh kernel, the outputs written into the .ipynb beside it.

    python -m analysis.notebooks                  # all
    python -m analysis.notebooks throughput paper # some

Invariant: the same rows give the same file: no times, no counters of runs, no paths of this machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from analysis import whole
from sweeps.command_line import Parser

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")))
TIMEOUT_S = 120
"""For one cell; a notebook takes seconds."""
SOCKETS = Config(KernelManager={"transport": "ipc"})
"""A kernel is spoken to through files of this user, not through ports."""


def notebook_of(name: str) -> nbformat.NotebookNode:
    """The script as a notebook without outputs; cells are numbered, so that ids do not change from run to run."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata = nbformat.NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"}, language_info={"name": "python"}
    )
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
    return notebook


def executed(name: str) -> nbformat.NotebookNode:
    """The same with its outputs. CellExecutionError where a cell raises."""
    notebook = notebook_of(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder  # nothing of the user's profile, and no history left in it
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        options: Any = {"timeout": TIMEOUT_S, "record_timing": False, "resources": {"metadata": {"path": str(ROOT)}}}
        NotebookClient(notebook, config=SOCKETS, **options).execute()
    for cell in notebook.cells:
        cell["metadata"] = {}
        if "outputs" in cell:
            cell["outputs"] = joined(cell["outputs"])
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def joined(outputs: Sequence[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Printed text that follows printed text in one output: where a kernel cuts it is chance. Nothing changes places."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if found and output["output_type"] == "stream" == found[-1]["output_type"] and output["name"] == found[-1]["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 and one line on standard error where a name is unknown, 1 where a cell raises."""
    parser = Parser(prog="python -m analysis.notebooks", description="Execute the notebooks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all of {', '.join(NAMES)})")
    names = parser.parse_args(arguments).names or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        print(
            f"error: NAME: got {', '.join(unknown)}, allowed {', '.join(NAMES)}; write analysis/notebooks/NAME.py", file=sys.stderr
        )
        return 2
    for name in names:
        try:
            whole.write(FOLDER / f"{name}.ipynb", f"{nbformat.writes(executed(name))}\n".encode())
        except CellExecutionError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
        print(FOLDER / f"{name}.ipynb", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
