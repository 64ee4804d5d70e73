"""The comparison as a table: terminal (rich), Markdown and LaTeX, all from the same cells.

Invariant: every row is shown; one that was not measured shows its status where its speed would be, and its reason below. The
terminal table is never wrapped: it drops whole columns, least needed first, until it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.compare import BASELINE, Comparison, Standing
from analysis.stats import Estimate
from analysis.style import name_of

NOTHING = "—"
BEST_MARK = "★"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its title (the terminal breaks it at the newline), how a standing fills it, and when it may be dropped."""

    title: str
    cell: Callable[[Standing], str | None]
    drop: int = 0
    """0: always shown; otherwise the lowest is dropped first when the terminal is narrow."""


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
    return None if standing.agrees is None else "yes" if standing.agrees else "differs"


def _gap(standing: Standing) -> str | None:
    return None if standing.is_reference or standing.stands_in else _number(standing.max_loss_difference, ".1e")


def _system(standing: Standing) -> str:
    return f"{BEST_MARK} {standing.label}" if standing.best else standing.label


COLUMNS: tuple[Column, ...] = (
    Column(title="system", cell=_system),
    Column(title="tokens/s", cell=_speed),
    Column(title="tokens/s\n95% interval", cell=_repeated, drop=1),
    Column(title="repeats", cell=lambda one: str(one.num_repeats) if one.num_repeats > 1 else None, drop=8),
    Column(title=f"ratio to\n{name_of(BASELINE)}", cell=lambda one: _ratio(one.ratio)),
    Column(title="95%\ninterval", cell=lambda one: _interval(one.ratio, ".2f"), drop=2),
    Column(title="TFLOPS\n6P", cell=lambda one: _number(one.tflops, ",.0f" if (one.tflops or 0) >= 10 else ".2g"), drop=4),
    Column(title="MFU", cell=lambda one: _number(one.mfu, ".1%"), drop=5),
    Column(title="MFU of\ndata sheet", cell=lambda one: _number(one.mfu_datasheet, ".1%"), drop=1),
    Column(title="device\nGB", cell=lambda one: _gigabytes(one.device_bytes), drop=10),
    Column(title="host\nGB", cell=lambda one: _gigabytes(one.host_bytes), drop=9),
    Column(title="host\nB/param", cell=lambda one: _number(one.host_bytes_per_param, ".1f"), drop=3),
    Column(title="final\nloss", cell=lambda one: _number(one.final_loss, ".4f"), drop=7),
    Column(title="max\n|Δloss|", cell=_gap, drop=6),
    Column(title="agrees", cell=_agrees),
)


def columns(comparison: Comparison) -> list[Column]:
    """The columns that hold anything for these rows (MFU needs a measured peak, device memory a device)."""
    return [column for column in COLUMNS if any(column.cell(standing) for standing in comparison.standings)]


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


def markdown(comparison: Comparison) -> str:
    """A GitHub table; the winner in bold."""
    title, *body = cells(comparison)
    title = _flat(title)
    lines = [_pipe(title), _pipe(["---"] + ["---:"] * (len(title) - 2) + ["---"])]
    for standing, row in zip(comparison.standings, body, strict=True):
        escaped = [cell.replace("|", "\\|") for cell in row]
        lines.append(_pipe([f"**{cell}**" for cell in escaped[:2]] + escaped[2:] if standing.best else escaped))
    return "\n".join(lines) + "\n"


def latex(comparison: Comparison) -> str:
    """A booktabs tabular; the winner in bold. Needs \\usepackage{booktabs}."""
    title, *body = cells(comparison)
    title = _flat(title)
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(title) - 2)}l}}", "\\toprule", _ampersand(title), "\\midrule"]
    for standing, row in zip(comparison.standings, body, strict=True):
        head = [f"\\textbf{{{_tex(cell)}}}" for cell in row[:2]] if standing.best else [_tex(cell) for cell in row[:2]]
        lines.append(" & ".join(head + [_tex(cell) for cell in row[2:]]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _rich(comparison: Comparison, shown: Sequence[Column]) -> Table:
    title, *body = cells(comparison, shown)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for position, name in enumerate(title):
        last = position == len(title) - 1
        table.add_column(name, justify="left" if position == 0 or last else "right", no_wrap=True)
    for standing, row in zip(comparison.standings, body, strict=True):
        table.add_row(*[Text(cell) for cell in row], style=_row_style(standing))
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


def _ampersand(row: Sequence[str]) -> str:
    return " & ".join(_tex(cell) for cell in row) + " \\\\"


_TEX = {
    "\\": r"\textbackslash{}",
    "|Δloss|": r"$|\Delta\mathrm{loss}|$",
    "★ ": "",
    "—": "---",
    "–": "--",
    "×": r"$\times$",
    "%": r"\%",
    "_": r"\_",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
}


def _tex(cell: str) -> str:
    """LaTeX of one cell, scanning once so that nothing is escaped twice."""
    done, rest = "", cell
    while rest:
        token = next((key for key in _TEX if rest.startswith(key)), rest[0])
        done, rest = done + _TEX.get(token, token), rest[len(token) :]
    return done
