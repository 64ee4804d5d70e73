"""Rows as Markdown: a report of any rows, and the record's pages with the numbers inside README.

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

from analysis import answers, figures, names, numbers, record, rows, speeds, studies, tables
from analysis.figures import of_study, step, style
from analysis.studies import Study

ROOT = Path(__file__).parents[1]
FILLED = ("README.md", "docs/methods.md", "docs/design.md", "docs/disk.md")
"""Pages written by hand whose markers are filled."""
FIGURES = Path("figures")


def sections(
    found: pd.DataFrame, *, x: str | None = None, hue: str | None = None
) -> Iterator[tuple[Study, pd.DataFrame]]:
    """Each study with its lines. Raises ValueError, one line, for an axis that no row has."""
    for name, part in studies.assigned(found).groupby("study", sort=False):
        lines = speeds.lines(part)
        study = studies.of_rows(str(name), lines, x=x, hue=hue)
        yield study, studies.said_once(study, lines)


def markdown(study: Study, lines: pd.DataFrame, picture: str = "") -> str:
    """Question, answer, picture, and a table a run, the leading one first."""
    first = studies.leading(study, lines).iloc[0]["run"]
    parts = [f"# {study.title}", study.question, answers.answer(study, lines)]
    parts += [f"![{study.title}]({picture})"] if picture else []
    for run in [first, *sorted(set(lines["run"]) - {first}, reverse=True)]:
        for mine in studies.parts(study, lines[lines["run"] == run]):
            about = ", ".join(filter(None, [names.work(mine), f"run `{run}`."]))
            parts += [f"## {run[:10]}: {names.machine(mine)}", about[0].upper() + about[1:]]
            parts += [tables.markdown(tables.of(study, mine))]
            told = [*tables.notes(mine), *filter(None, [study.notes.get(run)])]
            parts += ["\n".join(f"- {note}" for note in told)]
    return "\n\n".join(filter(None, parts)) + "\n"


COMMANDS = (
    "The command measures what has no row yet, and first prints how long that should take. "
    "`python` is `.venv/bin/python`, which `make install` makes."
)
"""Said above the commands of a page."""


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
        drawings[path.name.removesuffix(".json")] = partial(step.draw, steps)
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
    record.write_changed(wanted, [path for pattern in ours for path in folder.glob(pattern)])
    return list(wanted)


def pages(lines: pd.DataFrame, results: Path = record.RESULTS) -> Iterator[tuple[Path, str]]:
    """(path, text) of the index and of every study's page. lines: those of `record.lines`."""
    yield results / "README.md", index(lines, results)
    for study, mine in studies.shown(lines):
        picture = f"../{FIGURES / study.name}.png" if of_study.drawable(study, mine) else ""
        text = markdown(study, mine, picture)
        if study.command:
            took = studies.leading(study, mine)["cell_s"].sum(min_count=1, skipna=False) / 60
            known = f"The rows of the run in the first table took {took:.0f} minutes. "
            add = f"python -m analysis add outputs/{study.experiments[0]}"
            text += f"\n## Measure it again\n\n{'' if pd.isna(took) else known}{COMMANDS}\n\n"
            text += f"```bash\n{study.command}\n{add}\n```\n"
        origin = tables.markdown(provenance(lines[lines["study"] == study.name]))
        text += f"\n## Where the rows come from\n\n{origin}\n"
        yield results / study.name / "README.md", text


def index(lines: pd.DataFrame, results: Path) -> str:
    """What was asked, and what the rows answer, a line a study."""
    told = [
        {
            "study": f"[{study.title}]({study.name}/README.md)",
            "answer": answers.answer(study, mine),
            "machine": names.machine(answers.lines_of(study, mine)),
            "runs": str(mine["run"].nunique()),
        }
        for study, mine in studies.shown(lines)
    ]
    drawn = [
        f"![{title}]({FIGURES / name}.png)"
        for name, title in figures.TITLES.items()
        if (results / FIGURES / f"{name}.png").exists()
    ]
    head = "# What was measured\n\nOne line a study. The page behind it has every run, its table, "
    head += "the command that measures it again and its origin.\n"
    head += "Everything here is made from the rows by `make docs`; nothing is typed."
    return "\n\n".join([head, tables.markdown(pd.DataFrame(told)), *drawn]) + "\n"


def provenance(lines: pd.DataFrame) -> pd.DataFrame:
    """Which file, machine, commit and versions each run's rows come from."""
    told = [
        {
            "run": f"[{run}]({run}.jsonl)",
            "machine": names.machine(mine),
            "commit": ", ".join(sorted({str(one)[:9] for one in mine["git_commit"] if one})),
            "torch": mine["versions"].iloc[0].get("torch", ""),
            "deepspeed": mine["versions"].iloc[0].get("deepspeed", ""),
            "state": "superseded" if mine["superseded"].iloc[0] else "shown",
        }
        for run, mine in sorted(lines.groupby("run"), reverse=True)
    ]
    return pd.DataFrame(told)


def refresh(results: Path = record.RESULTS) -> list[Path]:
    """Write every page anew, README and docs too where the record is this repository's; the paths
    that changed. Raises ValueError, one line, and writes nothing."""
    lines = record.lines(results)
    wanted = dict(pages(lines, results))
    for path in (ROOT / name for name in FILLED if results.samefile(record.RESULTS)):
        wanted[path] = numbers.fill(path.read_text(encoding="utf-8"), lines)
    return record.write_changed({path: text.encode() for path, text in wanted.items()})
