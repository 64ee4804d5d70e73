"""The record as pages: an index, one page a study, and the tables and numbers inside README and docs.

    python -m analysis docs

Invariant: the same rows give the same bytes; a page is written whole or not at all; nothing on it is typed by hand but the
question and the command, which studies.yaml has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from analysis import answers, names, numbers, record, studies, tables, whole
from analysis.studies import Study

ROOT = Path(__file__).parents[1]
FILLED = ("README.md", "docs/methods.md", "docs/design.md")
"""Pages written by hand whose markers are filled."""
TABLE = re.compile(r"<!-- table:([^ ]+) -->\n.*?<!-- /table -->", re.DOTALL)
FIGURES = Path("figures")


def pages(lines: pd.DataFrame, results: Path = record.RESULTS) -> Iterator[tuple[Path, str]]:
    """(path, text) of the index and of every study's page. lines: of all runs, with `superseded`."""
    found = list(lines["study"].unique())
    known = [study.name for study in studies.all_studies() if study.name in found]
    order = [*known, *sorted(set(found) - set(known))]
    chosen = {name: studies.of_rows(name, lines[lines["study"] == name]) for name in order}
    yield results / "README.md", index(chosen, lines, results)
    for name, study in chosen.items():
        yield results / name / "README.md", page(study, lines[lines["study"] == name], results)


def index(chosen: dict[str, Study], lines: pd.DataFrame, results: Path) -> str:
    """What was asked, and what the rows answer, a line a study."""
    told = []
    for name, study in chosen.items():
        mine = lines[(lines["study"] == name) & ~lines["superseded"]]
        run = numbers.lead(study, mine)
        told.append(
            {
                "study": f"[{study.title}]({name}/README.md)",
                "answer": answers.sentence(study, mine[mine["run"] == run]),
                "machine": names.machine(mine[mine["run"] == run]["machine_details"].iloc[0]),
                "runs": str(mine["run"].nunique()),
            }
        )
    overview = "\n\n".join(f"![{title}]({path})" for title, path in overviews(results))
    return (
        "# What was measured\n\n"
        "One line a study. The page behind it has every run, its table, the command that measures it again and its origin.\n"
        "Everything here is made from the rows by `make docs`; nothing is typed.\n\n"
        f"{tables.markdown(pd.DataFrame(told))}\n\n{overview}\n"
    )


def overviews(results: Path) -> Iterator[tuple[str, str]]:
    """Title and path of the pictures that span studies, as far as they are drawn."""
    for name, title in (
        ("rivals", "The engine over each rival, run by run"),
        ("pareto", "Throughput against memory"),
        ("memory", "What fills the memory"),
        ("timeline", "One recorded step"),
        ("paper", "The paper's numbers beside these"),
    ):
        if (results / FIGURES / f"{name}.png").exists():
            yield title, f"{FIGURES}/{name}.png"


def page(study: Study, lines: pd.DataFrame, results: Path) -> str:
    """Question, answer, picture, a table a run, the command, and where the rows come from."""
    current = lines[~lines["superseded"]]
    shown = current if len(current) else lines
    run = numbers.lead(study, shown)
    runs = [run, *sorted(set(shown["run"]) - {run}, reverse=True)]
    picture = results / FIGURES / f"{study.name}.png"
    parts = [
        f"# {study.title}",
        study.question,
        answers.sentence(study, shown[shown["run"] == run]),
        f"![{study.title}](../{FIGURES}/{study.name}.png)" if picture.exists() else "",
        *(_run(study, shown[shown["run"] == one]) for one in runs),
        _again(study, shown[shown["run"] == run]),
        provenance(lines),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _run(study: Study, mine: pd.DataFrame) -> str:
    first = mine.iloc[0]
    shapes = mine[["model", "batch_size", "seq_len"]].drop_duplicates()
    subject = f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step, " if len(shapes) == 1 else ""
    listed = "\n".join(f"- {note}" for note in tables.notes(mine))
    head = f"## {first['run'][:10]}: {names.machine(first['machine_details'])}"
    about = f"{subject[:1].upper()}{subject[1:]}run `{first['run']}`."
    return "\n\n".join(filter(None, [head, about, tables.markdown(tables.of(study, mine)), listed]))


def _again(study: Study, mine: pd.DataFrame) -> str:
    if not study.command:
        return ""
    known = [seconds for seconds in mine["cell_s"] if seconds is not None and not pd.isna(seconds)]
    took = f"Its cells took {sum(known) / 60:.0f} minutes in this run.\n\n" if len(known) == len(mine) else ""
    return f"## Measure it again\n\n{took}```bash\n{study.command}\npython -m analysis add outputs/{study.experiments[0]}\n```"


def provenance(lines: pd.DataFrame) -> str:
    """Which file, machine, commit and versions each run's rows come from."""
    told = []
    for run, mine in sorted(lines.groupby("run"), reverse=True):
        first = mine.iloc[0]
        commits = ", ".join(sorted({str(one)[:9] for one in mine["git_commit"] if one}))
        versions = first["versions"]
        told.append(
            {
                "run": f"[{run}]({run}.jsonl)",
                "machine": names.machine(first["machine_details"]),
                "commit": commits,
                "torch": str(versions.get("torch", "")),
                "deepspeed": str(versions.get("deepspeed", "")),
                "state": "superseded" if first["superseded"] else "shown",
            }
        )
    return f"## Where the rows come from\n\n{tables.markdown(pd.DataFrame(told))}"


def filled(text: str, lines: pd.DataFrame) -> str:
    """A page written by hand with its tables and numbers as the rows give them."""

    def table(match: re.Match[str]) -> str:
        place, *rest = match[1].split("/")
        name, _, run = place.partition("@")
        mine = lines[(lines["study"] == name) & ~lines["superseded"]]
        if not len(mine):
            raise ValueError(
                f"table:{match[1]}: got {name!r}, allowed {', '.join(sorted(lines['study'].unique()))}; mend the marker"
            )
        study = studies.of_rows(name, mine)
        wanted = mine[mine["run"].str.endswith(run)] if run else mine[mine["run"] == numbers.lead(study, mine)]
        shown = tables.of(study, wanted)[: int(rest[0]) if rest else None]
        return f"<!-- table:{match[1]} -->\n{tables.markdown(shown)}\n<!-- /table -->"

    current = lines[~lines["superseded"]]
    return numbers.fill(TABLE.sub(table, text), current)


def refresh(results: Path = record.RESULTS, root: Path = ROOT) -> list[Path]:
    """Write every page anew; the paths that changed. Raises ValueError, one line, before anything is written."""
    lines = record.lines(results)
    wanted: dict[Path, str] = dict(pages(lines, results))
    for name in FILLED:
        if (path := root / name).exists():
            wanted[path] = filled(path.read_text(encoding="utf-8"), lines)
    changed = []
    for path, text in wanted.items():
        content = text.encode()
        if not path.exists() or path.read_bytes() != content:
            whole.write(path, content)
            changed.append(path)
    return changed
