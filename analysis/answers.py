"""The answer of a study: a sentence or two, and the few words of a figure's title."""

from typing import Any, NamedTuple

import pandas as pd

from analysis import names, speeds, studies, tables
from analysis.speeds import Ratio
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


def _known(found: Ratio, *, change: bool = False) -> str:
    """A ratio as a sentence tells it: `1.75x (95% interval 1.59 to 1.93)`."""
    if not change and not found.interval():
        return f"{found.times} (too few windows for an interval)"
    return found.told(change=change, about="95% interval ").replace("–", " to ")


def _comparison(study: Study, ready: pd.DataFrame) -> Answer:
    ranked = ready[ready["system"] != REFERENCE]
    if not len(ranked):
        return Answer(study.title, "Only the reference was measured.")
    best, base = speeds.fastest(ranked), tables.base_of(study, ready)
    if base is None or base.name == best.name:
        speed = f"{best['tokens_per_s']:,.0f} tokens/s"
        return Answer(study.title, f"{names.name(best)} is the fastest, at {speed}.")
    found, over = speeds.ratio(best, base), f"as fast as {names.name(base)}"
    sentence = f"{names.name(best)} is {_known(found)} {over}."
    rivals = ranked[speeds.rivals(ranked) & (ranked["family"] != best["family"])]
    if len(rivals) and (rival := speeds.fastest(rivals)).name != base.name:
        known = _known(speeds.ratio(best, rival))
        sentence += f" Its strongest rival in this run is {names.name(rival)}: {known}."
    return Answer(f"{names.name(best)} is {found.told()} {over}", sentence)


def _over_zero3(study: Study, ready: pd.DataFrame) -> Answer | None:
    """At the largest x where the engine and ZeRO-3 were both measured; None without one."""
    over = tables.ratios(study, ready)
    engine = ready[speeds.engine(ready) & over.notna()]
    if not len(engine):
        return None
    best = speeds.fastest(engine[engine[study.x] == engine[study.x].max()])
    found, rival, at = over[best.name], tables.base_of(study, ready, best), _at(study, best)
    told = f"as fast as {'' if rival['mode'] else 'eager '}{names.name(rival)}"
    title = f"{names.name(best)} is {found.told()} {told} at {at}"
    return Answer(title, f"At {at}, {names.name(best)} is {_known(found)} {told}.")


def _ends(study: Study, ready: pd.DataFrame) -> Answer:
    """What the engine reaches at both ends of x: `fast` where it was measured."""
    fast = ready[ready["family"] == "megatrain_fast"]
    mine = tables.sort(study, fast if len(fast) > 1 else ready)
    first, last = (
        f"{names.name(one)} reaches {one['tokens_per_s']:,.0f} tokens/s at {_at(study, one)}"
        for one in (mine.iloc[0], mine.iloc[-1])
    )
    again = last.removeprefix(f"{names.name(mine.iloc[0])} reaches ")  # one system is named once
    sentence = first if first == last else f"{first} and {again}"
    return Answer(sentence, f"{sentence}.")


def _at(study: Study, line: pd.Series) -> str:
    """`7.6B parameters`, `24 GB of device memory`, `64K tokens per sequence`."""
    units = {"num_params": "parameters", "machine.device_bytes": "GB of device memory"}
    path = str(study.x)
    return f"{names.value(path, line[path])} {units.get(path, names.setting(path))}"


def _effect(study: Study, ready: pd.DataFrame) -> Answer:
    x, at, where = str(study.x), study.effect.get("at", {}), []
    for path, value in at.items():
        ready = ready[ready[path] == value]
        where.append(f"{names.value(path, value)} {names.setting(path)}")
    old, new = (ready[ready[x] == study.effect[end]] for end in ("from", "to"))
    if not len(old) or not len(new):
        told = "The two settings of the question were not both measured in this run."
        return Answer(study.title, told)
    found = speeds.ratio(new.iloc[0], old.iloc[0])
    values = [names.value(x, study.effect[end]) for end in ("from", "to")]
    step = f"from {values[0]} to {values[1]} {names.setting(x)}"
    going = f"Going {step}, with {' and '.join(where)}," if where else f"Going {step}"
    title = f"{study.title}: {found.told(change=True)} {step}"
    return Answer(title, f"{going} changes tokens/s by {_known(found, change=True)}.")


def _settings(study: Study, ready: pd.DataFrame) -> Answer:
    best, worst = speeds.fastest(ready), ready.sort_values("tokens_per_s").iloc[0]
    if best.name == worst.name:
        told = f"Only one setting was measured: {best['tokens_per_s']:,.0f} tokens/s."
        return Answer(study.title, told)
    if study.x == "system.preset":
        first = tables.sort(study, ready).iloc[0]
        found, over = speeds.ratio(best, first), "the published algorithm"
        return Answer(
            f"Every switch on: {found.told()} {over}",
            f"With every switch on the engine is {_known(found)} as fast as {over} "
            f"({place(study, first)}).",
        )
    between = speeds.ratio(best, worst).told()
    slower = _known(speeds.ratio(worst, best), change=True)
    return Answer(
        f"{study.title}: {between} between the slowest and the fastest",
        f"The fastest is {place(study, best)}. The slowest is {place(study, worst)}: {slower}.",
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


def exact(lines: pd.DataFrame) -> pd.Series:
    """Which lines do all that the recipe asks."""
    return ~lines["caveat"].map(lambda caveat: isinstance(caveat, str))


def full(lines: pd.DataFrame) -> pd.Series:
    """Which lines train every parameter."""
    return ~lines["system"].isin(ADAPTERS)


def less(losses: list[float], others: list[float]) -> list[float]:
    """Step by step, how far the losses lie from others."""
    return [one - other for one, other in zip(losses, others, strict=False)]


def loss_gaps(lines: pd.DataFrame) -> list[list[float]]:
    """How far each line's losses lie from those of the first without a caveat."""
    same = lines[exact(lines)]
    reference = (same if len(same) else lines).iloc[0]["losses"]
    return [less(mine, reference) for mine in lines["losses"]]


def master_gaps(lines: pd.DataFrame) -> list[tuple[str, Any, list[float]]]:
    """(master, line, how far its losses lie from the split master's) of the engine's others."""
    engine = lines[speeds.engine(lines) & lines["losses"].map(bool)]
    is_split = engine.get("system.master", engine["system"]) == "split"
    return [
        (line["system.master"], line, less(line["losses"], engine[is_split].iloc[0]["losses"]))
        for _, line in engine[~is_split].iterrows()
        if is_split.any()
    ]


def _losses(study: Study, ready: pd.DataFrame) -> Answer:
    """The speeds, and the largest gap of the losses at the end."""
    gaps = loss_gaps(ready)
    gap, at = max((abs(one[-1]), at) for at, one in enumerate(gaps))
    far = tables.value(ready.iloc[at], str(study.x))
    told = f"with {far} the loss is {gap:.2g} off after {len(gaps[at])} steps"
    sentence = f"{_settings(study, ready).sentence} {told.capitalize()}."
    return Answer(f"{study.title}: {told}", sentence)


def _quality(study: Study, lead: pd.DataFrame) -> Answer:
    """How far the held-out losses of exact full training lie apart at the end, and what a bf16
    master adds."""
    known = lead[full(lead) & lead["heldout_loss"].notna()]
    same, others = known[exact(known)], known[~exact(known)]
    if len(known) < 2 or not len(same):
        return Answer(study.title, "Fewer than two systems have a held-out loss, so none is known.")
    ends, title, told = same["heldout_loss"], study.title, []
    if len(same) > 1:
        gap = ends.max() - ends.min()
        apart = f"within {gap:.2g} nats of each other" if gap else "at the same held-out loss"
        title = f"{len(same)} systems end {apart}"
        told = [f"{len(same)} ways to train every parameter end {apart}."]
    base = "their mean" if len(same) > 1 else names.name(same.iloc[0])
    for _, line in others.iterrows():
        gap = line["heldout_loss"] - ends.mean()
        apart = f"{abs(gap):.2g} nats {'above' if gap > 0 else 'below'} {base}"
        told.append(f"The held-out loss of {names.name(line)} ends {apart}.")
        title = title if len(same) > 1 else f"{names.name(line)} ends {apart}"
    return Answer(title, " ".join(told))
