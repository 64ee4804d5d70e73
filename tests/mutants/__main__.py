"""Makes each wrong change in a copy of the tree and asks the tests whether they notice.

    python -m tests.mutants [--only ID ...] [--jobs N]

A change is put to its own tests first and, where they pass, to all of the engine's.
The unchanged tree must pass the same tests, or nothing is said. Exit code 1 where a change survives
that is not marked equivalent, or where the catalogue does not fit the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("engine", "baselines", "sweeps", "analysis", "conf", "docs", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results")
CATALOGUE_TESTS = "tests/mutants/test_mutants.py"
LIMIT_S = 1800
"""Seconds for one run of tests; a change that makes them hang was noticed."""
PYTEST = ("-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", "--timeout=300")

Tests = tuple[str, ...]
Found = dict[str, str]
"""Id -> the test that noticed the change, or "" where none did."""


def engine_tests() -> Tests:
    """The files of tests/engine that look at no other room, and those that a change names.

    Not the one that fails on any change: whether the catalogue fits the tree tells nothing of it.
    """
    others = tuple(f"from {room}" for room in ("baselines", "sweeps", "analysis"))
    found = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    for path in (ROOT / "tests" / "engine").glob("test_*.py"):
        text = path.read_text()
        if "from engine" in text and not any(other in text for other in others):
            found.add(str(path.relative_to(ROOT)))
    return tuple(sorted((found | {"tests/engine/test_engine_parity.py"}) - {CATALOGUE_TESTS}))


def misfits(mutants: Iterable[Mutant]) -> list[str]:
    """One line for each change whose old text does not occur exactly once."""
    counts = {m: (ROOT / m.file).read_text().count(m.old) for m in mutants}
    return [
        f"tests/mutants/catalogue.py: {m.id}: {m.old!r} occurs {n} times in {m.file}, allowed once"
        for m, n in counts.items()
        if n != 1
    ]


def judge(mutants: Sequence[Mutant], *, jobs: int, everything: Tests) -> Found:
    """Each change put to its own tests, then to everything."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        found = _round(mutants, [m.tests for m in mutants], Path(scratch), jobs)
        left = [m for m in mutants if not found[m.id] and not m.equivalent]
        return found | _round(left, [everything] * len(left), Path(scratch), jobs)


def _round(mutants: Sequence[Mutant], tests: Sequence[Tests], scratch: Path, jobs: int) -> Found:
    every = tuple(dict.fromkeys(test for asked in tests for test in asked))
    if every and (failed := _noticed(scratch, None, every)):
        raise SystemExit(f"the unchanged tree fails {failed}; mend that first")
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(partial(_noticed, scratch), mutants, tests)
        return dict(zip((m.id for m in mutants), found, strict=True))


def _noticed(scratch: Path, mutant: Mutant | None, tests: Tests) -> str:
    """The first test that fails on a copy of the tree with the change, "" where none does."""
    if not tests:
        return ""
    with tempfile.TemporaryDirectory(dir=scratch) as tree:
        for room in COPIED:
            shutil.copytree(ROOT / room, Path(tree) / room, ignore=LEFT_OUT)
        shutil.copy(ROOT / "pyproject.toml", tree)
        if mutant:
            changed = Path(tree) / mutant.file
            changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        noticed = _first_failure(Path(tree), scratch / "cache", tests)
    if mutant:
        print(f"{mutant.id:4} {mutant.file:26} {noticed or 'not noticed'}", flush=True)
    return noticed


def _first_failure(tree: Path, cache: Path, tests: Tests) -> str:
    """What fails first in `tree`; its kernels are compiled into `cache`, apart from the user's."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST, *tests]
    kept = {"capture_output": True, "text": True}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, timeout=LIMIT_S, **kept)
    except subprocess.TimeoutExpired:
        return f"the limit of {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    lines = done.stdout.splitlines()
    if done.returncode > 2:  # of pytest itself: no such test, none found
        raise SystemExit(f"pytest ended with {done.returncode} on {' '.join(tests)}: {lines[-1:]}")
    failures = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].split(" ", 1)[1] if failures else f"exit code {done.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The table, and whether every change was noticed that can be."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    known = {m.id: m for m in MUTANTS}
    parser.add_argument("--only", nargs="+", metavar="ID", choices=known, default=list(known))
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    options = parser.parse_args(arguments)
    mutants = [known[name] for name in dict.fromkeys(options.only)]
    if lines := misfits(mutants):
        print("\n".join(lines))
        return 1
    return report(mutants, judge(mutants, jobs=options.jobs, everything=engine_tests()))


def report(mutants: Sequence[Mutant], found: Found) -> int:
    """Print what became of each; 1 where one survives that is not equivalent."""
    survivors = [m for m in mutants if not found[m.id] and not m.equivalent]
    equivalent = [m for m in mutants if not found[m.id] and m.equivalent]
    print()
    for m in mutants:
        unnoticed = f"equivalent: {m.equivalent}" if m.equivalent else "SURVIVED"
        killer = f"killed by {found[m.id]}" if found[m.id] else unnoticed
        remark = " (though marked equivalent)" if found[m.id] and m.equivalent else ""
        print(f"{m.id:4} {m.file:26} {killer}{remark}")
    killed = len(mutants) - len(survivors) - len(equivalent)
    print(f"{killed} killed, {len(equivalent)} equivalent, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
