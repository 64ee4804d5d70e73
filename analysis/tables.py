"""The comparison, or a study, as a table: terminal (rich), Markdown and (analysis/latex.py) LaTeX, all from the same cells.

Invariant: every row is shown; one that was not measured shows its status where its speed would be, and its reason below. The
terminal table wraps nothing but long names: it drops whole columns, least needed first, until it fits; a printed page has an order
of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.cells import Cell, change, comparable, percent, ratio
from analysis.compare import BASELINE, Comparison, notes
from analysis.standing import Standing
from analysis.stats import Estimate
from analysis.studies import Study
from analysis.style import name_of

NOTHING = "—"
BEST_MARK = "★"
NAME, TITLE = 40, 24
"""Most characters of a line of a system's name in the terminal, and of the name above ratios to it."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its title (the terminal breaks it at the newline), how a standing fills it, and when it may be dropped."""

    title: str
    cell: Callable[[Standing], str | None]
    drop: int = 0
    """0: always shown; otherwise the lowest is dropped first when the terminal is narrow."""
    spare: int = 0
    """The same for a printed page, on which intervals and what the comparison rests on stay longest."""


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _gigabytes(count: int | None) -> str | None:
    """Decimal GB: three significant figures below 10, else one decimal."""
    if count is None:
        return None
    return f"{count / 1e9:.2f}" if count < 10e9 else f"{count / 1e9:.1f}"


def _speed(standing: Standing) -> str | None:
    if not standing.measured or standing.speed is None:
        return standing.status_label
    return f"{standing.speed.value:,.0f}" if standing.speed.value >= 100 else f"{standing.speed.value:.3g}"


def _tflops(standing: Standing) -> str | None:
    return _number(standing.tflops, ",.0f" if (standing.tflops or 0) >= 10 else ".2g")


def _host(standing: Standing) -> str | None:
    return _gigabytes(standing.host_bytes) if standing.measured else None


def _ratio(estimate: Estimate | None) -> str | None:
    return None if estimate is None else f"{estimate.value:.2f}x"


def _interval(estimate: Estimate | None, form: str) -> str | None:
    if estimate is None or estimate.lo is None or estimate.hi is None:
        return None
    return f"{estimate.lo:{form}}–{estimate.hi:{form}}"


def _repeated(standing: Standing) -> str | None:
    """The interval of a speed that stands on several repeats."""
    return _interval(standing.speed, ",.0f") if standing.num_repeats > 1 else None


def _agrees(standing: Standing) -> str | None:
    if standing.is_reference or standing.stands_in:
        return "reference" if standing.losses else None
    if standing.agrees is None:
        return None
    steps = f" ({standing.compared_steps} steps)" if standing.compared_steps else ""
    return f"yes{steps}" if standing.agrees else "differs"


def _last_loss(standing: Standing) -> str | None:
    """Of the last step, or of the last that all rows have: losses of unlike steps are not to be put side by side."""
    if standing.common_steps is None:
        return _number(standing.final_loss, ".4f")
    return _number(standing.losses[standing.common_steps - 1], ".4f") if len(standing.losses) >= standing.common_steps else None


def _gap(standing: Standing) -> str | None:
    """Of a reference how far its later repeats are from the first."""
    gap = standing.max_loss_difference
    return None if (standing.is_reference or standing.stands_in) and not gap else _number(gap, ".1e")


def _system(standing: Standing) -> str:
    return f"{BEST_MARK} {standing.label}" if standing.best else standing.label


SPARE = ("host GB", "device GB", "TFLOPS 6P")
"""Columns of a study that a printed page may go without, the first first."""
RATIO, LAST_LOSS = "ratio to\n", "final\nloss"
COLUMNS: tuple[Column, ...] = (
    Column(title="system", cell=_system),
    Column(title="tokens/s", cell=_speed),
    Column(title="tokens/s\n95% interval", cell=_repeated, drop=1, spare=4),
    Column(title="repeats", cell=lambda one: str(one.num_repeats) if one.num_repeats > 1 else None, drop=8, spare=2),
    Column(title=RATIO, cell=lambda one: _ratio(one.ratio)),
    Column(title="95%\ninterval", cell=lambda one: _interval(one.ratio, ".2f"), drop=2),
    Column(title="TFLOPS\n6P", cell=_tflops, drop=4),
    Column(title="MFU", cell=lambda one: _number(one.mfu, ".1%"), drop=5, spare=7),
    Column(title="MFU of\ndata sheet", cell=lambda one: _number(one.mfu_datasheet, ".1%"), drop=1, spare=1),
    Column(title="device\nGB", cell=lambda one: _gigabytes(one.device_bytes), drop=10),
    Column(title="host\nGB", cell=_host, drop=9),
    Column(
        title="host\nB/param", cell=lambda one: _number(one.host_bytes_per_param, ".1f") if one.measured else None, drop=3, spare=5
    ),
    Column(title=LAST_LOSS, cell=_last_loss, drop=7, spare=3),
    Column(title="held-out\nloss", cell=lambda one: _number(one.heldout_loss, ".4f"), drop=3, spare=6),
    Column(title="max\n|Δloss|", cell=_gap, drop=6),
    Column(title="agrees", cell=_agrees),
)


def columns(comparison: Comparison) -> list[Column]:
    """The columns that hold anything for these rows (MFU needs a measured peak, device memory a device), titled for them."""
    held = [column for column in COLUMNS if any(column.cell(standing) for standing in comparison.standings)]
    steps = next((one.common_steps for one in comparison.standings), None)
    base = comparison.baseline.label if comparison.baseline else name_of(BASELINE)
    titles = {RATIO: RATIO + textwrap.fill(base, TITLE, break_on_hyphens=False)}
    titles |= {LAST_LOSS: f"loss at\nstep {steps}"} if steps else {}
    return [replace(column, title=titles.get(column.title, column.title)) for column in held]


def cells(comparison: Comparison, shown: Sequence[Column] | None = None) -> list[list[str]]:
    """Title row, then one row a standing, best first; an absent number is a dash."""
    chosen = list(shown) if shown is not None else columns(comparison)
    body = [[column.cell(standing) or NOTHING for column in chosen] for standing in comparison.standings]
    return [[column.title for column in chosen], *body]


def terminal(comparison: Comparison, width: int) -> Table:
    """The rich table, at most `width` columns wide as far as the columns that are always shown allow."""
    shown = columns(comparison)
    console = Console(width=10_000)
    while True:
        table = _rich(comparison, shown)
        if table.__rich_measure__(console, console.options).maximum <= width:
            return table
        droppable = [column for column in shown if column.drop]
        if not droppable:
            return table
        shown.remove(min(droppable, key=lambda column: column.drop))


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of words: title row first. `align` has l or r a column; of the rows in `best` (1 is the first below the title) the
    leading words and the first number are bold."""

    cells: list[list[str]]
    align: str
    best: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)
    """Caveats that belong below it."""
    spare: tuple[int, ...] = ()
    """Columns that a printed page may go without, the first first."""

    def bold(self, number: int, column: int) -> bool:
        """Whether a cell of the body is bold."""
        return number in self.best and column <= self.align.index("r")


def sheet(comparison: Comparison) -> Sheet:
    """The comparison's table, its notes below."""
    shown = columns(comparison)
    table = cells(comparison, shown)
    best = frozenset(number for number, one in enumerate(comparison.standings, 1) if one.best)
    spare = tuple(sorted((at for at, column in enumerate(shown) if column.spare), key=lambda at: shown[at].spare))
    return Sheet(cells=table, align=f"l{'r' * (len(table[0]) - 2)}l", best=best, notes=notes(comparison), spare=spare)


def study_sheet(study: Study) -> Sheet:
    """A study: what was varied, tokens/s, the change from the fastest cell (from the first rung of a ladder; of several systems the
    ratio to one of them at the same place), losses where the arithmetic was varied or they are apart."""
    words = [study.words(one) for one in study.cells]
    told = list(words[0])
    numbers = [_study_numbers(study, one) for one in study.cells]
    title = [*told, *numbers[0]]
    body = [[*mine.values(), *[cell or NOTHING for cell in line.values()]] for mine, line in zip(words, numbers, strict=True)]
    best = frozenset(number for number, one in enumerate(study.cells, 1) if any(one is each for each in study.bests))
    align = f"{'l' * len(told)}{'r' * (len(title) - len(told) - 1)}l"
    kept = [at for at in range(len(title)) if at <= len(told) or any(line[at] != NOTHING for line in body)]
    table = [[line[at] for at in kept] for line in (title, *body)]
    spare = tuple(table[0].index(name) for name in SPARE if name in table[0])
    return Sheet(cells=table, align="".join(align[at] for at in kept), best=best, notes=study.notes, spare=spare)


def _study_numbers(study: Study, cell: Cell) -> dict[str, str | None]:
    """Title of a column -> what a cell has for it."""
    mine, base = cell.standing, study.base_of(cell)
    numbers = {"tokens/s": _speed(mine) if cell.predicted is None else f"{cell.predicted.value:,.0f} predicted"}
    if study.rival is not None:
        over = Estimate(value=1.0) if cell is base and comparable(cell) else ratio(cell, base)
        numbers |= {f"ratio to {study.rival.family_name}": _ratio(over), "95% interval": _interval(over, ".2f")}
    else:
        gap = None if cell is base else change(cell, base)
        ends = None if gap is None or gap.lo is None or gap.hi is None else f"{percent(gap.lo)} to {percent(gap.hi)}"
        whence = f"change from the {'first' if study.kind == 'ladder' else 'fastest'}"
        numbers |= {whence: None if gap is None else percent(gap.value), "95% interval": ends}
    numbers |= {"TFLOPS 6P": _tflops(mine), "device GB": _gigabytes(mine.device_bytes), "host GB": _host(mine)}
    if study.tells_losses and study.first is not None:
        step = study.common_steps
        apart = study.loss_gap(cell) if cell is not study.first else None
        first = ", ".join(study.words(study.first).values())
        numbers[f"loss at step {step}"] = _number(mine.losses[step - 1], ".4f") if len(mine.losses) >= step else None
        numbers[f"max |Δloss| from {first}"] = _number(apart, ".1e")
    return numbers | {"agrees": _agrees(mine)}


def markdown(comparison: Comparison) -> str:
    """A GitHub table; the winner in bold."""
    return as_markdown(sheet(comparison))


def as_markdown(table: Sheet) -> str:
    """A GitHub table, without its notes."""
    title, *body = table.cells
    lines = [_pipe(_flat(title)), _pipe(["---:" if side == "r" else "---" for side in table.align])]
    for number, row in enumerate(body, 1):
        escaped = [cell.replace("|", "\\|") for cell in row]
        lines.append(_pipe([f"**{cell}**" if table.bold(number, at) else cell for at, cell in enumerate(escaped)]))
    return "\n".join(lines) + "\n"


def terminal_sheet(table: Sheet) -> Table:
    """The rich table of a sheet, the best row in green."""
    title, *body = table.cells
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for name, side in zip(title, table.align, strict=True):
        drawn.add_column(name, justify="right" if side == "r" else "left")
    for number, row in enumerate(body, 1):
        drawn.add_row(*[Text(cell) for cell in row], style="bold green" if number in table.best else "")
    return drawn


def _rich(comparison: Comparison, shown: Sequence[Column]) -> Table:
    title, *body = cells(comparison, shown)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for position, name in enumerate(title):
        last = position == len(title) - 1
        table.add_column(name, justify="left" if position == 0 or last else "right", no_wrap=True)
    for standing, row in zip(comparison.standings, body, strict=True):
        name = textwrap.fill(row[0], NAME, break_on_hyphens=False)
        table.add_row(*[Text(cell) for cell in (name, *row[1:])], style=_row_style(standing))
    return table


def _flat(titles: Sequence[str]) -> list[str]:
    return [title.replace("\n", " ") for title in titles]


def _row_style(standing: Standing) -> str:
    if standing.best:
        return "bold green"
    if not standing.measured:
        return "dim"
    return "yellow" if standing.differs else ""


def _pipe(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell if "\\|" in cell else cell.replace("|", "\\|") for cell in row) + " |"
