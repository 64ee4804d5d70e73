"""Lines of one run -> the table that a page, a terminal or a paper shows, one cell of text each.

Invariant: a faster line with other numerics is labelled and stands below what is ranked; what was
not measured says why.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import names, speeds, studies
from analysis.studies import Study
from sweeps.agreement import ADAPTERS, COMPARED_STEPS, REFERENCE, STAND_IN
from sweeps.identity import TUNED, in_force, kind

NONE = "—"
WORDS = {"system", "model", "machine", "the paper's machine", "commit", "state"}
WORDS |= {"answer", "losses", "held down by", "doubt"}
"""Columns of words, which stand to the left, as the first one does."""
PLURAL = r"(?<=[a-z])s\b"
"""The ending of the first word of several, in the unit of a setting."""
REFUSAL = re.compile(r"needs ([\d,]+) bytes of (\w+) memory, .*?([\d,]+)")
SEARCHED = "tuned"
"""Word of the mode of a rival whose options a search found."""
CPU_NOTE = "CPU speeds prove wiring and numerics; they say nothing about GPUs."


def of(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The table of one run, with joules a token and the clock where rows know them; without columns
    that say nothing."""
    if study.figure == "quality":
        shown = quality(lines)
    else:
        shown = comparison(study, lines) if study.compares else axes(study, lines)
    if lines["joules_per_token"].notna().any():
        shown["J/token"] = _text(lines["joules_per_token"], "#.3g")
        shown["GHz"] = _text(lines["sm_mhz"] / 1e3, ".2f")
        shown["held down by"] = lines["throttle_reasons"].map(names.throttled).replace("", NONE)
    return shown[[name for name in shown if set(shown[name]) != {NONE}]]


def comparison(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The systems of one run: fastest first, then what differs, then what was not measured."""
    ranked = rank(lines)
    base, found = base_of(study, lines), ratios(study, ranked)
    times = found.map(lambda one: one.times, na_action="ignore")
    if base is not None:
        times[base.name] = "1.00x"
    shown = {
        "system": labels(ranked),
        "tokens/s": _speed(ranked),
        **_steady(ranked),
        "ratio" if base is None else f"vs {names.name(base)}": times,
        "95% interval": found.map(lambda one: one.interval or "no interval", na_action="ignore"),
        **_memory(ranked),
        "losses": ranked.apply(losses, axis=1),
    }
    return pd.DataFrame(shown).fillna(NONE)


def quality(lines: pd.DataFrame) -> pd.DataFrame:
    """What each system learnt, and at what speed; what trains another function stands below."""
    ordered = lines.sort_values("system", key=lambda all: all.isin(ADAPTERS), kind="stable")
    lora = ordered["tokens_per_s"].where(ordered["system"] == ADAPTERS[0]).max()
    shown = {
        "system": labels(ordered),
        "held-out loss": _text(ordered["heldout_loss"], ".4f"),
        "exact match": _text(ordered["exact_match"], ".1%"),
        "tokens/s": _speed(ordered),
        "vs LoRA": _text(ordered["tokens_per_s"] / lora, ".2f", "x"),
        **_memory(ordered),
    }
    return pd.DataFrame(shown)


def axes(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of a run of a study that varies something, each with its change from its base."""
    ordered = sort(study, lines)
    shown: dict[str, Any] = {}
    for path in study.axes:
        shown[names.setting(path)] = ordered.apply(value, axis=1, path=path)
    shown |= {"tokens/s": _speed(ordered), **_steady(ordered)}
    if study.value == "tflops_6p":
        shown["TFLOPS"] = _text(ordered["tflops_6p"], ".0f")
    shown[f"vs {base_title(study)}"] = ratios(study, ordered).map(
        lambda found: found.told(change=study.hue != "system"), na_action="ignore"
    )
    if ordered["num_ranks"].nunique() > 1:
        each = ordered["tokens_per_s"] / ordered["num_ranks"]
        alike = [ordered[path].map(repr) for path in ("family", "mode", *study.axes)]
        # What grows with the ranks, as the batch may, tells no two scalings apart.
        ranks = [*alike[:2], ordered["num_ranks"]]
        apart = [one for one in alike[2:] if one.groupby(ranks).nunique().gt(1).any()]
        alone = each.where(ordered["num_ranks"] == 1).groupby([*alike[:2], *apart])
        shown["efficiency"] = _text(each / alone.transform("max"), ".0%")
    return pd.DataFrame(shown | _states(ordered) | _memory(ordered)).fillna(NONE)


def rank(lines: pd.DataFrame) -> pd.DataFrame:
    """The fastest first, then what is not ranked, then what was not measured."""
    may = lines.assign(may=speeds.comparable(lines))
    return may.sort_values(["may", "tokens_per_s"], ascending=False, kind="stable")


def ratios(study: Study, lines: pd.DataFrame) -> pd.Series:
    """The ratio of each line to what it is held against; None for that itself, and without one."""
    found = {}
    for place, line in lines.iterrows():
        base = base_of(study, lines, line)
        known = base is not None and base.name != place and not pd.isna(line["tokens_per_s"])
        found[place] = speeds.ratio(line, base) if known else None
    return pd.Series(found, dtype=object)


def base_of(study: Study, lines: pd.DataFrame, line: Any = None) -> Any:
    """What a line is held against, or None. Systems: the fastest plain ZeRO-3, else the fastest
    rival, else training in memory. Systems along x: the fastest ZeRO-3 at the same x. Where an
    effect is asked for: the line at x = effect.from of the same hue. Other settings: the first. The
    rest is equal in both."""
    ready = lines[speeds.comparable(lines)]
    if line is not None:
        ready = alike(study, ready, line)
    if study.compares:
        bases = [ready["family"] == "zero3", speeds.rivals(ready), ready["family"] == REFERENCE]
        found = next((ready[one] for one in bases if one.any()), None)
        return None if found is None else speeds.fastest(found)
    if study.hue == "system" and not study.effect:
        ready = ready[(ready[study.x] == line[study.x]) & (ready["family"] == "zero3")]
        return speeds.fastest(ready) if len(ready) else None
    elif study.effect:
        ready = ready[ready[study.x] == study.effect["from"]]
        if study.hue:
            same = ["family", "mode"] if study.hue == "system" else [study.hue]
            ready = ready[(ready[same] == line[same]).all(axis=1)]
    return ready.iloc[0] if len(ready) else None


def alike(study: Study, lines: pd.DataFrame, line: Any) -> pd.DataFrame:
    """Those that are as the line in all but x and hue; a knob that another system lacks is left."""
    for path in study.rest:
        if path == "system":
            lines = lines[lines["family"].eq(line["family"]) & lines["mode"].eq(line["mode"])]
            continue
        same = lines[path].map(_plain) == _plain(line[path])
        lacks = lines[path].isna() & lines["family"].ne(line["family"])
        lines = lines[same | (lacks & path.startswith("system."))]
    return lines


def _plain(value: Any) -> str:
    """Text that is the same for a number of numpy's and of Python's."""
    return repr(value.item() if isinstance(value, np.generic) else value)


def labels(lines: pd.DataFrame, *, seeds: bool = True) -> pd.Series:
    """The name of each line and, where several have one name, what tells them apart:
    `Twin-Flow, compiled (huge pages on)`. Without `seeds` those of one system share a name."""
    called = [names.name(line) for _, line in lines.iterrows()]
    told: Any = pd.Series(called, lines.index, dtype=object)
    for _, mine in lines.groupby(told, sort=False):
        apart = mine[sorted(studies.differing(mine))].filter(regex=studies.CHOSEN)
        apart = apart if seeds else apart.drop(columns="seed", errors="ignore")
        for place, line in apart.iterrows():
            found: Any = line.dropna().items()
            known = ", ".join(f"{names.setting(at)} {names.value(at, one)}" for at, one in found)
            told[place] += f" ({known})" if known else ""
    if not seeds:
        return pd.Series(told)
    numbered = told + " (" + (told.groupby(told).cumcount() + 1).astype(str) + ")"
    return pd.Series(told.mask(told.duplicated(keep=False), numbered))


def _text(numbers: pd.Series, form: str, unit: str = "") -> pd.Series:
    return numbers.map(lambda one: NONE if pd.isna(one) else f"{one:{form}}{unit}")


def _speed(lines: pd.DataFrame) -> pd.Series:
    speed = _text(lines["tokens_per_s"], ",.0f")
    return speed.mask(lines["tokens_per_s"].isna(), lines["status"].replace(names.STATUSES))


def _steady(lines: pd.DataFrame) -> dict[str, pd.Series]:
    """A column where some row knows it."""
    known = lines["steady_tokens_per_s"]
    return {"steady": _text(known, ",.0f")} if known.notna().any() else {}


def _memory(lines: pd.DataFrame) -> dict[str, pd.Series]:
    known = lines[["device_gb", "host_gb"]].where(lines["tokens_per_s"].notna())
    return {
        str(name).replace("_gb", " GB"): _text(size, ".1f").mask(size >= 10, _text(size, ".0f"))
        for name, size in known.items()
    } | _disk(lines)


def _disk(lines: pd.DataFrame) -> dict[str, pd.Series]:
    """Where some line has state on disk: how much, and what the drives were probed to do each way
    at once; and the speed that was predicted of it, or of what has no room."""
    on_disk, shown = lines["disk_gb"].notna(), {}
    if on_disk.any():
        shown["disk GB"] = _text(lines["disk_gb"].where(on_disk), ".0f")
        shown["drive GB/s"] = _text(lines["drive_gb_s"].where(on_disk), ".2f")
    told = lines["predicted_window"].where(on_disk | lines["tokens_per_s"].isna())
    if told.notna().any():
        shown["predicted tokens/s"] = _text(told, ",.0f")
    return shown


def _states(lines: pd.DataFrame) -> dict[str, pd.Series]:
    """What one state took, where some line saved any: that of its last window."""
    counted = [one[-1] if one else {} for one in lines["window_counters"]]
    last = pd.DataFrame(counted, lines.index).reindex(columns=["saved_bytes", "save_s"])
    if not last["saved_bytes"].notna().any():
        return {}
    again = pd.DataFrame(list(lines["counters"]), lines.index)
    again = again.reindex(columns=["resume_s", "resumed_difference"])
    return {
        "state GB": _text(last["saved_bytes"] / 1e9, ".3g"),
        "write s": _text(last["save_s"], ".0f"),
        "resume s": _text(again["resume_s"], ".0f"),
        "resumed losses off": _text(again["resumed_difference"], ".1g"),
    }


def value(line: pd.Series, path: str) -> str:
    """A value of an axis in words; a system or a rung of the ladder by its name."""
    if path in ("system", "system.preset"):
        return names.name(line) if path == "system" else names.family_name(line["family"])
    return names.value(path, line[path])


def at(line: Any, *paths: str) -> str:
    """`7.6B parameters`, `3 CUDA streams with 64K tokens per sequence`, `powers of two`."""
    told = []
    for path in paths:
        words, setting = value(line, path), names.setting(path)
        if words[:1].isdigit():
            unit = names.WORDS["units"].get(path, setting)
            words += f" {re.sub(PLURAL, '', unit, count=1) if words == '1' else unit}"
        elif path != "system" and path not in names.VALUES:
            words = f"{setting} {words}"
        told.append(words)
    return " with ".join(filter(None, [told[0], " and ".join(told[1:])])) if told else ""


def sort(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines in the order of x, then hue; systems in that of legends."""
    by = ["family" if path in ("system", "system.preset") else path for path in study.axes]
    return lines.sort_values(list(dict.fromkeys(by)), key=_sortable, kind="stable")


def _sortable(values: pd.Series) -> pd.Series:
    if values.name == "family":
        return values.replace({family: f"{at:02d}" for at, family in enumerate(names.SYSTEMS)})
    numeric = pd.to_numeric(values, errors="coerce")
    return numeric if numeric.notna().all() else values.map(str)


def losses(line: pd.Series) -> str:
    """Whether the losses are the reference's, and how far they lie from them at most."""
    gap = line["max_loss_difference"]
    if pd.isna(line["tokens_per_s"]):
        return NONE
    if line["agrees"] is None:
        return "not compared"
    if gap == 0.0 and line["family"] in (REFERENCE, STAND_IN):
        return "reference"
    word = "same" if line["agrees"] else "differ"
    return word if pd.isna(gap) else f"{word} ({gap:.0e})" if gap else f"{word} (0)"


def base_title(study: Study) -> str:
    """What the lines are held against, in words."""
    if study.effect:
        x, first = str(study.x), names.value(str(study.x), study.effect["from"])
        return first if x in names.VALUES else f"{names.setting(x)} {first}"
    return "ZeRO-3" if study.hue == "system" else "the first line"


def markdown(table: pd.DataFrame) -> str:
    """The table as a page shows it: words to the left, numbers to the right."""
    words = {table.columns[0], *WORDS}
    align = ["left" if name in words else "right" for name in table.columns]
    text = str(table.to_markdown(index=False, colalign=align, disable_numparse=True))
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", " ", text))


def latex(study: Study, lines: pd.DataFrame) -> str:
    """The table of a study's leading run, as a paper includes it (booktabs)."""
    table = of(study, studies.leading(study, lines))
    columns = "l" + "r" * (len(table.columns) - 1)
    options: Any = {"caption": study.title, "label": f"tab:{study.name}", "position": "t"}
    return str(table.to_latex(index=False, escape=True, column_format=columns, **options))


def notes(lines: pd.DataFrame) -> list[str]:
    """What a reader must know beside the table: what failed and why, and what differs."""
    told = [f"{names.name(line)}: {note}." for _, line in lines.iterrows() for note in _notes(line)]
    told += _searched(lines[speeds.rivals(lines)])
    told += _rounds(lines)
    if not lines.iloc[0]["machine_details"].get("gpu"):
        told.append(CPU_NOTE)
    return list(dict.fromkeys(told))


def _rounds(lines: pd.DataFrame) -> Iterator[str]:
    """How often each line was measured; silent where all were measured once."""
    rounds = lines.loc[lines["tokens_per_s"].notna(), "rounds"]
    count = rounds.map(len)
    if not (count > 1).any():
        return
    if len(rounds) > 1 and rounds.nunique() == 1:
        yield f"Each was measured in {count.iloc[0]} rounds, in turn."
        return
    called = labels(lines)
    for times in sorted({*count} - {1}, reverse=True):
        yield f"Measured in {times} rounds: {'; '.join(called[count.index[count == times]])}."
    if (count == 1).any():
        yield "Each of the others was measured once."


def _searched(rivals: pd.DataFrame) -> Iterator[str]:
    """How the options of each rival were found."""
    if not len(rivals):
        return
    tuned = rivals["mode"].map(lambda mode: SEARCHED in mode.split())
    for _, line in rivals[tuned].iterrows():
        of, search = "", "`+tune`"
        if found := _search(line):
            of = f" of {len(found.read_text().splitlines())} trials"
            search = f"`system=tuned/{found.stem}`"
        yield f"{names.name(line)}: its options are the best{of} of a search ({search})."
    if not tuned.all():
        others = "the other rivals" if tuned.any() else "rivals"
        yield f"The options of {others} are those of conf/system, not of a search."


def _search(line: pd.Series) -> Path | None:
    """The trials of the search whose best has these settings; of several that of the same model,
    and then of the same kind of machine."""
    found = []
    for path in sorted(TUNED.glob("*.jsonl")):
        trials = [json.loads(trial) for trial in path.read_text().splitlines()]
        best: Any = max(trials, key=lambda trial: trial["tokens_per_s"] or 0.0, default=None)
        if line["config"] and best and _settings(best) == _settings(line["config"]):
            found.append(path)
    wanted = f"-{line['model']}-", kind(line["machine_details"])
    return min(found, key=lambda path: [part not in path.stem for part in wanted], default=None)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a search may choose, of a row or a trial of any age."""
    groups = in_force(config)
    both = [*groups["system"].items(), *groups["process"].items()]
    return {key: value for key, value in both if key not in ("preset", "timeout_s")}


def _notes(line: pd.Series) -> Iterator[str]:
    if pd.isna(line["tokens_per_s"]):
        told, reason = names.STATUSES.get(line["status"], line["status"]), line["reason"] or ""
        if found := REFUSAL.search(reason):
            needs, has = (f"{int(one.replace(',', '')) / 1e9:,.0f} GB" for one in found.group(1, 3))
            yield f"{told}, for it needs {needs} of {found[2]} memory and {has} are allowed"
        else:
            yield f"{told}: {reason}" if reason else told
        return
    learnt = len(line["losses"]) > COMPARED_STEPS and not pd.isna(line["heldout_loss"])
    if line["agrees"] is False and line["system"] != REFERENCE and not learnt:
        gap = f"{line['max_loss_difference']:.0e}"
        yield f"its losses differ from the reference by up to {gap}; it is not ranked"
    if isinstance(line["caveat"], str) and line["caveat"]:
        yield line["caveat"]
    if line["host_unseen"]:
        yield "its host memory was not seen whole: more than twice as much was planned"
    if isinstance(line["reason"], str) and line["reason"]:
        yield line["reason"]
    if line["num_failed"]:
        yield f"{line['num_failed']} of its repeats failed"
    if speeds.unsettled(line):
        yield "its windows were still getting faster, so its speed is too low"
