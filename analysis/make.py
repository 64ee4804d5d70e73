"""Rebuild every committed figure from the committed rows and timelines: one command, no GPU.

    python -m analysis.make                  # analysis/results/*.jsonl -> name.png, .pdf, .md, .tex beside them;
                                             # of comparisons also name.memory and name.convergence,
                                             # of studies whose losses differ name.convergence;
                                             # *.timeline.json -> name.timeline.png, .pdf;
                                             # all rows together -> throughput.png, .pdf, paper.png, .pdf, .md, .tex
    python -m analysis.make --results DIR

Figures of these names that the rows no longer give are removed.

Invariant: the same files give the same bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import load, paper, report, style, tables, whole
from analysis.figures import convergence, memory, throughput, timeline
from analysis.figures import paper as drawing
from analysis.timeline import SUFFIX
from sweeps.command_line import Parser

RESULTS = Path(__file__).parent / "results"


def comparisons(frame: pd.DataFrame, folder: Path, name: str) -> list[Path]:
    """Memory and losses of each comparison of systems in one file, losses of a study that varies the arithmetic; the paths
    written."""
    sections = report.sections(load.latest(frame))
    parts = [part.frame for part in sections if part.study is None]
    written: list[Path] = []
    for part in sections:  # of a scale the table tells: its lines, a place each, would all look alike
        if part.study is not None and part.study.tells_losses and part.study.scale is None:
            written += style.save(convergence.study_figure(part.frame), folder / f"{name}.convergence")
    for number, part in enumerate(parts, 1):
        stem = name if len(parts) == 1 else f"{name}-{number}"
        written += style.save(memory.figure(part), folder / f"{stem}.memory")
        if part["losses"].map(bool).sum() > 1:
            written += style.save(convergence.figure(part), folder / f"{stem}.convergence")
    report.remove_stale(drawn_before(folder, name, r"\.(memory|convergence)"), written)
    return written


def drawn_before(folder: Path, name: str, suffix: str = "") -> list[Path]:
    """The figures in the folder that are named name or name-<number>, and the pattern `suffix`; not those of a study so named."""
    own = re.compile(rf"({re.escape(name)}(-\d+)?){suffix}\.(png|pdf)")
    found = [(path, own.fullmatch(path.name)) for path in folder.iterdir()]
    studies = {path.stem for path in folder.glob("*.jsonl")}
    return [path for path, match in found if match and studies.isdisjoint({path.stem} | {match[1]} - {name})]


def together(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """What all rows say together: speed against size, batch and context on each machine, and the paper's claims; the paths."""
    written: list[Path] = []
    machines = [rows for _, rows in load.latest(frame).groupby("machine_name", sort=False) if throughput.varies(rows)]
    for number, rows in enumerate(machines, 1):
        written += style.save(throughput.figure(rows), folder / ("throughput" if len(machines) == 1 else f"throughput-{number}"))
    report.remove_stale(drawn_before(folder, "throughput"), written)  # their number changes with the machines'
    on_gpu = load.latest(frame)[load.latest(frame)["gpu"].notna()]
    if len(on_gpu):
        written += style.save(drawing.figure(on_gpu), folder / "paper")
        table, page, tex = paper.table(on_gpu), folder / "paper.md", folder / "paper.tex"
        notes = "\n".join(f"- {note}" for note in table.notes)
        about = f"## The paper's claims, and what was measured here\n\n{paper.double_buffering(on_gpu)}\n\n![The paper](paper.png)"
        whole.write(page, f"{about}\n\n{tables.as_markdown(table)}\n{notes}\n".encode())
        whole.write(tex, paper.latex(table).encode())
        written += [page, tex]
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when there are no rows yet, 2 and one line on standard error for what cannot be read."""
    parser = Parser(prog="python -m analysis.make", description="Rebuild the figures of all committed results.")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=RESULTS, help=f"folder of *.jsonl, *{SUFFIX} (default: analysis/results)"
    )
    folder: Path = parser.parse_args(arguments).results
    if not folder.is_dir():
        print(f"error: --results: got {folder}, allowed a folder that exists; name one with measured rows", file=sys.stderr)
        return 2
    files, timelines = sorted(folder.glob("*.jsonl")), sorted(folder.glob(f"*{SUFFIX}"))
    if not files and not timelines:
        print(f"{folder}: no *.jsonl or *{SUFFIX} yet, so no figure to build; put measured rows there")
        return 0
    try:
        for file in files:
            rows = load.load(file)
            for path in (*report.write(rows, folder, file.stem), *comparisons(rows, folder, file.stem)):
                print(path)
        for path in together(load.load(*files), folder) if files else ():
            print(path)
        for path in timeline.write(timelines):
            print(path)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
