"""Rows -> header, table, one plain sentence, and report.png, report.pdf, report.md beside the rows.

    python -m analysis.report PATH...            # print everything, write the report beside the first path
    python -m analysis.report PATH... --out DIR  # write it there
    python -m analysis.report PATH... --readme   # print the Markdown table only, write nothing

Timelines in the folder `traces` beside the rows (measure.trace=true) are drawn too.

Invariant: reads rows, never changes them. One table and one figure for each (experiment, model, batch, length, machine).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from analysis import load, style, tables
from analysis.compare import compare, notes, sentence
from analysis.figures import quickstart, timeline
from analysis.timeline import SUFFIX

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


def markdown(frame: pd.DataFrame, image: str | None = None) -> str:
    """One group as Markdown: header, table, sentence, notes, and the figure if its file name is given."""
    comparison = compare(frame)
    title, machine, versions = header(frame)
    picture = [f"![{title}]({image})"] if image else []
    listed = "\n".join(f"- {note}" for note in notes(comparison))
    parts = [
        f"## {title}",
        f"{machine}\\\n{versions}",
        tables.markdown(comparison).rstrip(),
        sentence(comparison),
        listed,
        *picture,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(frame: pd.DataFrame, console: Console) -> None:
    """Print one group: header, table, sentence, notes."""
    comparison = compare(frame)
    for number, line in enumerate(header(frame)):
        console.print(line, markup=False, highlight=False, style="dim" if number else "bold")
    console.print()
    console.print(tables.terminal(comparison, console.width))
    console.print()
    console.print(sentence(comparison), markup=False, highlight=False, style="bold")
    for note in notes(comparison):
        console.print(note, markup=False, highlight=False, style="dim")
    console.print()


def write(frame: pd.DataFrame, folder: Path, name: str) -> list[Path]:
    """Write name.png and name.pdf (name-<group> where there are several groups) and one name.md; return the paths."""
    parts = load.groups(load.latest(frame))
    written: list[Path] = []
    texts = []
    for number, part in enumerate(parts, 1):
        stem = folder / (name if len(parts) == 1 else f"{name}-{number}-{_slug(part)}")
        images = style.save(quickstart.figure(part), stem)
        written += images
        texts.append(markdown(part, images[0].name))
    page = folder / f"{name}.md"
    page.write_text("\n".join(texts), encoding="utf-8")
    return [*written, page]


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
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description="Table, figure and verdict from measured rows.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="rows, W&B runs, folders, wandb:entity/project")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for report.png, .pdf and .md (default: beside the first rows)"
    )
    parser.add_argument("--readme", action="store_true", help="print the Markdown table only; write nothing")
    parser.add_argument("--name", default="report", help="file name without ending (default: report)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 and one line on standard error for bad input."""
    options = _parse(arguments)
    try:
        frame = load.load(*options.paths)
        parts = load.groups(load.latest(frame))
        if options.readme:
            print("\n".join(f"{header(part)[0]}\n\n{tables.markdown(compare(part))}" for part in parts))
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
