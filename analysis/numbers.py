"""Numbers in prose: a marker in a page names a number, and this fills it in from the rows.

    <!--{ratio:vs_zero3_14b/fast/zero3}-->1.75x<!--/-->          shown as 1.75x
    <!--{interval:vs_zero3_7b@ba71c3ca/fast/twinflow}-->...      of that run; else of the study's leading one

A line is named by its family and, where several ran, its mode and settings: `zero3`, `twinflow`, `zero3.kept+compiled`,
`stream?depth=2,streams=3`; `rival` is the fastest system that is not the engine nor the reference. Of several lines that fit, the
fastest counts. Invariant: a page's numbers are exactly what its markers give, or a test fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd

from analysis import names, rows, speeds, studies

MARKER = re.compile(r"<!--\{([a-z_]+):([^}]*)\}-->(.*?)<!--/-->", re.DOTALL)
ALIASES = {"fast": "megatrain_fast", "stream": "megatrain_stream", "paper": "megatrain_paper", "long": "megatrain_long",
           "published": "published_megatrain", "twinflow": "zero3_twinflow", "optimizer": "zero3_optimizer"}  # fmt: skip
REFERENCE = "in_memory"


def engine(lines: pd.DataFrame) -> pd.Series:
    """Which lines are this repository's engine."""
    return lines["family"].str.startswith("megatrain")


def rivals(lines: pd.DataFrame) -> pd.Series:
    """Which lines are another way to train, whose speed may be compared."""
    others = ~engine(lines) & ~lines["system"].isin([REFERENCE, "published_megatrain"])
    return others & speeds.comparable(lines)


def lead(study: studies.Study, lines: pd.DataFrame) -> str:
    """The run that answers: the one that studies.yaml names, else the one that measured most, of equals the last."""
    mine = lines[lines["study"] == study.name]
    if study.lead in set(mine["run"]):
        return str(study.lead)
    counts = mine[mine["tokens_per_s"].notna()].groupby("run").size()
    counts = counts if len(counts) else mine.groupby("run").size()
    return str(max(counts.index, key=lambda run: (counts[run], run)))


def line(lines: pd.DataFrame, selector: str) -> Any:
    """The fastest of the lines that the selector fits. Raises ValueError, one line, where none does."""
    name, _, wanted = selector.partition("?")
    family, _, mode = name.partition(".")
    found = lines[rivals(lines)] if family == "rival" else lines[lines["family"] == ALIASES.get(family, family)]
    if mode:
        found = _where(found, [set(mode.split("+")) == set(one.split()) for one in found["mode"]])
    for item in filter(None, wanted.split(",")):
        key, _, value = item.partition("=")
        paths = {path.rpartition(".")[2]: path for path in ("batch_size", "seq_len", "num_params", *_paths(found))}
        values = studies.column(found, paths[key]) if key in paths else [None] * len(found)
        found = _where(found, [str(one) == value for one in values])
    found = found[found["tokens_per_s"].notna()]
    agreeing = found[speeds.comparable(found)]
    found = agreeing if len(agreeing) else found  # what differs is labelled where it is shown, and never chosen by itself
    if not len(found):
        raise ValueError(f"{selector}: no measured line fits; name one of {', '.join(sorted(lines['family'].unique()))}")
    return speeds.fastest(found)


def _where(found: pd.DataFrame, mask: list[bool]) -> pd.DataFrame:
    return found[pd.Series(mask, index=found.index, dtype=bool)]


def _paths(found: pd.DataFrame) -> list[str]:
    known = list(map(str, rows.settings(found).columns)) if len(found) else []
    return [path for path in known if path.startswith(studies.CHOSEN)]


def percent(change: float) -> str:
    """`+9.8%` with a true minus."""
    return f"{change:+.1%}".replace("-", "−")


def interval(found: dict[str, Any]) -> str:
    """`1.59–1.93`, or what stands in its place."""
    return "no interval" if found["lo"] is None else f"{found['lo']:.2f}–{found['hi']:.2f}"


KINDS: dict[str, Callable[[list[pd.Series]], str]] = {
    "ratio": lambda two: f"{speeds.ratio(*two)['value']:.2f}x",
    "interval": lambda two: interval(speeds.ratio(*two)),
    "change": lambda two: percent(speeds.ratio(*two)["value"] - 1),
    "speed": lambda one: f"{one[0]['tokens_per_s']:,.0f}",
    "tflops": lambda one: f"{one[0]['tflops_6p']:.0f}",
    "device": lambda one: f"{one[0]['device_gb']:.0f} GB",
    "host": lambda one: f"{one[0]['host_gb']:.0f} GB",
    "machine": lambda one: names.machine(one[0]["machine_details"]),
    "name": lambda one: names.name(one[0]),
}
"""What a marker can ask for, and how it is written."""


def number(kind: str, what: str, lines: pd.DataFrame) -> str:
    """The text of one marker. Raises ValueError, one line, that names it."""
    where = f"{{{kind}:{what}}}"
    place, *selectors = what.split("/")
    name, _, run = place.partition("@")
    mine = lines[lines["study"] == name]
    if kind == "spread":
        return _spread(mine, selectors, where)
    if kind not in KINDS or not len(mine):
        allowed = ", ".join([*KINDS, "spread"]) if kind not in KINDS else ", ".join(sorted(lines["study"].unique()))
        raise ValueError(f"{where}: got {kind if kind not in KINDS else name!r}, allowed {allowed}; mend the marker")
    wanted = mine["run"].str.endswith(run) if run else mine["run"] == lead(studies.of_rows(name, mine), mine)
    try:
        return KINDS[kind]([line(mine[wanted], selector) for selector in selectors])
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _spread(lines: pd.DataFrame, selectors: list[str], where: str) -> str:
    """The least and the largest ratio of two lines over all runs that measured both."""
    found = []
    for _, mine in lines.groupby("run"):
        try:
            found.append(speeds.ratio(*[line(mine, selector) for selector in selectors])["value"])
        except ValueError:
            continue
    if not found:
        raise ValueError(f"{where}: no run measured both")
    return f"{min(found):.2f}x to {max(found):.2f}x" if len(found) > 1 else f"{found[0]:.2f}x"


def fill(text: str, lines: pd.DataFrame) -> str:
    """The page with every marker's number as the rows give it now."""

    def filled(match: re.Match[str]) -> str:
        kind, what, _ = match.groups()
        return f"<!--{{{kind}:{what}}}-->{number(kind, what, lines)}<!--/-->"

    return MARKER.sub(filled, text)


def plain(text: str) -> str:
    """The page without what markers fill, for the test that prose types no number by itself."""
    return MARKER.sub("", text)
