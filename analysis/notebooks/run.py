"""Every notebook executed in a fresh kernel, and its outputs written into it.

Invariant: the same rows give the same file: no times, no counters, no paths of this machine.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from analysis import record

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))


def executed(name: str) -> nbformat.NotebookNode:
    """The notebook with its outputs. ValueError, one line, where a cell raises."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(FOLDER.parents[1])}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder  # nothing of the user's profile, no history left in it
        try:
            # Spoken to through files of its own: not through ports, nor those of another kernel.
            kernel = {"transport": "ipc", "ip": f"{folder}/kernel"}
            quiet = Config(
                KernelManager=kernel, NotebookClient={"timeout": 120, "record_timing": False}
            )
            NotebookClient(notebook, config=quiet, resources=place).execute()
        except CellExecutionError as error:
            raise ValueError(f"{name}.ipynb: {error.ename}: {error.evalue}") from None
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def execute() -> Iterator[Path]:
    """Execute all of them; the path of each as it is written."""
    for name in NAMES:
        path = FOLDER / f"{name}.ipynb"
        record.write(path, f"{nbformat.writes(executed(name))}\n".encode())
        yield path
