"""Rows to tables, figures and pages.

python -m analysis report PATH... [--x system.depth --hue system.streams]     # of any rows: table, answer, figure
python -m analysis figures [--format pdf --out DIR]                           # the record's pictures; pdf with LaTeX
python -m analysis docs                                                       # the record's pages, numbers in README
python -m analysis add PATH...                                                # file measured rows into the record
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from analysis import figures, numbers, pages, record, report, studies, tables, whole
from sweeps.command_line import Parser, mend_streams

PIPED_WIDTH = 110
"""Columns when the output is not a terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 and one line on standard error for bad input."""
    mend_streams()
    options = _parser().parse_args(arguments)
    try:
        for line in options.run(options):
            print(line, flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m analysis", description="Rows to tables, figures and pages.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("report", help="table, answer and figure of any rows")
    one.add_argument("paths", nargs="+", metavar="PATH", help="rows, W&B runs, folders, wandb:entity/project")
    one.add_argument("--x", metavar="PATH", help="what lies along x: a config path, or num_params, batch_size, seq_len")
    one.add_argument("--hue", metavar="PATH", help="what tells lines or bars apart: a config path, or system")
    one.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default: beside the first rows)")
    one.set_defaults(run=_report)
    one = commands.add_parser("figures", help="draw the record's pictures anew")
    one.add_argument("--format", choices=("png", "pdf", "svg"), default="png")
    one.add_argument("--out", metavar="DIR", type=Path, help="folder (default: the record's for png, outputs/figures for others)")
    _record(one)
    one.set_defaults(run=_figures)
    one = commands.add_parser("docs", help="write the record's pages and fill README and docs")
    _record(one)
    one.set_defaults(run=lambda options: pages.refresh(options.results))
    one = commands.add_parser("add", help="file measured rows into the record")
    one.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a rows file or a folder of some")
    _record(one)
    one.set_defaults(run=_add)
    return parser


def _record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=record.RESULTS, help="the record (default: this repository's)"
    )


def _report(options: argparse.Namespace) -> list[Path]:
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else PIPED_WIDTH)
    return report.report(options.paths, options.out, x=options.x, hue=options.hue, console=console)


def _figures(options: argparse.Namespace) -> list[Path]:
    """The pictures and, beside a format for papers, the tables as LaTeX."""
    lines = record.lines(options.results)
    in_record = options.format == "png" and options.out is None
    folder = options.out or (options.results / pages.FIGURES if in_record else Path("outputs/figures"))
    wanted = {
        folder / f"{name}.{options.format}": content for name, content in figures.pictures(lines, options.results, options.format)
    }
    if not in_record:
        wanted |= {folder / f"{name}.tex": text.encode() for name, text in _latex(lines)}
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            whole.write(path, content)
    for old in folder.glob("*.png") if in_record else ():
        if old not in wanted:
            old.unlink()
    return list(wanted)


def _latex(lines: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """(study, LaTeX) of each study's leading run."""
    current = lines[~lines["superseded"]]
    for study in studies.all_studies():
        mine = current[current["study"] == study.name]
        if len(mine):
            shown = mine[mine["run"] == numbers.lead(study, mine)]
            yield study.name, tables.latex(tables.of(study, shown), study.title, study.name)


def _add(options: argparse.Namespace) -> list[str]:
    """File the rows, then draw and write what they change."""
    told = record.add(options.paths, options.results)
    drawn = _figures(argparse.Namespace(results=options.results, format="png", out=None))
    return [*told, f"{len(drawn)} pictures drawn", *map(str, pages.refresh(options.results))]


if __name__ == "__main__":
    sys.exit(main())
