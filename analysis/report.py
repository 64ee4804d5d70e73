"""Any rows -> table, answer and figure: on the terminal, and as report.md, .tex, .png and .pdf.

    python -m analysis report PATH... [--x PATH --hue PATH] [--out DIR]

One section a study. Invariant: reads rows, never changes them, and draws everything before it
writes anything.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from rich.console import Console
from rich.markdown import Markdown

from analysis import figures, pages, rows, speeds, studies, tables, whole
from analysis.figures import energy, step, style
from analysis.studies import Study


class Section(NamedTuple):
    """A study and its lines."""

    study: Study
    lines: pd.DataFrame


def sections(
    found: pd.DataFrame, *, x: str | None = None, hue: str | None = None
) -> Iterator[Section]:
    """One a study. Raises ValueError, one line, for an axis that no row has."""
    for name, part in studies.assigned(found).groupby("study", sort=False):
        lines = speeds.lines(part)
        yield Section(studies.of_rows(str(name), lines, x=x, hue=hue), lines)


def markdown(section: Section, picture: str) -> str:
    """One section as Markdown."""
    return pages.body(section.study, section.lines, picture, energy=True) + "\n"


def report(
    paths: list[str], out: Path | None, *, x: str | None, hue: str | None, console: Console
) -> list[Path]:
    """Print and write the report of these sources; its paths. Raises ValueError, one line."""
    found = rows.frame(*paths)
    told = list(sections(found, x=x, hue=hue))
    beside = Path(str(found["source"].iloc[0])).parent
    folder = out or beside
    if out is None and not beside.is_dir():
        raise ValueError(
            f"--out: got nothing, allowed a folder where rows come from W&B ({beside}); give one"
        )
    lines = pd.concat([section.lines for section in told])
    drawings = {"energy": partial(energy.draw, lines)} if energy.known(lines) else {}
    texts = []
    for number, section in enumerate(told, 1):
        stem = "report" if len(told) == 1 else f"report-{number}"
        if figures.drawable(*section):
            drawings[stem] = partial(figures.of_study, *section)
        texts.append(markdown(section, f"{stem}.png" if stem in drawings else ""))
        console.print(Markdown(markdown(section, "")))
    wanted = {}
    for path in sorted((beside / "traces").glob(f"*{step.SUFFIX}")):  # measure.trace=true
        steps = step.load(path)
        drawn = style.drawn(partial(step.draw, steps, steps[0].name))
        wanted[folder / f"{path.name.removesuffix('.json')}.png"] = drawn
    for stem, draw in drawings.items():
        for kind in ("png", "pdf"):
            wanted[folder / f"{stem}.{kind}"] = style.drawn(draw, kind)
    wanted[folder / "report.md"] = "\n".join(texts).encode()
    wanted[folder / "report.tex"] = "\n".join(tables.latex(*section) for section in told).encode()
    ours = ("report.p[nd][gf]", "report-[0-9]*.p[nd][gf]", "energy.p[nd][gf]")
    whole.write_changed(wanted, [path for pattern in ours for path in folder.glob(pattern)])
    return list(wanted)
