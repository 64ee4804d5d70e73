"""The answer of a study in a sentence or two, which its page begins with and its figure too."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from analysis import names, speeds, studies, tables
from analysis.speeds import Ratio, few_rounds
from analysis.studies import Study
from sweeps.agreement import ADAPTERS, REFERENCE


def answer(study: Study, lines: pd.DataFrame) -> str:
    """What a study says. lines: of all its runs; ratios are those of the leading one."""
    lead = studies.leading(study, lines)
    others = [one for run, one in lines.groupby("run") if run != lead["run"].iloc[0]]
    main = studies.main_part(study, lead)
    ready = main[speeds.comparable(main)]
    if not lead["tokens_per_s"].notna().any():
        return "Nothing was measured; below stands why."
    if study.figure == "quality":
        parts = [studies.main_part(study, one) for one in others]
        same = [one for one in parts if set(one["num_params"]) == set(main["num_params"])]
        return _quality(main, same)
    if not len(ready):
        return "Nothing was measured whose losses agree, so nothing is ranked."
    alike = _alike(main, others)
    if study.compares:
        return _comparison(study, ready, alike)
    if study.effect:
        return _effect(study, ready, alike)
    if study.hue == "system":
        return _over_zero3(study, ready) or _ends(study, pd.concat([ready, *alike]))
    told = _settings(study, ready)
    return f"{told} {losses(study, ready)}" if study.figure == "losses" else told


def lines_of(study: Study, lines: pd.DataFrame) -> pd.DataFrame:
    """The lines that `answer` is of: those of the leading run or, where it tells what is reached at
    both ends of x, these two."""
    lead = studies.leading(study, lines)
    main = studies.main_part(study, lead)
    ready = main[speeds.comparable(main)]
    other = study.compares or study.effect or study.figure == "quality" or study.hue != "system"
    if other or not len(ready) or _over_zero3(study, ready):
        return lead
    others = [one for _, one in lines.drop(lead.index).groupby("run")]
    return _both_ends(study, pd.concat([ready, *_alike(main, others)]))


def _alike(main: pd.DataFrame, others: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Of each other run what is of the same work and may be ranked."""
    alike = [studies.same_work(one, main) for one in others]
    return [one[speeds.comparable(one)] for one in alike]


def _known(found: Ratio, *, change: bool = False) -> str:
    """`1.75x (95% interval 1.59 to 1.93)`, its rounds in the brackets too where those are few; or
    as a change."""
    rounds = "" if change else few_rounds([found])
    few = f"{rounds}, " if rounds else ""
    told = found.told(change=change, about=f"{few}95% interval ").replace("–", " to ")
    return f"{told} ({few}too few windows for an interval)" if pd.isna(found.lo) else told


def _comparison(study: Study, ready: pd.DataFrame, others: Sequence[pd.DataFrame]) -> str:
    own = ready["system"] != REFERENCE
    ranked = ready[own] if own.any() else ready
    best, base = speeds.fastest(ranked), tables.base_of(study, ready)
    if base is None or base.name == best.name:
        speed, predicted = f"{best['tokens_per_s']:,.0f} tokens/s", best["predicted_window"]
        if len(ready) > 1 or pd.isna(predicted):
            return f"{names.name(best)} is the fastest, at {speed}."
        return f"{names.name(best)} reaches {speed}, where {predicted:,.0f} were predicted."
    known = _known(speeds.ratio(best, base))
    told = f"{names.name(best)} is {known} as fast as {names.name(base)}."
    told += _again(others, best, base)
    steady = speeds.steady(best, base)
    if f"{steady:.2f}" not in ("nan", f"{best['tokens_per_s'] / base['tokens_per_s']:.2f}"):
        told += (
            f" In steady training, without the waits at a window's end, this run has {steady:.2f}x."
        )
    rivals = ranked[speeds.rivals(ranked) & (ranked["family"] != best["family"])]
    if len(rivals) and (rival := speeds.fastest(rivals)).name != base.name:
        known = _known(speeds.ratio(best, rival))
        told += f" Its strongest rival in this run is {names.name(rival)}: {known}."
        told += _again(others, best, rival)
    return told


def _again(others: Sequence[pd.DataFrame], best: Any, base: Any) -> str:
    """How fast the one is over the other in the other runs that have both; empty without any."""
    pairs = []
    for ready in others:
        called = ready.apply(names.name, axis=1) if len(ready) else pd.Series(dtype=str)
        pair = [ready[called == names.name(one)] for one in (best, base)]
        if all(map(len, pair)):
            pairs.append([speeds.fastest(one) for one in pair])
    found = speeds.ratios(pairs)
    return _elsewhere([one.times for one in found], few_rounds(found))


def _elsewhere(told: Sequence[str], note: str = "") -> str:
    """` In 3 other runs it is LEAST to MOST.`, of what is sorted, with a note in brackets; empty
    without any."""
    if not told:
        return ""
    where = "another run" if len(told) == 1 else f"{len(told)} other runs"
    ends = " to ".join(dict.fromkeys((told[0], told[-1])))
    return f" In {where} it is {ends}{note and f' ({note})'}."


def _over_zero3(study: Study, ready: pd.DataFrame) -> str | None:
    """At the largest x where the engine and ZeRO-3 were both measured; None without one."""
    over = tables.ratios(study, ready)
    engine = ready[ready["family"].str.startswith("megatrain") & over.notna()]
    if not len(engine):
        return None
    best = speeds.fastest(engine[engine[study.x] == engine[study.x].max()])
    rival = tables.base_of(study, ready, best)
    told = f"{'' if rival['mode'] else 'eager '}{names.name(rival)}"
    known = _known(over[best.name])
    where = tables.at(best, str(study.x), *study.rest)
    return f"At {where}, {names.name(best)} is {known} as fast as {told}."


def _ends(study: Study, ready: pd.DataFrame) -> str:
    """What the engine reaches at both ends of x."""
    mine, ends = _both_ends(study, ready), [str(study.x), *study.rest]
    first, last = (
        f"{names.name(one)} reaches {one['tokens_per_s']:,.0f} tokens/s at {tables.at(one, *ends)}"
        for _, one in mine.iterrows()
    )
    again = last.removeprefix(f"{names.name(mine.iloc[0])} reaches ")  # one system is named once
    return f"{first}." if first == last else f"{first} and {again}."


def _both_ends(study: Study, ready: pd.DataFrame) -> pd.DataFrame:
    """The lines at the two ends of x: of `fast` where it was measured, and of the GPU of the first
    line where several runs have that end."""
    fast = ready[ready["family"] == "megatrain_fast"]
    ends, x = tables.sort(study, fast if len(fast) > 1 else ready), str(study.x)
    gpu = ready.iloc[0]["machine_details"].get("gpu")
    own = ends["machine_details"].map(lambda machine: machine.get("gpu") == gpu)
    return ends[own | ~ends[x].isin(ends.loc[own, x])].iloc[[0, -1]]


def _effect(study: Study, ready: pd.DataFrame, others: Sequence[pd.DataFrame]) -> str:
    """The change in the leading run, and in other runs where they have both ends."""
    x, at = str(study.x), study.effect.get("at", {})
    ends, resumed = [study.effect[end] for end in ("from", "to")], ""
    pair = _pair(study, ready)
    if pair is None:
        return "The two settings of the question were not both measured in this run."
    old, new = pair
    known = _known(speeds.ratio(new, old), change=True)
    if ends == [False, True]:
        told = f"With the {names.setting(x)}, tokens/s change by {known}."
        resumed = _resumed(new)
        seen = [two for _, two in filter(None, (_pair(study, one) for one in others))]
        resumed += _resumed_elsewhere(new, seen)
    else:
        going = f"{' to '.join(names.value(x, end) for end in ends)} {names.setting(x)}"
        going += f", with {' and '.join(tables.at(new, path) for path in at)}," if at else ""
        told = f"Going from {going} changes tokens/s by {known}."
    found = [_pair(study, one) for one in others]
    again = sorted(speeds.ratio(two, one) for one, two in filter(None, found))
    if study.rest:
        told = f"{tables.at(new, *study.rest)}: {told[0].lower()}{told[1:]}"
    told += _elsewhere([one.change for one in again])
    return told + resumed + _at_others(study, ready)


def _at_others(study: Study, ready: pd.DataFrame) -> str:
    """The change of the leading run at the other values of what the effect is `at`."""
    told = []
    for where, mine in ready.groupby(lambda place: _where(study, ready.loc[place]), sort=False):
        pair = _pair(study, mine, elsewhere=True)
        told += [f"{where} {speeds.ratio(*pair[::-1]).change}"] if pair else []
    return f" Elsewhere in this run: {'; '.join(told)}." if told else ""


def _where(study: Study, line: Any) -> str:
    return " and ".join(
        tables.at(line, path) for path in (*study.effect.get("at", {}), *study.rest)
    )


def _pair(study: Study, ready: pd.DataFrame, *, elsewhere: bool = False) -> tuple[Any, Any] | None:
    """The lines at both ends of the effect; None where one is missing. elsewhere: not where the
    effect is `at`."""
    asked = pd.Series(study.effect.get("at", {}), dtype=object)
    there = (ready[list(asked.index)] == asked).all(axis=1)
    ready = ready[there != elsewhere]
    old, new = (ready[ready[str(study.x)] == study.effect[end]] for end in ("from", "to"))
    for _, line in old.sort_values("tokens_per_s", ascending=False).iterrows():
        for _, other in tables.alike(study, new, line).iterrows():
            return line, other
    return None


def _resumed(line: Any) -> str:
    """What another process made of the state that the line saved, where one did."""
    apart = line["counters"].get("resumed_difference")
    if apart is None:
        return ""
    if apart == 0:
        return " Another process resumed the state, and had the first one's losses bit for bit."
    return (
        f" Another process resumed the state: its losses lie {apart:.2g} nats from the first one's."
    )


def _resumed_elsewhere(line: Any, others: Sequence[Any]) -> str:
    """The same of other runs, where it was otherwise."""
    first = line["counters"].get("resumed_difference")
    known = [one["counters"].get("resumed_difference") for one in others]
    most = max((one for one in known if one is not None), default=first)
    return "" if most == first else f" In another run they lie up to {most:.2g} nats apart."


def _settings(study: Study, ready: pd.DataFrame) -> str:
    best = speeds.fastest(ready)
    worst = tables.alike(study, ready, best).sort_values("tokens_per_s").iloc[0]
    if best.name == worst.name:
        only = f"{tables.at(best, str(study.x))}: {best['tokens_per_s']:,.0f} tokens/s"
        return f"Not answered yet: one setting alone was measured, {only}."
    if study.x == "system.preset":
        first = tables.sort(study, ready).iloc[0]
        known, base = _known(speeds.ratio(best, first)), tables.value(first, study.x)
        over = f"as fast as the published algorithm ({base})"
        return f"With every switch on the engine is {known} {over}."
    fast, slow = (tables.at(one, *study.axes) for one in (best, worst))
    change = speeds.ratio(worst, best)
    known = _known(change, change=True)
    if change.hi > 1:
        return f"{fast} and {slow}, the fastest and the slowest, cannot be told apart: {known}."
    return f"The fastest is {fast}. The slowest is {slow}: {known}."


def loss_gaps(lines: pd.DataFrame) -> list[list[float]]:
    """How far each line's losses lie from those of the first of its seed without a caveat."""
    seeds = lines.reindex(columns=["seed"])["seed"].map(repr)
    first: dict[str, list[float]] = {}
    for at in [*lines.index[lines["caveat"].isna()], *lines.index]:
        first.setdefault(seeds[at], lines["losses"][at])
    return [
        [one - other for one, other in zip(mine, first[seed], strict=False)]
        for seed, mine in zip(seeds, lines["losses"], strict=True)
    ]


def losses(study: Study, ready: pd.DataFrame) -> str:
    """The largest gap of the losses at the end."""
    gaps = loss_gaps(ready)
    gap, at = max((abs(one[-1]), at) for at, one in enumerate(gaps))
    far = tables.at(ready.iloc[at], str(study.x))
    told = f"the training loss differs from the first line's by {gap:.2g} nats"
    return f"With {far} {told} after {len(gaps[at])} steps."


def _quality(main: pd.DataFrame, others: Sequence[pd.DataFrame]) -> str:
    """How far the held-out losses of exact full training lie apart at the end, in other runs too
    where that is further, and what a bf16 master adds. Seeds of one system are taken together."""
    same, inexact = _ends_of(main, exact=True), _ends_of(main, exact=False)
    in_float8 = list(_in_float8(main))
    in_float8 += (f"In another run {one}" for other in others for one in _in_float8(other))
    if len(same) + len(inexact) < 2 or not len(same):
        none = "Fewer than two systems have a held-out loss, so none is known."
        return " ".join(in_float8) or none
    told, base = [], same.index[0]
    if len(same) > 1:
        gap, base = _spread(same["mean"]), "their mean"
        apart = f"within {gap:.2g} nats of each other" if gap else "at the same loss"
        told = [f"{len(same)} systems with an exact master end {apart} on held-out text."]
    for name, gap in (inexact["mean"] - same["mean"].mean()).items():
        held = "" if told else " on held-out text"
        told.append(f"{name} ends {above_or_below(gap)} {base}{held}.")
    if same["count"].max() > 1:
        own = (same["max"] - same["min"]).max()
        told.append(f"Each is a mean over its seeds. One system's seeds end {own:.2g} nats apart.")
    widest = max((_spread(_ends_of(other, exact=True)["mean"]) for other in others), default=0.0)
    if len(same) > 1 and widest > _spread(same["mean"]):
        told.append(f"In another run systems with an exact master end {widest:.2g} nats apart.")
    return " ".join([*told, *in_float8])


def _in_float8(lines: pd.DataFrame) -> Iterator[str]:
    """Where what multiplied in float8 ends beside the same system in bf16, run the same way, in one
    run. Seeds are taken together."""
    known = lines[lines["heldout_loss"].notna()]
    exact = known["plain"] & known["caveat"].isna()  # float8 is a caveat of its own
    for _, found in known[~known["plain"]].groupby(["family", "mode"], sort=False):
        family, mode = found.iloc[0][["family", "mode"]]
        way = " ".join(word for word in mode.split() if word != speeds.FLOAT8)
        family = family.removesuffix(f"_{speeds.FLOAT8}")
        same = known[exact & (known["family"] == family) & (known["mode"] == way)]
        if len(same):
            gap = found["heldout_loss"].mean() - same["heldout_loss"].mean()
            apart = above_or_below(gap) if gap else "level with"
            ours, theirs = names.name(found.iloc[0]), names.name(same.iloc[0])
            yield f"{ours} ends {apart} {theirs} on held-out text."


def above_or_below(gap: float) -> str:
    """`0.03 nats above`, of a difference of two losses."""
    return f"{abs(gap):.2g} nats {'above' if gap > 0 else 'below'}"


def _ends_of(lines: pd.DataFrame, *, exact: bool) -> pd.DataFrame:
    """Mean, min, max and count of the held-out losses over the seeds of each system that trained
    everything in bf16 products, with an exact master or without; by its name."""
    mine = ~lines["system"].isin(ADAPTERS) & (lines["caveat"].isna() == exact) & lines["plain"]
    known = lines[mine & lines["heldout_loss"].notna()]
    ends = known["heldout_loss"].groupby(tables.labels(known, seeds=False), sort=False)
    return ends.agg(["mean", "min", "max", "count"])


def _spread(ends: pd.Series) -> float:
    """Nats between the highest and the lowest; 0 of one line, and of none."""
    return float(ends.max() - ends.min()) if len(ends) else 0.0
