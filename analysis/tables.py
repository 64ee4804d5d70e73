"""Lines of one run -> the table that a page, a terminal or a paper shows, one cell of text each.

Invariant: a faster line with other numerics is labelled and stands below what is ranked; what was not measured says why.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pandas as pd

from analysis import names, numbers, rows, speeds, studies
from analysis.studies import Study
from sweeps.result import STAND_IN

NONE = "—"
WORDS = ("answer", "machine", "commit", "state", "losses", "system", "model", "doubt", "the paper's machine")
"""Columns of words, which stand to the left."""
REFUSAL = re.compile(r"needs ([\d,]+) bytes of (\w+) memory, .*?([\d,]+)")


def base_of(study: Study, lines: pd.DataFrame) -> pd.Series | None:
    """What the lines of a run are held against: the study's base, else the fastest plain ZeRO-3, else the fastest rival."""
    ready = lines[speeds.comparable(lines)]
    wanted = ready[ready["family"] == (study.base or "zero3")]
    wanted = wanted if len(wanted) else ready[numbers.rivals(ready)]
    return speeds.fastest(wanted) if len(wanted) else None


def comparison(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The systems of one run, ranked: fastest first, then what differs, then what was not measured."""
    base = base_of(study, lines)
    orders = [_order(line, bool(may)) for (_, line), may in zip(lines.iterrows(), speeds.comparable(lines), strict=True)]
    ranked = lines.iloc[sorted(range(len(lines)), key=orders.__getitem__)]
    over = f"vs {names.short_name(base, lines)}" if base is not None else "ratio"
    return pd.DataFrame(
        [
            {"system": label, **_speed(line), **_over(line, base, over), **_memory(line), "losses": losses(line)}
            for (_, line), label in zip(ranked.iterrows(), labels(ranked), strict=True)
        ]
    )


def labels(lines: pd.DataFrame) -> list[str]:
    """The name of each line and, where several have one name, what tells them apart: `Twin-Flow, compiled (huge pages)`."""
    called = [names.name(line) for _, line in lines.iterrows()]
    told = []
    for position, name in enumerate(called):
        alike = lines.iloc[[number for number, other in enumerate(called) if other == name]]
        apart = [path for path in studies.differing(alike) if path.startswith(studies.CHOSEN)]
        mine = rows.settings(lines.iloc[[position]]).iloc[0]
        words = [_setting(path, mine.get(path)) for path in apart]
        words = [word for word in words if word]
        told.append(f"{name} ({', '.join(words)})" if words else name)
    return [name if told.count(name) == 1 else f"{name} ({told[:place].count(name) + 1})" for place, name in enumerate(told)]


def _setting(path: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)) or value is False:
        return ""
    return names.setting(path) if value is True else f"{names.setting(path)} {names.value(path, value)}"


def _order(line: pd.Series, may: bool) -> tuple[int, float]:
    speed = line["tokens_per_s"]
    return (2 if pd.isna(speed) else 0 if may else 1), -(0.0 if pd.isna(speed) else speed)


def _speed(line: pd.Series) -> dict[str, str]:
    if pd.isna(line["tokens_per_s"]):
        return {"tokens/s": names.STATUSES.get(line["status"], line["status"])}
    return {"tokens/s": f"{line['tokens_per_s']:,.0f}"}


def _over(line: pd.Series, base: pd.Series | None, title: str) -> dict[str, str]:
    if base is None or pd.isna(line["tokens_per_s"]):
        return {title: NONE, "95% interval": NONE}
    if line.name == base.name:
        return {title: "1.00x", "95% interval": NONE}
    found = speeds.ratio(line, base)
    return {title: f"{found['value']:.2f}x", "95% interval": numbers.interval(found)}


def _memory(line: pd.Series) -> dict[str, str]:
    measured = not pd.isna(line["tokens_per_s"])
    shown = {"device GB": line["device_gb"], "host GB": line["host_gb"]}
    return {
        name: (f"{value:.0f}" if value >= 10 else f"{value:.1f}") if measured and not pd.isna(value) else NONE
        for name, value in shown.items()
    }


def losses(line: pd.Series) -> str:
    """Whether the losses are the reference's, and how far they lie from them at most."""
    gap = line["max_loss_difference"]
    if pd.isna(line["tokens_per_s"]) or line["agrees"] is None:
        return NONE if pd.isna(line["tokens_per_s"]) else "not compared"
    if gap == 0.0 and line["family"] in (numbers.REFERENCE, STAND_IN):
        return "reference"
    word = "same" if line["agrees"] else "differ"
    return word if pd.isna(gap) else f"{word} ({gap:.0e})" if gap else f"{word} (0)"


def axes(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of one run of a study that varies something, in its order, each with its change against what it is held against."""
    ordered = sort(study, lines)
    shown = [path for path in (study.x, study.hue) if path]
    over = f"vs {base_title(study, lines)}"
    told = []
    for _, line in ordered.iterrows():
        base = base_line(study, ordered, line)
        change = NONE
        if base is not None and not pd.isna(line["tokens_per_s"]) and line.name != base.name:
            found = speeds.ratio(line, base)
            change = numbers.percent(found["value"] - 1) if not study.base_is_rival else f"{found['value']:.2f}x"
            if found["lo"] is not None:
                ends = (found["lo"] - 1, found["hi"] - 1)
                change += (
                    f" ({ends[0]:+.1%} to {ends[1]:+.1%})".replace("-", "−")
                    if not study.base_is_rival
                    else f" ({numbers.interval(found)})"
                )
        told.append(
            {names.setting(path): _value(line, path) for path in shown}
            | _speed(line)
            | ({"TFLOPS": NONE if pd.isna(line["tflops_6p"]) else f"{line['tflops_6p']:.0f}"} if study.value == "tflops_6p" else {})
            | {over: change}
            | _memory(line)
        )
    return pd.DataFrame(told)


def _value(line: pd.Series, path: str) -> str:
    if path == "system":
        return names.name(line)
    if path == "system.preset":
        return names.family_name(line["family"])
    return names.value(path, line[path] if path in line.index else studies.column(line.to_frame().T, path).iloc[0])


def sort(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines in the order of x, then hue; systems in that of legends."""
    if study.x is None:
        return lines
    order = list(names.SYSTEMS)
    keyed = lines.assign(first=_sortable(lines, study.x, order), second=_sortable(lines, study.hue, order) if study.hue else 0)
    return keyed.sort_values(["first", "second"], kind="stable").drop(columns=["first", "second"])


def _sortable(lines: pd.DataFrame, path: str, order: list[str]) -> Any:
    if path in ("system", "system.preset"):
        return [order.index(one) if one in order else one for one in lines["family"]]
    values = studies.column(lines, path)
    numeric = pd.to_numeric(values, errors="coerce")
    return numeric if numeric.notna().all() else values.map(str)


def base_line(study: Study, ordered: pd.DataFrame, line: pd.Series) -> pd.Series | None:
    """What a line is held against: ZeRO-3 at the same x where systems differ, else the line at x = effect.from, else the first."""
    ready = ordered[speeds.comparable(ordered)]
    if study.base_is_rival:
        same = ready[(studies.column(ready, str(study.x)) == _raw(line, str(study.x))) & (ready["family"] == "zero3")]
        return same.iloc[0] if len(same) else None
    if study.effect:
        at = ready[studies.column(ready, str(study.x)) == study.effect["from"]]
        at = at[studies.column(at, study.hue) == _raw(line, study.hue)] if study.hue else at
        return at.iloc[0] if len(at) else None
    return ready.iloc[0] if len(ready) else None


def _raw(line: pd.Series, path: str) -> Any:
    return studies.column(line.to_frame().T, path).iloc[0]


def base_title(study: Study, lines: pd.DataFrame) -> str:
    """What the lines are held against, in words."""
    if study.base_is_rival:
        return "ZeRO-3"
    if study.effect:
        return f"{names.setting(str(study.x))} {names.value(str(study.x), study.effect['from'])}"
    return "the first line"


def of(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The table of one run."""
    return comparison(study, lines) if study.figure == "comparison" or study.x is None else axes(study, lines)


def markdown(table: pd.DataFrame) -> str:
    """As a page shows it: numbers to the right, the best speed bold."""
    align = ["left" if position == 0 or name in WORDS else "right" for position, name in enumerate(table.columns)]
    text = str(table.to_markdown(index=False, colalign=align, disable_numparse=True))
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", " ", text))


def latex(table: pd.DataFrame, caption: str, label: str) -> str:
    """As a paper includes it (booktabs)."""
    columns = "l" + "r" * (len(table.columns) - 1)
    style = table.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
    return str(style.to_latex(hrules=True, column_format=columns, caption=caption, label=f"tab:{label}", position="t"))


def notes(lines: pd.DataFrame) -> list[str]:
    """What a reader must know beside the table: what failed and why, what differs, what was done otherwise than asked."""
    told = []
    for _, line in lines.iterrows():
        name = names.name(line)
        if pd.isna(line["tokens_per_s"]):
            told.append(f"{name}: {names.STATUSES.get(line['status'], line['status'])}{_why(line['reason'])}.")
            continue
        if line["agrees"] is False and line["system"] != numbers.REFERENCE:
            told.append(
                f"{name}: its losses differ from the reference by up to {line['max_loss_difference']:.0e}; it is not ranked."
            )
        if isinstance(line["caveat"], str) and line["caveat"]:
            told.append(f"{name}: {line['caveat']}.")
        if line["num_failed"]:
            told.append(f"{name}: {line['num_failed']} of its repeats failed.")
        if _still_faster(line["step_s"]) and line["num_repeats"] == 1:
            told.append(f"{name}: its windows were still getting faster, so its speed is too low.")
    return list(dict.fromkeys(told))


def _why(reason: str) -> str:
    if found := REFUSAL.search(reason or ""):
        needed, kind, allowed = found.groups()
        return f", for it needs {_gb(needed)} of {kind} memory and {_gb(allowed)} are allowed"
    return f": {reason}" if reason else ""


def _gb(num_bytes: str) -> str:
    return f"{int(num_bytes.replace(',', '')) / 1e9:,.0f} GB"


def _still_faster(step_s: list[float]) -> bool:
    falling = len(step_s) > 1 and all(one >= two for one, two in itertools.pairwise(step_s))
    return falling and step_s[-1] < 0.98 * sum(step_s) / len(step_s)
