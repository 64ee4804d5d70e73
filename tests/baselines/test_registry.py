"""baselines.registry: what a system's name or its `implementation` may be, and that neither hides a
mistake."""

from __future__ import annotations

import dataclasses

import pytest

from baselines.registry import build
from sweeps.config import cell_from
from sweeps.outlook import outlooks
from tests.baselines.test_systems import make_spec
from tests.sweeps.test_config import composed

pytestmark = pytest.mark.slow


def config(**system):
    plain = composed("system=in_memory").config
    return {**plain, "system": {**plain["system"], **system}}


@pytest.mark.parametrize(
    "got", ["toy", "toy:", ":Toy", "toy.py:Toy:", "a b:Toy", "", 3, ["toy:Toy"]]
)
def test_an_implementation_that_names_no_class_is_one_line(got):
    with pytest.raises(
        ValueError,
        match=r"^system\.implementation: got [^\n]*, allowed MODULE:CLASS [^\n]*; correct it$",
    ):
        cell_from(config(name="toy", implementation=got))


def test_a_built_in_name_has_no_other_implementation():
    line = r"^system\.implementation: got 'toy:Toy' for in_memory, allowed null for a built-in system; [^\n]*name$"
    with pytest.raises(ValueError, match=line):
        cell_from(config(implementation="toy:Toy"))
    with pytest.raises(
        ValueError,
        match=r"^system: got 'toy', allowed in_memory, [^\n]* or give system\.implementation=",
    ):
        cell_from(config(name="toy"))


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        (
            "no_such_module:Toy",
            r"\(No module named 'no_such_module'\), allowed MODULE:CLASS that [^\n]*install what it needs",
        ),
        (
            "baselines.in_memory:Toy",
            "which baselines.in_memory does not have, allowed MODULE:CLASS that [^\n]*; correct it",
        ),
    ],
)
def test_an_implementation_that_is_not_there_is_one_line(implementation, words):
    spec = dataclasses.replace(make_spec(), implementation=implementation)
    with pytest.raises(
        ValueError, match=rf"^system\.implementation: got '{implementation}'[^\n]*{words}$"
    ):
        build("toy", spec)


def test_an_implementation_that_is_not_there_is_said_before_anything_runs():
    cell = cell_from(config(name="toy", implementation="baselines.in_memory:Toy"))
    with pytest.raises(
        ValueError, match=r"^system\.implementation: got 'baselines\.in_memory:Toy', which [^\n]*$"
    ):
        outlooks([cell])


def test_where_the_code_lies_is_no_part_of_what_a_cell_is_known_by():
    here, there = (
        cell_from(config(name="toy", implementation=f"{module}:Toy"))
        for module in ("here", "there")
    )
    assert here.hash == there.hash != cell_from(config()).hash
    assert (here.implementation, here.spec().implementation) == ("here:Toy", "here:Toy")
    assert "implementation" not in here.options
    assert cell_from(config(implementation=None)).hash == cell_from(config()).hash
