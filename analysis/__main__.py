"""From rows to tables, figures and pages. `python -m analysis --help` lists the commands."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis import figures, record, report, studies, tables
from analysis.figures import style
from sweeps.command_line import Parser, mend_streams


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
    about = "Turn rows into tables, figures and pages."
    parser = Parser(prog="python -m analysis", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, told: str, *, of_record: bool = True) -> Any:
        one = commands.add_parser(name, help=told, description=told)
        one.set_defaults(run=run)
        if of_record:
            known: Any = {"metavar": "DIR", "type": Path, "default": record.RESULTS}
            one.add_argument("--results", **known, help="the record (default: analysis/results)")
        return one.add_argument

    told = "Print the table and answer of any rows, and draw their figure."
    add = command("report", _report, told, of_record=False)
    kinds = "a rows file, a W&B run, a folder of either, or wandb:ENTITY/PROJECT"
    add("paths", nargs="+", metavar="PATH", help=kinds)
    fields = "a config path such as system.depth, or num_params, batch_size, seq_len"
    add("--x", metavar="FIELD", help=f"what lies along x: {fields}")
    add("--hue", metavar="FIELD", help="what a line or bar stands for: a config path, or system")
    add("--out", metavar="DIR", type=Path, help="folder of the report (default: beside the rows)")

    told = "Draw the record's pictures again."
    add = command("figures", lambda options: _figures(options.results, options.format), told)
    formats = "png into the record (default); pdf or svg, with LaTeX tables, into outputs/figures"
    add("--format", choices=("png", "pdf", "svg"), default="png", help=formats)

    told = "Write the record's pages, and fill the numbers in README and docs."
    command("docs", lambda options: report.refresh(options.results), told)
    told = "Execute the notebooks again, and write their outputs into them."
    command("notebooks", _notebooks, told, of_record=False)
    add = command("add", _add, "File measured rows, then draw and write what they change.")
    add("paths", nargs="+", metavar="PATH", type=Path, help="a rows file, or a folder of some")
    return parser


def _report(options: argparse.Namespace) -> list[Path]:
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else 110)  # columns of what is no terminal
    return report.report(options.paths, options.out, x=options.x, hue=options.hue, console=console)


def _figures(results: Path, kind: str = "png") -> list[Path]:
    """The pictures and, beside a format for papers, the tables as LaTeX."""
    lines, in_record = record.lines(results), kind == "png"
    folder = results / report.FIGURES if in_record else Path("outputs/figures")
    drawn = figures.all_figures(lines, results)
    wanted = {folder / f"{name}.{kind}": style.drawn(draw, kind) for name, draw in drawn}
    for study, mine in () if in_record else studies.shown(lines):
        wanted[folder / f"{study.name}.tex"] = tables.latex(study, mine).encode()
    record.write_changed(wanted, folder.glob("*.png") if in_record else ())
    return list(wanted)


def _add(options: argparse.Namespace) -> Iterable[object]:
    """File the rows, then draw and write what they change."""
    yield from record.add(options.paths, options.results)
    yield f"{len(_figures(options.results))} pictures drawn"
    yield from report.refresh(options.results)
    if options.results == record.RESULTS:  # what the notebooks show
        yield from _notebooks(options)


def _notebooks(_: argparse.Namespace) -> Iterable[object]:
    from analysis.notebooks import run  # needs what .[dev] installs

    return run.execute()


if __name__ == "__main__":
    sys.exit(main())
