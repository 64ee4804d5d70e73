"""Rows -> a table, an answer in one sentence and a figure: on the terminal, and as report.md, .tex, .png and .pdf.

    python -m analysis report PATH... [--x PATH --hue PATH] [--out DIR]

One section a study, run and, where shapes differ and nothing else does, shape. Invariant: reads rows, never changes them; a
report is written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis import answers, figures, names, rows, speeds, studies, tables, timeline, whole
from analysis.figures import step, style
from analysis.studies import Study

CPU_NOTE = "CPU speeds prove wiring and numerics; they say nothing about GPUs."


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table with its figure. lines: of one run."""

    study: Study
    lines: pd.DataFrame

    @property
    def title(self) -> str:
        """The study, and what was trained where."""
        first = self.lines.iloc[0]
        shapes = self.lines[["model", "batch_size", "seq_len"]].drop_duplicates()
        subject = f", {first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step" if len(shapes) == 1 else ""
        return f"{self.study.title}{subject}; {names.machine(first['machine_details'])}"

    @property
    def notes(self) -> list[str]:
        """What must be known beside the table."""
        on_cpu = not self.lines.iloc[0]["machine_details"].get("gpu")
        return [*tables.notes(self.lines), *([CPU_NOTE] if on_cpu else [])]


def sections(found: pd.DataFrame, *, x: str | None = None, hue: str | None = None) -> Iterator[Section]:
    """One a study and run. Raises ValueError, one line, for an axis that no row has."""
    for (name, _), part in studies.assigned(found).groupby(["study", "run"], sort=False):
        lines = speeds.lines(part)
        study = studies.of_rows(str(name), lines, x=x, hue=hue)
        if study.figure == "comparison" or study.x is None:
            for _, shape in lines.groupby(["model", "batch_size", "seq_len"], sort=False):
                yield Section(study=study, lines=shape)
        else:
            yield Section(study=study, lines=lines)


def markdown(section: Section, picture: str) -> str:
    """One section as Markdown."""
    shown = [
        section.title,
        answers.sentence(section.study, section.lines),
        tables.markdown(tables.of(section.study, section.lines)),
    ]
    listed = "\n".join(f"- {note}" for note in section.notes)
    image = f"![{section.study.title}]({picture})" if picture else ""
    return "\n\n".join(filter(None, [f"## {shown[0]}", *shown[1:], listed, image])) + "\n"


def latex(section: Section) -> str:
    """One section's table as a paper includes it."""
    return tables.latex(tables.of(section.study, section.lines), section.title, section.study.name)


def save(found: list[Section], folder: Path, name: str = "report") -> list[Path]:
    """Write NAME.md, and NAME.png and NAME.pdf (numbered where there are several); remove those of an earlier report."""
    wanted: dict[Path, bytes] = {}
    texts = []
    for number, section in enumerate(found, 1):
        stem = name if len(found) == 1 else f"{name}-{number}"
        drawable = section.lines["tokens_per_s"].notna().any() and section.study.figure != "none"
        for kind in ("png", "pdf") if drawable else ():
            draw = lambda section=section: figures.of_study(section.study, section.lines)  # noqa: E731
            wanted[folder / f"{stem}.{kind}"] = style.drawn(draw, kind)
        texts.append(markdown(section, f"{stem}.png" if drawable else ""))
    wanted[folder / f"{name}.md"] = "\n".join(texts).encode()
    wanted[folder / f"{name}.tex"] = "\n".join(latex(section) for section in found).encode()
    for path, content in wanted.items():
        whole.write(path, content)
    for old in (*folder.glob(f"{name}.p[nd][gf]"), *folder.glob(f"{name}-[0-9]*.p[nd][gf]")):
        if old not in wanted:
            old.unlink()
    return list(wanted)


def show(section: Section, console: Console) -> None:
    """Print one section: title, table, sentence, notes."""
    console.print(section.title, markup=False, highlight=False, style="bold")
    table = tables.of(section.study, section.lines)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for line in table.itertuples(index=False):
        drawn.add_row(*map(str, line))
    console.print(drawn)
    console.print(answers.sentence(section.study, section.lines), markup=False, highlight=False, style="bold")
    for note in section.notes:
        console.print(note, markup=False, highlight=False, style="dim")
    console.print()


def timelines(folder: Path, out: Path) -> list[Path]:
    """The steps recorded beside the rows (measure.trace=true), a picture each; the paths written."""
    written = []
    for path in sorted((folder / "traces").glob(f"*{timeline.SUFFIX}")):
        steps = timeline.load(path)
        target = out / f"{path.name.removesuffix('.json')}.png"
        whole.write(target, style.drawn(lambda steps=steps: step.draw(steps, steps[0].name)))  # type: ignore[misc]
        written.append(target)
    return written


def report(paths: list[str], out: Path | None, *, x: str | None, hue: str | None, console: Console) -> list[Path]:
    """Print and write the report of these sources; the paths written. Raises ValueError, one line, for bad input."""
    found = rows.frame(*paths)
    told = list(sections(found, x=x, hue=hue))
    beside = Path(str(found["source"].iloc[0])).parent
    folder = out or beside
    if out is None and not beside.is_dir():
        raise ValueError(f"--out: got nothing, allowed a folder where rows come from W&B ({beside}); give one")
    folder.mkdir(parents=True, exist_ok=True)
    for section in told:
        show(section, console)
    return [*save(told, folder), *timelines(beside, folder)]
