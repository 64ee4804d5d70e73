"""The wrong changes that tests must notice: they fit the engine, and the runner tells them
apart."""

import ast
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.blocks import Blocks
from engine.step import Op, operations
from tests.engine.test_schedule import placements
from tests.mutants.__main__ import ROOT, engine_tests, judge, main, misfits, report
from tests.mutants.catalogue import EQUIVALENT, MUTANTS, Mutant

BY_ID = {mutant.id: mutant for mutant in MUTANTS}


def changed(mutant: Mutant) -> str:
    return (ROOT / mutant.file).read_text().replace(mutant.old, mutant.new)


def test_each_change_has_an_id_of_its_own_and_an_old_text_that_occurs_once():
    assert len(BY_ID) == len(MUTANTS)
    assert set(EQUIVALENT) <= set(BY_ID)
    assert misfits(MUTANTS) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.id)
def test_each_change_parses_and_names_tests_that_there_are(mutant):
    """A change that is no Python would be found by any import."""
    if mutant.file.endswith(".py"):
        before = ast.dump(ast.parse((ROOT / mutant.file).read_text()))
        assert ast.dump(ast.parse(changed(mutant))) != before
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file()


@pytest.mark.parametrize("name", [m.id for m in MUTANTS if m.equivalent and "step" in m.file])
def test_equivalent_declarations_derive_the_same_waits(name, monkeypatch):
    other = operations_of(changed(BY_ID[name]), monkeypatch)
    for combination in itertools.product((2, 5), (1, 2), (1, 3), (1, 2)):
        for blocks in placements(*combination):
            assert undeclared(other(blocks)) == undeclared(operations(blocks))


def operations_of(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Blocks], tuple[Op, ...]]:
    """`operations` of a step.py with this text."""
    module = types.ModuleType("engine.changed_step")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
    exec(source, module.__dict__)
    return module.operations


def undeclared(ops: tuple[Op, ...]) -> list[str]:
    """Everything of operations but what they say that they read and write."""
    return [repr(replace(op, reads=frozenset(), writes=frozenset())) for op in ops]


def test_everything_is_all_that_a_change_names_but_not_what_fails_on_any_change():
    everything = engine_tests()
    named = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert named <= set(everything)
    assert "tests/engine/test_declared_access.py" in everything
    assert "tests/mutants/test_mutants.py" not in everything


@pytest.mark.slow
def test_the_runner_tells_killed_from_surviving_ones():
    """Neither has tests of its own, so both are put to everything."""
    asked = BY_ID["R4"].tests
    killed = replace(BY_ID["R4"], tests=())
    harmless = replace(killed, id="harmless", old="Peak learning rate.", new="The peak.")
    found = judge([killed, harmless], jobs=2, everything=asked)
    assert found == {"R4": f"{asked[0]}[cosine-expected2]", "harmless": ""}


def test_the_table_says_what_became_of_each(capsys):
    found = {"R1": "test_it", "R2": "", "S2": ""}
    equivalent = f"equivalent: {EQUIVALENT['S2']}"
    one, two, three = (BY_ID[name] for name in found)
    assert report([one, three], found) == 0
    assert table(capsys) == ["killed by test_it", equivalent, "1 killed, 1 equivalent, 0 survived"]
    assert report([two], found) == 1
    assert table(capsys) == ["SURVIVED", "0 killed, 0 equivalent, 1 survived"]
    assert report([three], {"S2": "test_it"}) == 0
    remark = "killed by test_it (though marked equivalent)"
    assert table(capsys) == [remark, "1 killed, 0 equivalent, 0 survived"]


def table(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, without names and files of changes."""
    lines = capsys.readouterr().out.strip().splitlines()
    return [*(line.split(maxsplit=2)[2] for line in lines[:-1]), lines[-1]]


def test_a_change_whose_old_text_moved_is_one_line(monkeypatch, capsys):
    moved = replace(BY_ID["R1"], old="no such text")
    monkeypatch.setattr("tests.mutants.__main__.MUTANTS", (moved,))
    assert main([]) == 1
    line = "R1: 'no such text' occurs 0 times in engine/recipe.py, allowed once"
    assert capsys.readouterr().out == f"tests/mutants/catalogue.py: {line}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "R99"])
