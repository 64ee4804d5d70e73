"""The answer of a study in one or two sentences, made from its leading run."""

from __future__ import annotations

import pandas as pd

from analysis import names, numbers, speeds, studies, tables
from analysis.studies import Study


def sentence(study: Study, lines: pd.DataFrame) -> str:
    """What one run of a study says. lines: those of that run."""
    ready = lines[speeds.comparable(lines)]
    if not len(ready):
        return "Nothing was measured whose losses agree, so nothing is ranked."
    if study.figure == "comparison" or study.x is None:
        return _comparison(study, ready)
    if study.effect:
        return _effect(study, ready)
    return _systems(study, ready) if study.base_is_rival else _settings(study, ready)


def _comparison(study: Study, ready: pd.DataFrame) -> str:
    ranked = ready[ready["system"] != numbers.REFERENCE]
    if not len(ranked):
        return "Only the reference was measured."
    best, base = speeds.fastest(ranked), tables.base_of(study, ready)
    if base is None or base.name == best.name:
        return f"{names.name(best)} is the fastest, at {best['tokens_per_s']:,.0f} tokens/s."
    told = f"{names.name(best)} is {_times(best, base)} as fast as {names.name(base)}."
    others = ranked[ranked["family"] != best["family"]]
    rivals = others[numbers.rivals(others)]
    rival = speeds.fastest(rivals) if len(rivals) else base
    if rival.name != base.name:
        told += f" Its strongest rival in this run is {names.name(rival)}: {_times(best, rival)}."
    return told


def _times(one: pd.Series, base: pd.Series) -> str:
    found = speeds.ratio(one, base)
    ends = (
        f" (95% interval {found['lo']:.2f} to {found['hi']:.2f})"
        if found["lo"] is not None
        else " (too few windows for an interval)"
    )
    return f"{found['value']:.2f}x{ends}"


def _effect(study: Study, ready: pd.DataFrame) -> str:
    at, ends = study.effect.get("at", {}), _ends(study, ready)
    if ends is None:
        return "The two settings of the question were not both measured in this run."
    found = speeds.ratio(*ends)
    where = " and ".join(f"{names.value(path, value)} {names.setting(path)}" for path, value in at.items())
    name, values = names.setting(str(study.x)), [names.value(str(study.x), study.effect[end]) for end in ("from", "to")]
    interval = f" (95% interval {_percents(found)})" if found["lo"] is not None else ""
    change = numbers.percent(found["value"] - 1)
    return (
        f"Going from {values[0]} to {values[1]} {name}{f', with {where},' if where else ''} changes tokens/s by {change}{interval}."
    )


def _ends(study: Study, ready: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """The lines that the study's effect is between, (to, from); None where one was not measured."""
    for path, value in study.effect.get("at", {}).items():
        ready = ready[studies.column(ready, path) == value]
    ends = [ready[studies.column(ready, str(study.x)) == study.effect[end]] for end in ("to", "from")]
    return (ends[0].iloc[0], ends[1].iloc[0]) if all(map(len, ends)) else None


def _percents(found: dict[str, float]) -> str:
    return f"{numbers.percent(found['lo'] - 1)} to {numbers.percent(found['hi'] - 1)}"


def _settings(study: Study, ready: pd.DataFrame) -> str:
    best, worst = speeds.fastest(ready), speeds.slowest(ready)
    if best.name == worst.name:
        return f"Only one setting was measured: {best['tokens_per_s']:,.0f} tokens/s."
    if study.x == "system.preset":
        first = tables.sort(study, ready).iloc[0]
        return (
            f"With every switch on the engine is {_times(best, first)} as fast as the published algorithm ({place(study, first)})."
        )
    found = speeds.ratio(worst, best)
    interval = f" (95% interval {_percents(found)})" if found["lo"] is not None else ""
    return (
        f"The fastest is {place(study, best)} and the slowest {place(study, worst)}, "
        f"by {numbers.percent(found['value'] - 1)}{interval}."
    )


def place(study: Study, line: pd.Series) -> str:
    """What tells a line from the others of its study, in words."""
    told = []
    for path in filter(None, (study.x, study.hue)):
        if path in ("system", "system.preset"):
            told.append(names.name(line) if path == "system" else names.family_name(line["family"]))
        else:
            told.append(f"{names.setting(path)} {names.value(path, studies.column(line.to_frame().T, path).iloc[0])}")
    return ", ".join(told)


def _systems(study: Study, ready: pd.DataFrame) -> str:
    """At the last place where the engine and ZeRO-3 were both measured; without one, what the engine reaches."""
    found = last_with_both(study, ready)
    if found is not None:
        best, base, where = found
        return f"At {where}, {names.name(best)} is {_times(best, base)} as fast as {names.name(base)}."
    ends = engine_ends(study, ready)
    told = [f"{line['tokens_per_s']:,.0f} tokens/s at {_at(study, line)}" for line in ends]
    return f"{names.name(ends[0])} trains {' and '.join(dict.fromkeys(told))}."


def last_with_both(study: Study, ready: pd.DataFrame) -> tuple[pd.Series, pd.Series, str] | None:
    """The engine's fastest line and ZeRO-3's at the largest x that has both, and that place in words."""
    x = studies.column(ready, str(study.x))
    for value in sorted(x.dropna().unique(), reverse=True):
        here = ready[x == value]
        engine, base = here[numbers.engine(here)], here[here["family"] == "zero3"]
        if len(engine) and len(base):
            best = speeds.fastest(engine)
            return best, base.iloc[0], _at(study, best)
    return None


def engine_ends(study: Study, ready: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The first and the last line along x of the engine at its best: `fast` where it was measured."""
    fast = ready[ready["family"] == "megatrain_fast"]
    mine = fast if len(fast) > 1 else ready
    x = pd.to_numeric(studies.column(mine, str(study.x)), errors="coerce")
    ordered = mine.loc[x.sort_values(kind="stable").index]
    return ordered.iloc[0], ordered.iloc[-1]


def _at(study: Study, line: pd.Series) -> str:
    """`7.6B parameters`, `24 GB of device memory`, `64K tokens per sequence`."""
    path = str(study.x)
    value = names.value(path, studies.column(line.to_frame().T, path).iloc[0])
    return {"num_params": f"{value} parameters", "machine.device_bytes": f"{value} GB of device memory"}.get(
        path, f"{value} {names.setting(path)}"
    )


def finding(study: Study, lines: pd.DataFrame) -> str:
    """The answer in the few words of a figure's title."""
    ready = lines[speeds.comparable(lines)]
    if not len(ready):
        return study.title
    if study.figure == "comparison" or study.x is None:
        best, base = speeds.fastest(ready), tables.base_of(study, ready)
        return study.title if base is None else f"{names.name(best)} is {_short(best, base)} as fast as {names.name(base)}"
    if study.effect:
        found = _ends(study, ready)
        if found is None:
            return study.title
        values = [names.value(str(study.x), study.effect[end]) for end in ("from", "to")]
        change = numbers.percent(speeds.ratio(*found)["value"] - 1)
        return f"{study.title}: {change} from {values[0]} to {values[1]} {names.setting(str(study.x))}"
    if study.base_is_rival:
        both = last_with_both(study, ready)
        if both is not None:
            return f"{names.name(both[0])} is {_short(*both[:2])} as fast as {names.name(both[1])} at {both[2]}"
        ends = engine_ends(study, ready)
        return f"{names.name(ends[1])}: {ends[1]['tokens_per_s']:,.0f} tokens/s at {_at(study, ends[1])}"
    best, worst = speeds.fastest(ready), speeds.slowest(ready)
    if study.x == "system.preset":
        return f"Every switch on: {_short(best, tables.sort(study, ready).iloc[0])} the published algorithm"
    return f"{study.title}: {_short(best, worst)} between the slowest and the fastest"


def _short(one: pd.Series, base: pd.Series) -> str:
    return f"{speeds.ratio(one, base)['value']:.2f}x"
