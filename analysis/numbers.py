"""Numbers in prose: a marker in a page names a number, and this fills it in from the rows.

    <!--{ratio:vs_zero3_14b/fast/zero3}-->1.75x<!--/-->          shown as 1.75x
    <!--{ratio:vs_zero3_14b/paper/zero3}-->0.95x (one round)<!--/-->      where rounds are few
    <!--{interval:vs_zero3_7b@ba71c3ca/fast/twinflow}-->...   of that run, else the leading one
    <!--{steady:vs_zero3_3b@06e212f3/fast/roundpipe}-->2.88x<!--/-->    of steady rates
    <!--{share:saving@2fa189ef/fast}-->95%<!--/-->               of the peak that its GPU sustains
    <!--{heldout:quality@98d7b6ad/fast_float8/fast}-->0.0014 nats below<!--/-->     where one ends
    <!--{gain:zero3_kept-qwen2.5-3b-h200-32cores}-->1.05x (one round)<!--/-->   a search's gain
    <!--{trials:zero3_kept-qwen2.5-3b-h200-32cores}-->3<!--/-->     how many trials it had
    <!--{table:vs_zero3_14b/5}-->                                the first lines of its table

A line is named by its family, less megatrain_ and zero3_, and, where several ran, its mode: `fast`,
`twinflow`, `zero3.kept+compiled`, `fast.plain` for none; `rival` is the fastest system that is not
the engine nor the reference. Of several lines that fit, the fastest counts. Invariant: a page's
numbers are exactly what its markers give, or a test fails.
"""

import json
import re
from contextlib import suppress
from typing import Any

import pandas as pd

from analysis import answers, names, speeds, studies, tables
from sweeps.identity import TUNED

KINDS = "speed, share, heldout, repeats, machine, ratio, steady, interval, spread, least, most"
KINDS += ", gain, trials, table"
MARKER = re.compile(r"(<!--\{([a-z_]+):([^}]*)\}-->).*?<!--/-->", re.DOTALL)


def line(lines: pd.DataFrame, selector: str) -> Any:
    """The fastest line that the selector fits. Raises ValueError, one line, where none does."""
    family, _, mode = selector.partition(".")
    named = lines["family"].isin([family, f"megatrain_{family}", f"zero3_{family}"])
    fits = speeds.rivals(lines) if family == "rival" else named
    if mode:
        fits &= lines["mode"].str.split().map(set) == set(mode.split("+")) - {"plain"}
    found = lines[fits & lines["tokens_per_s"].notna()]
    agreeing = found[speeds.comparable(found)]
    found = agreeing if len(agreeing) else found  # what differs is labelled, and never preferred
    if not len(found):
        families = ", ".join(sorted(lines["family"].unique()))
        raise ValueError(f"{selector}: no measured line fits; name one of {families}")
    return speeds.fastest(found)


def ratios(lines: pd.DataFrame, selectors: list[str]) -> list[speeds.Ratio]:
    """`speeds.ratios` of two lines in every run that measured both. Raises ValueError where none
    did."""
    pairs = []
    for _, mine in lines.groupby("run"):
        mine = studies.main_part(studies.of_rows(str(mine["study"].iloc[0]), mine), mine)
        with suppress(ValueError):
            pairs.append([line(mine, selector) for selector in selectors])
    found = speeds.ratios(pairs)
    if not found:
        raise ValueError("no run measured both; mend the marker")
    return found


def number(kind: str, what: str, lines: pd.DataFrame) -> str:
    """The text of one marker. Raises ValueError, one line, that names it."""
    place, *selectors = what.split("/")
    if kind in ("trials", "gain"):
        return _search(kind, what)
    try:
        here, every = run_of(place, lines), lines[lines["study"] == place]
        asked: list[Any] = selectors
        if kind not in ("spread", "table"):
            asked = [line(here, selector) for selector in selectors]
        match kind, asked:
            case "speed", [one]:
                return f"{one['tokens_per_s']:,.0f}"
            case "share", [one] if not pd.isna(one["mfu_sustained"]):
                return f"{one['mfu_sustained']:.0%}"
            case "heldout", [one, base] if not pd.isna(one["heldout_loss"] - base["heldout_loss"]):
                return answers.above_or_below(one["heldout_loss"] - base["heldout_loss"])
            case "repeats", [one]:
                return str(one["num_repeats"])
            case "machine", [one]:
                return names.machine(one.to_frame().T)
            case "ratio", [one, base]:
                return _times([speeds.ratio(one, base)])
            case "steady", [one, base] if (steady := speeds.steady(one, base)) > 0:
                return _times([speeds.ratio(one, base)._replace(value=steady)])
            case "interval", [one, base]:
                return speeds.ratio(one, base).interval or "no interval"
            case "table", [length]:
                shown = tables.of(studies.of_rows(str(here.iloc[0]["study"]), here), here)
                return f"\n{tables.markdown(shown[: int(length)])}\n"
            case "spread", [_, _]:
                return _times(ratios(every, selectors))
            case "least" | "most", []:
                x = str(studies.of_rows(place, every).x)
                known = every[every["tokens_per_s"].notna()][x].dropna()
                return names.value(x, int(known.min() if kind == "least" else known.max()))
        allowed = f"allowed {KINDS}, each of its number of lines that have it"
        raise ValueError(f"{allowed}; mend the marker")
    except ValueError as error:
        raise ValueError(f"{{{kind}:{what}}}: {error}") from None


def _times(found: list[speeds.Ratio]) -> str:
    """The least to the largest of sorted ratios, and in how many rounds where those are few."""
    ends = " to ".join(dict.fromkeys([found[0].times, found[-1].times]))
    few = speeds.few_rounds(found)
    return f"{ends} ({few})" if few else ends


def _search(kind: str, name: str) -> str:
    """How many trials a search of conf/system/tuned had, or what its best is of where it began.
    ValueError, one line, where there is none, or its first trial has no number."""
    path = TUNED / f"{name}.jsonl"
    trials = path.read_text().splitlines() if path.is_file() else []
    found = [json.loads(trial)["tokens_per_s"] or 0.0 for trial in trials]
    if not found or not found[0]:
        there = ", ".join(sorted(one.stem for one in TUNED.glob("*.jsonl")))
        raise ValueError(f"{{{kind}:{name}}}: allowed {there}, measured at first; mend the marker")
    return str(len(found)) if kind == "trials" else f"{max(found) / found[0]:.2f}x (one round)"


def run_of(place: str, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of STUDY@RUN, or of a study's leading run. ValueError where there are none."""
    name, _, run = place.partition("@")
    mine = lines[(lines["study"] == name) & lines["run"].str.endswith(run)]
    if not len(mine):
        allowed = ", ".join(sorted(lines["study"].unique()))
        raise ValueError(f"got {place!r}, allowed {allowed}; mend the marker")
    study = studies.of_rows(name, mine)
    return studies.main_part(study, studies.leading(study, mine))


def fill(text: str, lines: pd.DataFrame) -> str:
    """The page with every marker's number as the rows that none supersedes give it now."""
    current = lines[~lines["superseded"]]
    return MARKER.sub(lambda one: f"{one[1]}{number(one[2], one[3], current)}<!--/-->", text)
