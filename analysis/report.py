"""Rows as Markdown: a report of any rows, and the record's pages with the numbers inside README.

    python -m analysis report PATH... [--x PATH --hue PATH] [--out DIR]
    python -m analysis docs

One section a study. Invariant: the same rows give the same bytes; everything is drawn before
anything is written, and nothing on a page is typed by hand but the question and the command, which
studies.yaml has.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markdown import Markdown

from analysis import answers, figures, names, numbers, record, rows, speeds, studies, tables, whole
from analysis.figures import of_study, step, style
from analysis.studies import Study

ROOT = Path(__file__).parents[1]
FILLED = ("README.md", "docs/methods.md", "docs/design.md")
"""Pages written by hand whose markers are filled."""
FIGURES = Path("figures")


def sections(
    found: pd.DataFrame, *, x: str | None = None, hue: str | None = None
) -> Iterator[tuple[Study, pd.DataFrame]]:
    """Each study with its lines. Raises ValueError, one line, for an axis that no row has."""
    for name, part in studies.assigned(found).groupby("study", sort=False):
        lines = speeds.lines(part)
        yield studies.of_rows(str(name), lines, x=x, hue=hue), lines


def markdown(study: Study, lines: pd.DataFrame, picture: str = "") -> str:
    """Question, answer, picture, and a table a run, the leading one first."""
    first = studies.leading(study, lines).iloc[0]["run"]
    parts = [f"# {study.title}", study.question, answers.answer(study, lines)]
    parts += [f"![{study.title}]({picture})"] if picture else []
    for run in [first, *sorted(set(lines["run"]) - {first}, reverse=True)]:
        here = studies.parts(study, lines[lines["run"] == run])
        parts += [part for mine in here for part in _run(study, mine)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _run(study: Study, mine: pd.DataFrame) -> list[str]:
    run = mine.iloc[0]["run"]
    about = ", ".join(filter(None, [names.work(mine), f"run `{run}`."]))
    return [
        f"## {run[:10]}: {names.machine(mine)}",
        about[0].upper() + about[1:],
        tables.markdown(tables.of(study, mine)),
        "\n".join(f"- {note}" for note in tables.notes(mine)),
    ]


def report(
    paths: list[str], out: Path | None, *, x: str | None, hue: str | None, console: Console
) -> list[Path]:
    """Print and write the report of these sources; its paths. Raises ValueError, one line."""
    found = rows.frame(*paths)
    told = list(sections(found, x=x, hue=hue))
    beside = Path(str(found["source"].iloc[0])).parent
    folder = out or beside
    if out is None and not beside.is_dir():
        allowed = f"allowed a folder where rows come from W&B ({beside})"
        raise ValueError(f"--out: got nothing, {allowed}; give one")
    drawings, texts = {}, []
    for path in sorted((beside / "traces").glob(f"*{step.SUFFIX}")):  # measure.trace=true
        steps = step.load(path)
        drawings[path.name.removesuffix(".json")] = partial(step.draw, steps, steps[0].name)
    for number, (study, lines) in enumerate(told, 1):
        stem = "report" if len(told) == 1 else f"report-{number}"
        if of_study.drawable(study, lines):
            drawings[stem] = partial(of_study.draw, study, lines)
        texts.append(markdown(study, lines, f"{stem}.png" if stem in drawings else ""))
        console.print(Markdown(markdown(study, lines)))
    wanted = {
        folder / f"{stem}.{kind}": style.drawn(draw, kind)
        for stem, draw in drawings.items()
        for kind in ("png", "pdf")
    }
    wanted[folder / "report.md"] = "\n".join(texts).encode()
    wanted[folder / "report.tex"] = "\n".join(tables.latex(*section) for section in told).encode()
    ours = ("report.p[nd][gf]", "report-[0-9]*.p[nd][gf]")
    whole.write_changed(wanted, [path for pattern in ours for path in folder.glob(pattern)])
    return list(wanted)


def pages(lines: pd.DataFrame, results: Path = record.RESULTS) -> Iterator[tuple[Path, str]]:
    """(path, text) of the index and of every study's page. lines: those of `record.lines`."""
    yield results / "README.md", index(lines, results)
    for study, mine in studies.shown(lines):
        picture = f"../{FIGURES / study.name}.png" if of_study.drawable(study, mine) else ""
        again = _again(study, studies.leading(study, mine))
        origin = provenance(lines[lines["study"] == study.name])
        parts = [markdown(study, mine, picture), again, origin]
        yield results / study.name / "README.md", "\n".join(filter(None, parts))


def index(lines: pd.DataFrame, results: Path) -> str:
    """What was asked, and what the rows answer, a line a study."""
    told = [
        {
            "study": f"[{study.title}]({study.name}/README.md)",
            "answer": answers.answer(study, mine),
            "machine": names.machine(studies.leading(study, mine)),
            "runs": str(mine["run"].nunique()),
        }
        for study, mine in studies.shown(lines)
    ]
    drawn = [
        f"![{title}]({FIGURES / name}.png)"
        for name, title in figures.TITLES.items()
        if (results / FIGURES / f"{name}.png").exists()
    ]
    head = (
        "# What was measured\n\n"
        "One line a study. The page behind it has every run, its table, the command that measures "
        "it again and its origin.\n"
        "Everything here is made from the rows by `make docs`; nothing is typed."
    )
    return "\n\n".join([head, tables.markdown(pd.DataFrame(told)), *drawn]) + "\n"


def _again(study: Study, mine: pd.DataFrame) -> str:
    """The command that measures a study again, and how long its cells took."""
    if not study.command:
        return ""
    took = f"Its cells took {mine['cell_s'].sum() / 60:.0f} minutes in this run.\n\n"
    known = took if mine["cell_s"].notna().all() else ""
    add = f"python -m analysis add outputs/{study.experiments[0]}"
    return f"## Measure it again\n\n{known}```bash\n{study.command}\n{add}\n```\n"


def provenance(lines: pd.DataFrame) -> str:
    """Which file, machine, commit and versions each run's rows come from."""
    told = []
    for run, mine in sorted(lines.groupby("run"), reverse=True):
        first = mine.iloc[0]
        told.append(
            {
                "run": f"[{run}]({run}.jsonl)",
                "machine": names.machine(mine),
                "commit": ", ".join(sorted({str(one)[:9] for one in mine["git_commit"] if one})),
                "torch": str(first["versions"].get("torch", "")),
                "deepspeed": str(first["versions"].get("deepspeed", "")),
                "state": "superseded" if first["superseded"] else "shown",
            }
        )
    return f"## Where the rows come from\n\n{tables.markdown(pd.DataFrame(told))}\n"


def refresh(results: Path = record.RESULTS) -> list[Path]:
    """Write every page anew, README and docs too where the record is this repository's.

    The paths that changed. Raises ValueError, one line, and writes nothing.
    """
    lines = record.lines(results)
    wanted = dict(pages(lines, results))
    for path in (ROOT / name for name in FILLED if results.samefile(record.RESULTS)):
        wanted[path] = numbers.fill(path.read_text(encoding="utf-8"), lines)
    return whole.write_changed({path: text.encode() for path, text in wanted.items()})
