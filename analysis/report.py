"""Rows -> header, table, one plain sentence, and report.png, report.pdf, report.md, report.tex beside the rows.

    python -m analysis.report PATH...            # print everything, write the report beside the first path
    python -m analysis.report PATH... --out DIR  # write it there
    python -m analysis.report PATH... --readme   # print the Markdown table only, write nothing

Timelines in the folder `traces` beside the rows (measure.trace=true) are drawn too.

Invariant: reads rows, never changes them. A comparison of systems has one table and one figure for each (experiment, model, batch,
length, machine); a study of one system, or of one scale, has one of each for all its cells, by what differs among them
(analysis/studies.py). Every file is written whole or not at all (analysis/whole.py).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from analysis import load, machines, paper, studies, style, tables, whole
from analysis.compare import compare
from analysis.figures import ablation, quickstart, throughput, timeline
from analysis.latex import as_latex
from analysis.studies import Study
from analysis.timeline import SUFFIX
from analysis.verdict import sentence
from sweeps.command_line import Parser, mend_streams

PIPED_WIDTH = 100
"""Columns when the output is not a terminal."""


def header(frame: pd.DataFrame) -> list[str]:
    """Three lines on one group: what was trained, on what, and with which versions, when."""
    versions = [
        f"{name} {' / '.join(sorted(set(frame[f'{name}_version'].dropna())))}"
        for name in ("torch", "deepspeed")
        if frame[f"{name}_version"].notna().any()
    ]
    dates = sorted({str(date)[:10] for date in frame["started_at"].dropna() if date})
    span = dates[:1] if len(dates) < 2 else [f"{dates[0]} to {dates[-1]}"]
    commits = sorted({_short(str(commit)) for commit in frame["git_commit"].dropna()})
    told = [*versions, *span, *([f"commit {' / '.join(commits)}"] if commits else [])]
    first = frame.iloc[0]
    return [f"{first['experiment']}: {quickstart.heading(frame)}", str(first["machine_name"]), ", ".join(told)]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report: rows that one figure shows. `study` is None for a comparison of systems."""

    frame: pd.DataFrame
    study: Study | None = None

    @property
    def sheet(self) -> tables.Sheet:
        """Its table."""
        table = tables.sheet(compare(self.frame)) if self.study is None else tables.study_sheet(self.study)
        said = paper.printed(self.frame) if self.study is None else []
        return replace(table, notes=[*table.notes, *machines.notes(self.frame), *said])

    @property
    def sentence(self) -> str:
        """Its result."""
        if self.study is None:
            return sentence(compare(self.frame))
        if "system.depth" in self.study.factors:
            return paper.double_buffering(self.frame)
        return studies.sentence(self.study)

    def figure(self) -> Figure:
        """Its picture."""
        if self.study is None:
            return quickstart.figure(self.frame)
        return throughput.study_figure(self.frame) if self.study.kind == "scale" else ablation.figure(self.frame)


def sections(frame: pd.DataFrame) -> list[Section]:
    """What a report on these rows consists of, in order of first appearance."""
    found = []
    for _, rows in frame.groupby(["experiment", "machine_name"], sort=False, dropna=False):
        study = studies.study_of(rows)
        together = study.kind != "comparison"
        found += [Section(frame=rows, study=study)] if together else [Section(frame=part) for part in load.groups(rows)]
    return found


def parted(frame: pd.DataFrame) -> list[Section]:
    """`sections` of each JSONL file by itself, also when its rows come back from W&B (`load.by_file`)."""
    return [part for rows in load.by_file(frame) for part in sections(rows)]


def markdown(section: Section, image: str | None = None) -> str:
    """One section as Markdown: header, table, sentence, notes, and the figure if its file name is given."""
    title, machine, versions = header(section.frame)
    table = section.sheet
    picture = [f"![{title}]({image})"] if image else []
    listed = "\n".join(f"- {note}" for note in table.notes)
    parts = [
        f"## {title}",
        f"{machine}\\\n{versions}",
        tables.as_markdown(table).rstrip(),
        section.sentence,
        listed,
        *picture,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(section: Section, console: Console) -> None:
    """Print one section: header, table, sentence, notes."""
    for number, line in enumerate(header(section.frame)):
        console.print(line, markup=False, highlight=False, style="dim" if number else "bold")
    console.print()
    table = section.sheet
    compared = tables.terminal(compare(section.frame), console.width) if section.study is None else tables.terminal_sheet(table)
    console.print(compared)
    console.print()
    console.print(section.sentence, markup=False, highlight=False, style="bold")
    for note in table.notes:
        console.print(note, markup=False, highlight=False, style="dim")
    console.print()


def write(frame: pd.DataFrame, folder: Path, name: str) -> list[Path]:
    """Write name.png and name.pdf (name-<section> where there are several), one name.md and one name.tex; return the paths.

    Figures of the last report of this name that this one has no section for are removed.
    """
    parts, earlier = parted(frame), shown_before(folder, name)
    written: list[Path] = []
    texts = []
    for number, part in enumerate(parts, 1):
        stem = folder / (name if len(parts) == 1 else f"{name}-{number}-{_slug(part.frame)}")
        images = style.save(part.figure(), stem)
        written += images
        texts.append(markdown(part, images[0].name))
    page, tex = folder / f"{name}.md", folder / f"{name}.tex"
    whole.write(page, "\n".join(texts).encode())
    whole.write(tex, "\n".join(f"% {header(part.frame)[0]}\n{as_latex(part.sheet)}" for part in parts).encode())
    remove_stale(earlier, written)
    return [*written, page, tex]


def shown_before(folder: Path, name: str) -> list[Path]:
    """The figures of the last report of this name: those that its page shows under names that `write` gives, and their PDFs.

    A section's name that has a page of its own is another report's.
    """
    page = folder / f"{name}.md"
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    stems = re.findall(rf"^!\[[^]]*\]\(({re.escape(name)}(?:-\d+-[a-z0-9.-]+)?)\.png\)$", text, re.MULTILINE)
    mine = [stem for stem in stems if stem == name or not (folder / f"{stem}.md").exists()]
    return [folder / f"{stem}.{kind}" for stem in mine for kind in ("png", "pdf")]


def remove_stale(earlier: Iterable[Path], written: Sequence[Path]) -> None:
    """Remove the figures that were written earlier and not again."""
    for path in set(earlier) - set(written):
        path.unlink(missing_ok=True)


def timelines(frame: pd.DataFrame) -> list[Path]:
    """The timelines recorded beside the files that these rows come from."""
    folders = dict.fromkeys(Path(str(source)).parent / "traces" for source in frame["source"])
    return [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _short(commit: str) -> str:
    """Nine digits, and `-dirty` where the tree was not what the commit says."""
    digits, dash, dirty = commit.partition("-")
    return digits[:9] + dash + dirty


def _slug(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    words = f"{first['experiment']}-{first['model']}-{first['batch_size']}x{first['seq_len']}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-").lower()


def _console() -> Console:
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else PIPED_WIDTH)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m analysis.report", description="Table, figure and verdict from measured rows.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="rows, W&B runs, folders, wandb:entity/project")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for report.png, .pdf, .md and .tex (default: beside the first rows)"
    )
    parser.add_argument("--readme", action="store_true", help="print the Markdown table only; write nothing")
    parser.add_argument("--name", default="report", help="file name without ending (default: report)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 and one line on standard error for bad input."""
    mend_streams()
    options = _parse(arguments)
    try:
        frame = load.load(*options.paths)
        parts = parted(frame)
        if options.readme:
            print("\n".join(f"{header(part.frame)[0]}\n\n{tables.as_markdown(part.sheet)}" for part in parts))
            return 0
        beside = Path(str(frame["source"].iloc[0])).parent
        if options.out is None and not beside.is_dir():
            raise ValueError(f"--out: got nothing, allowed a folder where rows come from W&B ({beside}); give one")
        written = write(frame, options.out or beside, options.name)
        console = _console()
        for part in parts:
            show(part, console)
        print(*written, sep="\n", flush=True)
        traced = timelines(frame)
        for line in (*timeline.write(traced, options.out), *timeline.profile_notes(traced)):
            print(line, flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
