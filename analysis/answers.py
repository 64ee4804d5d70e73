"""The answer of a study: a sentence or two, and the few words of a figure's title."""

from typing import NamedTuple

import pandas as pd

from analysis import names, numbers, speeds, studies, tables
from analysis.studies import Study
from sweeps.agreement import ADAPTERS, REFERENCE


class Answer(NamedTuple):
    """The same finding twice."""

    title: str
    sentence: str


def answer(study: Study, lines: pd.DataFrame) -> Answer:
    """What a study says. lines: of all its runs; ratios are those of the leading one."""
    lead = studies.leading(study, lines)
    ready = lead[speeds.comparable(lead)]
    if not len(ready):
        told = "Nothing was measured whose losses agree, so nothing is ranked."
        if not lead["tokens_per_s"].notna().any():
            told = "Nothing was measured; below stands why."
        return Answer(study.title, told)
    if study.figure == "quality":
        return _quality(study, lead)
    if study.compares:
        return _comparison(study, ready)
    if study.effect:
        return _effect(study, ready)
    if study.of_systems:
        return _over_zero3(study, ready) or _ends(study, lines[speeds.comparable(lines)])
    return _losses(study, ready) if study.figure == "losses" else _settings(study, ready)


def _comparison(study: Study, ready: pd.DataFrame) -> Answer:
    ranked = ready[ready["system"] != REFERENCE]
    if not len(ranked):
        return Answer(study.title, "Only the reference was measured.")
    best, base = speeds.fastest(ranked), tables.base_of(study, ready)
    if base is None or base.name == best.name:
        speed = f"{best['tokens_per_s']:,.0f} tokens/s"
        return Answer(study.title, f"{names.name(best)} is the fastest, at {speed}.")
    title, sentence = _faster(best, base)
    rivals = ranked[numbers.rivals(ranked) & (ranked["family"] != best["family"])]
    if len(rivals) and (rival := speeds.fastest(rivals)).name != base.name:
        sentence += (
            f" Its strongest rival in this run is {names.name(rival)}: {_times(best, rival)}."
        )
    return Answer(title, sentence)


def _faster(best: pd.Series, base: pd.Series, where: str = "") -> Answer:
    eager = "eager " if not base["mode"] and where else ""
    over = f"as fast as {eager}{names.name(base)}"
    told = f"{names.name(best)} is {_times(best, base)} {over}."
    title = f"{names.name(best)} is {speeds.ratio(best, base).short} {over}"
    return Answer(f"{title} at {where}", f"At {where}, {told}") if where else Answer(title, told)


def _times(one: pd.Series, base: pd.Series) -> str:
    found = speeds.ratio(one, base)
    interval = found.interval(between=" to ")
    known = f"95% interval {interval}" if interval else "too few windows for an interval"
    return f"{found.times} ({known})"


def _change(one: pd.Series, base: pd.Series) -> str:
    found = speeds.ratio(one, base)
    interval = found.interval(change=True)
    return f"{found.change} (95% interval {interval})" if interval else found.change


def _effect(study: Study, ready: pd.DataFrame) -> Answer:
    x, at = str(study.x), study.effect.get("at", {})
    for path, value in at.items():
        ready = ready[studies.column(ready, path) == value]
    old, new = (ready[studies.column(ready, x) == study.effect[end]] for end in ("from", "to"))
    if not len(old) or not len(new):
        told = "The two settings of the question were not both measured in this run."
        return Answer(study.title, told)
    one, base = new.iloc[0], old.iloc[0]
    where = " and ".join(
        f"{names.value(path, value)} {names.setting(path)}" for path, value in at.items()
    )
    values = [names.value(x, study.effect[end]) for end in ("from", "to")]
    step = f"from {values[0]} to {values[1]} {names.setting(x)}"
    return Answer(
        f"{study.title}: {speeds.ratio(one, base).short_change} {step}",
        f"Going {step}{f', with {where},' if where else ''} changes tokens/s by "
        f"{_change(one, base)}.",
    )


def _settings(study: Study, ready: pd.DataFrame) -> Answer:
    best, worst = speeds.fastest(ready), ready.sort_values("tokens_per_s").iloc[0]
    if best.name == worst.name:
        told = f"Only one setting was measured: {best['tokens_per_s']:,.0f} tokens/s."
        return Answer(study.title, told)
    if study.x == "system.preset":
        first = tables.sort(study, ready).iloc[0]
        over = f"the published algorithm ({place(study, first)})"
        return Answer(
            f"Every switch on: {speeds.ratio(best, first).short} the published algorithm",
            f"With every switch on the engine is {_times(best, first)} as fast as {over}.",
        )
    between = "between the slowest and the fastest"
    title = f"{study.title}: {speeds.ratio(best, worst).short} {between}"
    ends = [place(study, one) for one in (best, worst)]
    told = f"The fastest is {ends[0]}. The slowest is {ends[1]}: {_change(worst, best)}."
    return Answer(title, told)


def loss_gaps(lines: pd.DataFrame) -> list[list[float]]:
    """Step by step, how far each line's losses lie from those of the first without a caveat."""
    exact = lines[~lines["caveat"].map(lambda caveat: isinstance(caveat, str))]
    reference = (exact if len(exact) else lines).iloc[0]["losses"]
    return [[a - b for a, b in zip(mine, reference, strict=False)] for mine in lines["losses"]]


def full(lines: pd.DataFrame) -> pd.Series:
    """Which lines train every parameter."""
    return ~lines["system"].isin(ADAPTERS)


def master_gaps(lines: pd.DataFrame) -> list[tuple[str, pd.Series, list[float]]]:
    """(master, line, its losses less the split master's, step by step) of the engine's others."""
    engine = lines[numbers.engine(lines) & lines["losses"].map(bool)]
    if not len(engine):
        return []
    engine = engine.assign(master=studies.column(engine, "system.master"))
    split = engine[engine["master"] == "split"]
    return [
        (str(line["master"]), line, _less(line["losses"], split.iloc[0]["losses"]))
        for _, line in engine[engine["master"] != "split"].iterrows()
        if len(split)
    ]


def _less(losses: list[float], others: list[float]) -> list[float]:
    return [one - other for one, other in zip(losses, others, strict=False)]


def _quality(study: Study, lead: pd.DataFrame) -> Answer:
    """How far the held-out losses of exact full training lie apart at the end, and what a bf16
    master adds."""
    known = lead[full(lead) & lead["heldout_loss"].notna()]
    exact = known[~known["caveat"].map(lambda caveat: isinstance(caveat, str))]
    if len(known) < 2 or not len(exact):
        return Answer(study.title, "Fewer than two systems have a held-out loss, so none is known.")
    ends, title, told = exact["heldout_loss"], study.title, ""
    if len(exact) > 1:
        apart = f"{ends.max() - ends.min():.2g}"
        title = f"{len(exact)} systems end within {apart} nats of each other on held-out text"
        told = f"{len(exact)} ways to train every parameter end within {apart} nats of each other. "
    base = "their mean" if len(exact) > 1 else names.name(exact.iloc[0])
    for _, line in known.drop(exact.index).iterrows():
        gap = f"{line['heldout_loss'] - ends.mean():+.2g}"
        told += f"{names.name(line)} ends {gap} nats from {base}. "
        title = title if len(exact) > 1 else f"{names.name(line)}: {gap} nats on held-out text"
    return Answer(title.replace("-", "−"), told.strip().replace("-", "−"))


def _losses(study: Study, ready: pd.DataFrame) -> Answer:
    """The speeds, and the largest gap of the losses at the end."""
    gaps = loss_gaps(ready)
    gap, at = max((abs(one[-1]), at) for at, one in enumerate(gaps))
    far = tables.value(ready.iloc[at], str(study.x))
    title = f"{study.title}: with {far} the loss is {gap:.2g} off after {len(gaps[at])} steps"
    return Answer(
        title, f"{_settings(study, ready).sentence} {title.partition(': ')[2].capitalize()}."
    )


def place(study: Study, line: pd.Series) -> str:
    """What tells a line from the others: `3 CUDA streams with 8 sequences per step`."""
    told, says_all = [], {"system", "system.preset", *names.VALUES}
    for path in filter(None, (study.x, study.hue)):
        words = tables.value(line, path)
        if words[:1].isdigit():
            words = f"{words} {names.setting(path)}"
        elif path not in says_all:
            words = f"{names.setting(path)} {words}"
        told.append(words)
    return " with ".join(told)


def _over_zero3(study: Study, ready: pd.DataFrame) -> Answer | None:
    """At the largest x where the engine and ZeRO-3 were both measured; None without one."""
    x = studies.column(ready, str(study.x))
    for value in sorted(x.dropna().unique(), reverse=True):
        here = ready[x == value]
        engine, base = here[numbers.engine(here)], here[here["family"] == "zero3"]
        if len(engine) and len(base):
            best = speeds.fastest(engine)
            return _faster(best, base.iloc[0], _at(study, best))
    return None


def _ends(study: Study, ready: pd.DataFrame) -> Answer:
    """What the engine reaches at both ends of x: `fast` where it was measured."""
    fast = ready[ready["family"] == "megatrain_fast"]
    mine = tables.sort(study, fast if len(fast) > 1 else ready)
    told = []
    for one in (mine.iloc[0], mine.iloc[-1]):
        speed = f"{one['tokens_per_s']:,.0f} tokens/s at {_at(study, one)}"
        told.append(f"{names.name(one)} reaches {speed}")
    sentence = " and ".join(dict.fromkeys(told))
    again = f" and {names.name(mine.iloc[0])} reaches"  # one system is named once
    sentence = sentence.replace(again, " and")
    return Answer(sentence, f"{sentence}.")


def _at(study: Study, line: pd.Series) -> str:
    """`7.6B parameters`, `24 GB of device memory`, `64K tokens per sequence`."""
    units = {"num_params": "parameters", "machine.device_bytes": "GB of device memory"}
    path = str(study.x)
    return f"{names.value(path, studies.value(line, path))} {units.get(path, names.setting(path))}"
