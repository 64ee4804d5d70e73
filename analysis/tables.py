"""Lines of one run -> the table that a page, a terminal or a paper shows, one cell of text each.

Invariant: a faster line with other numerics is labelled and stands below what is ranked; what was
not measured says why.
"""

import itertools
import re
from typing import Any

import pandas as pd

from analysis import names, numbers, rows, speeds, studies
from analysis.studies import Study
from sweeps.agreement import ADAPTERS, REFERENCE, STAND_IN

NONE = "—"
WORDS = {
    "answer",
    "held down by",
    "machine",
    "commit",
    "state",
    "losses",
    "system",
    "model",
    "doubt",
}
"""Columns of words, which stand to the left."""
REFUSAL = re.compile(r"needs ([\d,]+) bytes of (\w+) memory, .*?([\d,]+)")
CPU_NOTE = "CPU speeds prove wiring and numerics; they say nothing about GPUs."


def of(study: Study, lines: pd.DataFrame, *, energy: bool = False) -> pd.DataFrame:
    """The table of one run; with `energy` also joules a token and the clock, where rows know."""
    if study.figure == "quality":
        return quality(lines)
    shown = comparison(study, lines) if study.compares else axes(study, lines)
    if not energy:
        return shown
    told = pd.DataFrame([_energy(line) for _, line in lines.iterrows()], index=lines.index)
    return shown.join(told[[name for name in told if (told[name] != NONE).any()]])


def _energy(line: pd.Series) -> dict[str, str]:
    joules, mhz = line["joules_per_token"], line["sm_mhz"]
    return {
        "J/token": _known(joules, "#.3g"),
        "GHz": _known(mhz / 1e3, ".2f"),
        "held down by": names.throttled(line["throttle_reasons"]) or NONE,
    }


def comparison(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The systems of one run: fastest first, then what differs, then what was not measured."""
    base = base_of(study, lines)
    group = lines["tokens_per_s"].isna() * 2 + ~speeds.comparable(lines)
    ranked = lines.assign(group=group, speed=-lines["tokens_per_s"].fillna(0.0))
    ranked = ranked.sort_values(["group", "speed"], kind="stable")
    over = "ratio" if base is None else f"vs {names.short_name(base, lines)}"
    told = []
    for label, (_, line) in zip(labels(ranked), ranked.iterrows(), strict=True):
        ratio = {over: NONE, "95% interval": NONE}
        if base is not None and line.name == base.name:
            ratio[over] = "1.00x"
        elif base is not None and not pd.isna(line["tokens_per_s"]):
            found = speeds.ratio(line, base)
            ratio = {over: found.times, "95% interval": found.interval() or "no interval"}
        told.append(
            {"system": label} | _speed(line) | ratio | _memory(line) | {"losses": losses(line)}
        )
    return pd.DataFrame(told, index=ranked.index)


def quality(lines: pd.DataFrame) -> pd.DataFrame:
    """What each system of one run learnt, and what that cost over LoRA. Adapters come last, for
    they train another function."""
    adapters = lines["system"].isin(ADAPTERS)
    ordered = lines.assign(adapters=adapters).sort_values("adapters", kind="stable")
    lora = lines[(lines["system"] == ADAPTERS[0]) & lines["tokens_per_s"].notna()]
    told = []
    for label, (_, line) in zip(labels(ordered), ordered.iterrows(), strict=True):
        over = NONE
        if len(lora) and not pd.isna(line["tokens_per_s"]):
            over = speeds.ratio(line, lora.iloc[0]).times
        learnt = {"held-out loss": _known(line["heldout_loss"], ".4f")}
        learnt |= {"exact match": _known(line["exact_match"], ".1%")}
        joules = {"J/token": _known(line["joules_per_token"], "#.3g")}
        speed = _speed(line) | {"vs LoRA": over}
        told.append({"system": label} | learnt | speed | joules | _memory(line))
    return pd.DataFrame(told, index=ordered.index)


def _known(number: Any, form: str) -> str:
    return NONE if pd.isna(number) else format(number, form)


def base_of(study: Study, lines: pd.DataFrame) -> pd.Series | None:
    """What the lines of a run are held against.

    It is the study's base, else the fastest plain ZeRO-3, else the fastest rival.
    """
    ready = lines[speeds.comparable(lines)]
    wanted = ready[ready["family"] == (study.base or "zero3")]
    wanted = wanted if len(wanted) else ready[numbers.rivals(ready)]
    return speeds.fastest(wanted) if len(wanted) else None


def labels(lines: pd.DataFrame) -> list[str]:
    """The name of each line and, where several have one name, what tells them apart.

    `Twin-Flow, compiled (huge pages)`.
    """
    called = pd.Series([names.name(line) for _, line in lines.iterrows()], index=lines.index)
    told: list[str] = []
    for place, name in called.items():
        alike = studies.differing(lines[called == name])
        mine = rows.settings(lines.loc[[place]]).iloc[0]
        apart = [path for path in alike if path.startswith(studies.CHOSEN)]
        words = ", ".join(filter(None, [_setting(path, mine.get(path)) for path in apart]))
        told.append(f"{name} ({words})" if words else str(name))
    numbered = [f"{name} ({told[:at].count(name) + 1})" for at, name in enumerate(told)]
    return [one if told.count(name) > 1 else name for name, one in zip(told, numbered, strict=True)]


def _setting(path: str, value: Any) -> str:
    if value is False or pd.isna(value):
        return ""
    words = "" if value is True else f" {names.value(path, value)}"
    return f"{names.setting(path)}{words}"


def _speed(line: pd.Series) -> dict[str, str]:
    unmeasured = names.STATUSES.get(line["status"], line["status"])
    speed = line["tokens_per_s"]
    return {"tokens/s": unmeasured if pd.isna(speed) else f"{speed:,.0f}"}


def _memory(line: pd.Series) -> dict[str, str]:
    shown = {}
    for place in ("device", "host"):
        size = line[f"{place}_gb"]
        unknown = pd.isna(line["tokens_per_s"]) or pd.isna(size)
        shown[f"{place} GB"] = NONE if unknown else f"{size:.0f}" if size >= 10 else f"{size:.1f}"
    return shown


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


def axes(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of a run of a study that varies something, each with its change from its base."""
    ordered = sort(study, lines)
    over = f"vs {base_title(study)}"
    told = []
    for _, line in ordered.iterrows():
        base = base_line(study, ordered, line)
        change = NONE
        if base is not None and not pd.isna(line["tokens_per_s"]) and line.name != base.name:
            found = speeds.ratio(line, base)
            change = found.short if study.of_systems else found.short_change
        cells = {names.setting(path): value(line, path) for path in (study.x, study.hue) if path}
        work = NONE if pd.isna(line["tflops_6p"]) else f"{line['tflops_6p']:.0f}"
        tflops = {"TFLOPS": work} if study.value == "tflops_6p" else {}
        told.append(cells | _speed(line) | tflops | {over: change} | _memory(line))
    return pd.DataFrame(told, index=ordered.index)


def value(line: pd.Series, path: str) -> str:
    """A value of an axis in words; a system or a rung of the ladder by its name."""
    if path in ("system", "system.preset"):
        return names.name(line) if path == "system" else names.family_name(line["family"])
    return names.value(path, studies.value(line, path))


def sort(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines in the order of x, then hue; systems in that of legends."""
    paths = [path for path in (study.x, study.hue) if path]
    keys = {f"key{number}": _sortable(lines, path) for number, path in enumerate(paths)}
    return lines.assign(**keys).sort_values(list(keys), kind="stable").drop(columns=list(keys))


def _sortable(lines: pd.DataFrame, path: str) -> Any:
    if path in ("system", "system.preset"):
        order = list(names.SYSTEMS)
        return [order.index(one) if one in order else one for one in lines["family"]]
    values = studies.column(lines, path)
    numeric = pd.to_numeric(values, errors="coerce")
    return numeric if numeric.notna().all() else values.map(str)


def base_line(study: Study, ordered: pd.DataFrame, line: pd.Series) -> pd.Series | None:
    """What a line is held against.

    ZeRO-3 at the same x where systems differ, else the line at x = effect.from, else the first.
    """
    ready = ordered[speeds.comparable(ordered)]
    x = studies.column(ready, str(study.x))
    if study.of_systems:
        ready = ready[(x == studies.value(line, str(study.x))) & (ready["family"] == "zero3")]
    elif study.effect:
        ready = ready[x == study.effect["from"]]
        if study.hue:
            ready = ready[studies.column(ready, study.hue) == studies.value(line, study.hue)]
    return ready.iloc[0] if len(ready) else None


def base_title(study: Study) -> str:
    """What the lines are held against, in words."""
    if study.of_systems:
        return "ZeRO-3"
    if not study.effect:
        return "the first line"
    x = str(study.x)
    return f"{names.setting(x)} {names.value(x, study.effect['from'])}"


def markdown(table: pd.DataFrame) -> str:
    """The table as a page shows it: words to the left, numbers to the right."""
    words = {table.columns[0], "the paper's machine", *WORDS}
    align = ["left" if name in words else "right" for name in table.columns]
    text = str(table.to_markdown(index=False, colalign=align, disable_numparse=True))
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", " ", text))


def latex(table: pd.DataFrame, caption: str, label: str) -> str:
    """The table as a paper includes it (booktabs)."""
    columns = "l" + "r" * (len(table.columns) - 1)
    style = table.style.hide(axis="index").format(escape="latex")
    style = style.format_index(escape="latex", axis=1)
    options: Any = {"caption": caption, "label": f"tab:{label}", "position": "t"}
    return str(style.to_latex(hrules=True, column_format=columns, **options))


def notes(lines: pd.DataFrame) -> list[str]:
    """What a reader must know beside the table: what failed and why, and what differs."""
    told = []
    for _, line in lines.iterrows():
        told += [f"{names.name(line)}{note}." for note in _notes(line)]
    if not lines.iloc[0]["machine_details"].get("gpu"):
        told.append(CPU_NOTE)
    return list(dict.fromkeys(told))


def _notes(line: pd.Series) -> list[str]:
    if pd.isna(line["tokens_per_s"]):
        return [f": {names.STATUSES.get(line['status'], line['status'])}{_why(line['reason'])}"]
    told = []
    if line["agrees"] is False and line["system"] != REFERENCE:
        gap = f"{line['max_loss_difference']:.0e}"
        told.append(f": its losses differ from the reference by up to {gap}; it is not ranked")
    if isinstance(line["caveat"], str) and line["caveat"]:
        told.append(f": {line['caveat']}")
    if line["num_failed"]:
        told.append(f": {line['num_failed']} of its repeats failed")
    if _still_faster(line["step_s"]) and line["num_repeats"] == 1:
        told.append(": its windows were still getting faster, so its speed is too low")
    return told


def _why(reason: str) -> str:
    if found := REFUSAL.search(reason or ""):
        needed, kind, allowed = found.groups()
        sizes = [f"{int(size.replace(',', '')) / 1e9:,.0f} GB" for size in (needed, allowed)]
        return f", for it needs {sizes[0]} of {kind} memory and {sizes[1]} are allowed"
    return f": {reason}" if reason else ""


def _still_faster(step_s: list[float]) -> bool:
    falling = len(step_s) > 1 and all(one >= two for one, two in itertools.pairwise(step_s))
    return falling and step_s[-1] < 0.98 * sum(step_s) / len(step_s)
