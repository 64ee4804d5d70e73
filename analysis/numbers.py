"""Numbers in prose: a marker in a page names a number, and this fills it in from the rows.

    <!--{ratio:vs_zero3_14b/fast/zero3}-->1.75x<!--/-->          shown as 1.75x
    <!--{interval:vs_zero3_7b@ba71c3ca/fast/twinflow}-->...   of that run, else the leading one

A line is named by its family and, where several ran, its mode: `zero3`, `twinflow`,
`zero3.kept+compiled`; `rival` is the fastest system that is not the engine nor the reference. Of
several lines that fit, the fastest counts. Invariant: a page's numbers are exactly what its markers
give, or a test fails.
"""

import re
from collections.abc import Callable
from typing import Any

import pandas as pd

from analysis import names, speeds, studies

MARKER = re.compile(r"(<!--\{([a-z_]+):([^}]*)\}-->).*?<!--/-->", re.DOTALL)
ALIASES = {"published": "published_megatrain"} | {
    family.partition("_")[2]: family
    for family in names.SYSTEMS
    if family.startswith(("megatrain_", "zero3_"))
}
"""`fast`, `paper`, `twinflow`: a family less the name of its system."""
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def line(lines: pd.DataFrame, selector: str) -> Any:
    """The fastest line that the selector fits. Raises ValueError, one line, where none does."""
    family, _, mode = selector.partition(".")
    named = lines["family"] == ALIASES.get(family, family)
    fits = speeds.rivals(lines) if family == "rival" else named
    if mode:
        fits &= lines["mode"].str.split().map(set) == set(mode.split("+"))
    found = lines[fits & lines["tokens_per_s"].notna()]
    agreeing = found[speeds.comparable(found)]
    found = agreeing if len(agreeing) else found  # what differs is labelled, and never preferred
    if not len(found):
        families = ", ".join(sorted(lines["family"].unique()))
        raise ValueError(f"{selector}: no measured line fits; name one of {families}")
    return speeds.fastest(found)


def word(number: int) -> str:
    """`three`; digits from ten on."""
    return WORDS[number] if number < len(WORDS) else str(number)


def ratios(lines: pd.DataFrame, selectors: list[str]) -> list[speeds.Ratio]:
    """The ratio of two lines in every run that measured both. Raises ValueError where none did."""
    found = []
    for _, mine in lines.groupby("run"):
        try:
            found.append(speeds.ratio(*[line(mine, selector) for selector in selectors]))
        except ValueError:
            continue
    if not found:
        raise ValueError("no run measured both; mend the marker")
    return sorted(found, key=lambda one: one.value)


def _end(lines: pd.DataFrame, which: str) -> str:
    """The least or the largest x that was measured: `512K`."""
    x = str(studies.of_rows(lines.iloc[0]["study"], lines).x)
    return names.value(x, int(lines[lines["tokens_per_s"].notna()][x].dropna().agg(which)))


KINDS: dict[str, Callable[..., str]] = {
    "ratio": lambda one, base: speeds.ratio(one, base).times,
    "interval": lambda one, base: speeds.ratio(one, base).interval() or "no interval",
    "change": lambda one, base: speeds.ratio(one, base).change,
    "speed": lambda one: f"{one['tokens_per_s']:,.0f}",
    "tflops": lambda one: f"{one['tflops_6p']:.0f}",
    "device": lambda one: f"{one['device_gb']:.0f} GB",
    "host": lambda one: f"{one['host_gb']:.0f} GB",
    "machine": lambda one: names.machine(one.to_frame().T),
    "repeats": lambda one: word(one["num_repeats"]),
    "name": names.name,
}
"""What a marker can ask for of its lines, and how it is written."""
SPREADS: dict[str, Callable[[list[speeds.Ratio]], str]] = {
    "spread": lambda all: " to ".join(dict.fromkeys([all[0].times, all[-1].times])),
    "runs": lambda all: f"{word(len(all))} run{'s' if len(all) > 1 else ''}",
}
"""What a marker can ask for of the ratio in every run of a study, the least first."""
ENDS = {"least": "min", "most": "max"}
"""What a marker can ask for of a study's x."""


def number(kind: str, what: str, lines: pd.DataFrame) -> str:
    """The text of one marker. Raises ValueError, one line, that names it."""
    place, *selectors = what.split("/")
    try:
        if kind not in {*KINDS, *SPREADS, *ENDS}:
            allowed = ", ".join([*KINDS, *SPREADS, *ENDS])
            raise ValueError(f"got {kind!r}, allowed {allowed}; mend the marker")
        mine, every = run_of(place, lines), lines[lines["study"] == place]
        if kind in SPREADS:
            return SPREADS[kind](ratios(every, selectors))
        if kind in ENDS:
            return _end(every, ENDS[kind])
        return KINDS[kind](*[line(mine, selector) for selector in selectors])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{{{kind}:{what}}}: {error}") from None


def run_of(place: str, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of STUDY@RUN, or of a study's leading run. ValueError where there are none."""
    name, _, run = place.partition("@")
    mine = lines[(lines["study"] == name) & lines["run"].str.endswith(run)]
    if not len(mine):
        allowed = ", ".join(sorted(lines["study"].unique()))
        raise ValueError(f"got {place!r}, allowed {allowed}; mend the marker")
    return studies.leading(studies.of_rows(name, mine), mine)


def fill(text: str, lines: pd.DataFrame) -> str:
    """The page with every marker's number as the rows give it now."""
    return MARKER.sub(lambda one: f"{one[1]}{number(one[2], one[3], lines)}<!--/-->", text)
