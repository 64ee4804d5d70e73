"""A table of words as LaTeX for a page: booktabs, titles in two lines, notes below.

Invariant: the same cells as in the terminal and in Markdown; where they are wider than a text block of style.PAGE_IN, columns are
left out whole, in the order that the table itself gives, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.style import PAGE_IN
from analysis.tables import Sheet

CHARACTER_PT, SEPARATION_PT, POINTS_PER_INCH = 4.3, 3.0, 72.27
"""Mean width of a character of Computer Modern in \\footnotesize (8 pt), and half the space between columns."""
LONG_TITLE = 13
"""Titles of more characters are broken in two lines."""


def as_latex(table: Sheet) -> str:
    """A booktabs tabular no wider than a page as far as spare columns go, its notes below; needs \\usepackage{booktabs}."""
    fitted = fitted_to_page(table)
    title = " & ".join(_stacked(lines, side) for lines, side in zip(_titles(fitted), fitted.align, strict=True))
    lines = [f"{{\\footnotesize\\setlength{{\\tabcolsep}}{{{SEPARATION_PT:g}pt}}%"]
    lines += [f"\\begin{{tabular}}{{@{{}}{fitted.align}@{{}}}}"]
    lines += ["\\toprule", f"{title} \\\\", "\\midrule", *body(fitted), "\\bottomrule", "\\end{tabular}"]
    notes = [f"\\par\\smallskip\\noindent {escaped(note)}" for note in fitted.notes]
    return "\n".join([*lines, *notes, "\\par}"]) + "\n"


def body(table: Sheet) -> list[str]:
    """The rows below the title; the best in bold."""
    rows = []
    for number, row in enumerate(table.cells[1:], 1):
        words = [f"\\textbf{{{escaped(cell)}}}" if table.bold(number, at) else escaped(cell) for at, cell in enumerate(row)]
        rows.append(" & ".join(words) + " \\\\")
    return rows


def width_in(table: Sheet) -> float:
    """About how wide a table is, inches."""
    longest = [max([*map(len, lines), *(len(row[at]) for row in table.cells[1:])]) for at, lines in enumerate(_titles(table))]
    return (sum(longest) * CHARACTER_PT + 2 * SEPARATION_PT * (len(longest) - 1)) / POINTS_PER_INCH


def fitted_to_page(table: Sheet) -> Sheet:
    """The table without the fewest spare columns that leave it no wider than a page."""
    fitted = table
    for number in range(1, len(table.spare) + 1):
        if width_in(fitted) <= PAGE_IN:
            break
        kept = [at for at in range(len(table.align)) if at not in table.spare[:number]]
        cells = [[row[at] for at in kept] for row in table.cells]
        fitted = replace(table, cells=cells, align="".join(table.align[at] for at in kept), spare=())
    return fitted


def _titles(table: Sheet) -> list[Sequence[str]]:
    """The lines of each title."""
    return [_lines(title) for title in table.cells[0]]


def _lines(title: str) -> Sequence[str]:
    """As the title says, or where it is long, at the space nearest to its middle."""
    if "\n" in title or len(title) <= LONG_TITLE or " " not in title:
        return title.split("\n")
    at = min((at for at, letter in enumerate(title) if letter == " "), key=lambda at: abs(at - len(title) / 2))
    return [title[:at], title[at + 1 :]]


def _stacked(lines: Sequence[str], side: str) -> str:
    words = " \\\\ ".join(escaped(line) for line in lines)
    return words if len(lines) == 1 else f"\\begin{{tabular}}[b]{{@{{}}{side}@{{}}}}{words}\\end{{tabular}}"


_TEX = {
    "\\": r"\textbackslash{}",
    "|Δloss|": r"$|\Delta\mathrm{loss}|$",
    "★ ": "",
    "†": r"$^\dagger$",
    "−": "$-$",
    "±": r"$\pm$",
    "¹²": "$^{12}$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
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


def escaped(cell: str) -> str:
    """LaTeX of one cell, scanning once so that nothing is escaped twice."""
    done, rest = "", cell
    while rest:
        token = next((key for key in _TEX if rest.startswith(key)), rest[0])
        done, rest = done + _TEX.get(token, token), rest[len(token) :]
    return done
