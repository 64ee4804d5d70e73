"""The record as pages: an index, a page a study, and the tables and numbers inside README and docs.

    python -m analysis docs

Invariant: the same rows give the same bytes; a page is written whole or not at all; nothing on it
is typed by hand but the question and the command, which studies.yaml has.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from analysis import answers, figures, names, numbers, record, studies, tables, whole
from analysis.studies import Study

ROOT = Path(__file__).parents[1]
FILLED = ("README.md", "docs/methods.md", "docs/design.md")
"""Pages written by hand whose markers are filled."""
TABLE = re.compile(r"<!-- table:([^ ]+) -->\n.*?<!-- /table -->", re.DOTALL)
FIGURES = Path("figures")


def pages(lines: pd.DataFrame, results: Path = record.RESULTS) -> Iterator[tuple[Path, str]]:
    """(path, text) of the index and of every study's page. lines: those of `record.lines`."""
    yield results / "README.md", index(lines, results)
    for study, mine in studies.shown(lines):
        picture = FIGURES / f"{study.name}.png"
        parts = [
            body(study, mine, f"../{picture}" if (results / picture).exists() else ""),
            _again(study, studies.leading(study, mine)),
            provenance(lines[lines["study"] == study.name]),
        ]
        yield results / study.name / "README.md", "\n\n".join(filter(None, parts)) + "\n"


def index(lines: pd.DataFrame, results: Path) -> str:
    """What was asked, and what the rows answer, a line a study."""
    told = [
        {
            "study": f"[{study.title}]({study.name}/README.md)",
            "answer": answers.answer(study, mine).sentence,
            "machine": names.machine(studies.leading(study, mine).iloc[0]["machine_details"]),
            "runs": str(mine["run"].nunique()),
        }
        for study, mine in studies.shown(lines)
    ]
    titles = {name: module.TITLE for name, module in figures.overviews().items()}
    titles["timeline"] = "One recorded step"
    drawn = [
        f"![{title}]({FIGURES / name}.png)"
        for name, title in titles.items()
        if (results / FIGURES / f"{name}.png").exists()
    ]
    head = (
        "# What was measured\n\n"
        "One line a study. The page behind it has every run, its table, the command that measures "
        "it again and its origin.\n"
        "Everything here is made from the rows by `make docs`; nothing is typed."
    )
    return "\n\n".join([head, tables.markdown(pd.DataFrame(told)), *drawn]) + "\n"


def body(study: Study, mine: pd.DataFrame, picture: str, *, energy: bool = False) -> str:
    """Question, answer, picture, and a table a run, the leading one first; with joules and clocks
    where `energy` asks for them."""
    lead = studies.leading(study, mine)
    first = lead.iloc[0]["run"]
    parts = [
        f"# {study.title}",
        study.question,
        answers.answer(study, mine).sentence,
        f"![{study.title}]({picture})" if picture else "",
    ]
    for run in [first, *sorted(set(mine["run"]) - {first}, reverse=True)]:
        here = studies.parts(study, mine[mine["run"] == run])
        parts += [_run(study, part, energy) for part in here]
    return "\n\n".join(filter(None, parts))


def _run(study: Study, mine: pd.DataFrame, energy: bool) -> str:
    first = mine.iloc[0]
    work = names.work(mine) if mine["batch_size"].nunique() * mine["seq_len"].nunique() == 1 else ""
    about = f"{work}, run `{first['run']}`." if work else f"run `{first['run']}`."
    notes = "\n".join(f"- {note}" for note in tables.notes(mine))
    head = f"## {first['run'][:10]}: {names.machine(first['machine_details'])}"
    table = tables.markdown(tables.of(study, mine, energy=energy))
    return "\n\n".join(filter(None, [head, about[0].upper() + about[1:], table, notes]))


def _again(study: Study, mine: pd.DataFrame) -> str:
    """The command that measures a study again, and how long its cells took."""
    if not study.command:
        return ""
    minutes = mine["cell_s"].sum() / 60
    took = f"Its cells took {minutes:.0f} minutes in this run.\n\n"
    known = took if mine["cell_s"].notna().all() else ""
    add = f"python -m analysis add outputs/{study.experiments[0]}"
    return f"## Measure it again\n\n{known}```bash\n{study.command}\n{add}\n```"


def provenance(lines: pd.DataFrame) -> str:
    """Which file, machine, commit and versions each run's rows come from."""
    told = []
    for run, mine in sorted(lines.groupby("run"), reverse=True):
        first = mine.iloc[0]
        commits = sorted({str(one)[:9] for one in mine["git_commit"] if one})
        told.append(
            {
                "run": f"[{run}]({run}.jsonl)",
                "machine": names.machine(first["machine_details"]),
                "commit": ", ".join(commits),
                "torch": str(first["versions"].get("torch", "")),
                "deepspeed": str(first["versions"].get("deepspeed", "")),
                "state": "superseded" if first["superseded"] else "shown",
            }
        )
    return f"## Where the rows come from\n\n{tables.markdown(pd.DataFrame(told))}"


def filled(text: str, lines: pd.DataFrame) -> str:
    """A page written by hand with its tables and numbers as the rows give them."""
    current = lines[~lines["superseded"]]

    def table(match: re.Match[str]) -> str:
        place, _, length = match[1].partition("/")
        try:
            mine = numbers.run_of(place, current)
        except ValueError as error:
            raise ValueError(f"table:{match[1]}: {error}") from None
        shown = tables.of(studies.of_rows(mine.iloc[0]["study"], mine), mine)
        told = tables.markdown(shown[: int(length) if length else None])
        return f"<!-- table:{match[1]} -->\n{told}\n<!-- /table -->"

    return numbers.fill(TABLE.sub(table, text), current)


def refresh(results: Path = record.RESULTS) -> list[Path]:
    """Write every page anew, README and docs too where the record is this repository's.

    The paths that changed. Raises ValueError, one line, and writes nothing.
    """
    lines = record.lines(results)
    wanted = dict(pages(lines, results))
    for path in (ROOT / name for name in FILLED if results.samefile(record.RESULTS)):
        wanted[path] = filled(path.read_text(encoding="utf-8"), lines)
    return whole.write_changed({path: text.encode() for path, text in wanted.items()})
