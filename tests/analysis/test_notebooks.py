"""The committed notebooks say what they say when they run again; their pictures are small."""

from __future__ import annotations

import base64
import re
from typing import Any

import nbformat
import pytest

from analysis.notebooks.run import FOLDER, NAMES, executed

LARGEST_BYTES = 150_000


def committed(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def pictures(notebook: Any) -> list[bytes]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [
        base64.b64decode(output["data"]["image/png"])
        for output in outputs
        if "image/png" in output.get("data", {})
    ]


def words(notebook: Any) -> list[str]:
    """What its outputs say, pictures apart (their bytes may differ between versions of
    matplotlib)."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output["text"]
            data = output.get("data", {})
            found.append(
                str(
                    output.get("text")
                    or data.get("text/markdown")
                    or data.get("text/html")
                    or sorted(data)
                )
            )
    return found


def test_the_notebooks_that_the_readme_promises_are_there() -> None:
    assert NAMES == ("ablations", "convergence", "memory", "overlap", "paper", "throughput")


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_small_and_of_nobody_s_machine(name: str) -> None:
    notebook = committed(name)
    assert all(len(picture) < LARGEST_BYTES for picture in pictures(notebook))
    assert not re.search(r"/tmp/|/home/|/root/|/work/", nbformat.writes(notebook)), (
        "a path of somebody's machine"
    )


def test_together_they_are_light_enough_for_a_repository_page() -> None:
    assert sum((FOLDER / f"{name}.ipynb").stat().st_size for name in NAMES) <= 1_500_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_says_what_the_committed_one_says(name: str) -> None:
    again = executed(name)
    assert words(again) == words(committed(name)), "python -m analysis notebooks"
    assert len(pictures(again)) == len(pictures(committed(name)))
