"""What the paper says (paper.csv), claim by claim, beside what these rows measured: on which hardware, under which formula.

Invariant: a claim is quoted with its source, trust and flag, never corrected; a measured speed stands beside it only where model
size, length and system are the same, a relative change (of an ablation) also where the size is another, and every measured number
with its own model, machine and batch. Batches and machines differ: read shapes, not races.

trust: P the paper's own words; S2 two or more independent notes on it agree; S1 one note; R the public repository.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import latex as tex
from analysis import load, style
from analysis.cells import Cell, cell_of, cells_of, percent, stands_for
from analysis.compare import AS_IT_IS, BASELINE, compare, interval_text
from analysis.effects import STREAMS, Change, setting_changes
from analysis.studies import unablated
from analysis.tables import Sheet

CSV = Path(__file__).with_name("paper.csv")
OOM = "OOM"
ATTENTION = "6P + 12LhT"
"""Formula of a FLOP count with attention: L layers of width h, T tokens a sequence; nothing is halved for the causal mask."""
TRUST = {"P": "its own words", "S2": "by notes that agree", "S1": "by one note", "R": "by its repository"}
"""What `trust` stands for, in a sentence."""
MODELS = {name: f"qwen2.5-{name.lower()}" for name in ("3B", "7B", "14B", "32B", "72B")}
"""The paper's sizes -> models of conf/model."""
OURS = {"megatrain": ("megatrain", "published_megatrain")}
"""A system of the paper -> the systems that are measured for it, where the name is not the same."""
HIDDEN = 3584
"""Width of the models whose depth the paper varies."""
WIDTHS = (0.07, 0.08, 0.11, 0.08, 0.06, 0.06, 0.08, 0.04, 0.2, 0.1)
"""Widths of the table's columns on a page of style.PAGE_IN, shares of a line; what is left lies between them."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One number of the paper, in the unit of its metric (tflops, tokens_per_s, step_s, device_gb, percent, ratio, change)."""

    source: str
    study: str
    hardware: str
    model: str
    system: str
    setting: str
    batch_size: int | None
    seq_len: int | None
    metric: str
    value: float | None
    """None where it ran out of memory (`oom`), or where no number was found."""
    oom: bool
    formula: str
    trust: str
    flag: str
    """Why to doubt it; empty where nothing is known against it."""

    @property
    def num_layers(self) -> int | None:
        """Layers, in the study of depth."""
        return int(self.setting.split()[0]) if self.study == "depth" else None


def claims(path: Path = CSV) -> list[Claim]:
    """Every claim of the file, in order. ValueError in one line for a row that is not one."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                sizes = {name: int(row[name]) if row[name] else None for name in ("batch_size", "seq_len")}
                value = None if row["value"] in ("", OOM) else float(row["value"])
                words = {name: row[name] for name in row if name not in ("value", *sizes)}
                found.append(Claim(**words, **sizes, value=value, oom=row["value"] == OOM))
            except (TypeError, ValueError, KeyError) as error:
                raise ValueError(f"{path}: line {number} is not a claim ({error}); see the header for its columns") from None
    return found


def cells_in(frame: pd.DataFrame) -> list[Cell]:
    """The cells of the rows that run a system as it is meant to be run, oldest first; repeats are one."""
    return cells_of(unablated(frame).sort_values("started_at", kind="stable"))


def cells_for(claim: Claim, cells: list[Cell]) -> list[Cell]:
    """The fastest cell of each system, preset and machine that does what the claim says, measured ones first and fastest first.

    A cell that was not measured counts where no other of its kind was: it says why.
    """
    if claim.metric not in ("tflops", "tokens_per_s") or claim.study in ("ablation", "accuracy", "width", "third_party"):
        return []
    best: dict[tuple[str, str | None, str], Cell] = {}
    for one in cells:
        key = one.standing.system, one.preset, one.machine
        if _same(claim, one) and stands_for(one, best.get(key)):
            best[key] = one
    return sorted(best.values(), key=lambda one: -one.standing.speed.value if one.standing.measured and one.standing.speed else 0.0)


def tflops(cell: Cell, formula: str) -> float:
    """10¹² floating-point operations a second of a drawn cell, recompute not counted: 6P or 6P + 12LhT a token."""
    assert cell.drawn is not None
    per_token = 6.0 * (cell.num_params or 0)
    if formula == ATTENTION:
        per_token += 12.0 * layers(cell) * (cell.config.get("model.config.hidden_size") or 0) * cell.seq_len
    return per_token * cell.drawn.value / 1e12


def layers(cell: Cell) -> int:
    """Layers of its model; 0 where its config does not say."""
    return int(cell.config.get("model.config.num_hidden_layers") or 0)


def _same(claim: Claim, cell: Cell) -> bool:
    if cell.standing.system not in OURS.get(claim.system, (claim.system,)) or cell.seq_len != claim.seq_len:
        return False
    gpu = re.search(r"[A-Z]*\d{3,}", claim.hardware)
    if claim.study == "other_gpus" and gpu is not None and gpu.group() not in cell.machine:
        return False
    if claim.study == "depth":
        return layers(cell) == claim.num_layers and cell.config.get("model.config.hidden_size") == HIDDEN
    return cell.model == MODELS.get(claim.model)


def place_of(cell: Cell) -> str:
    """What was trained, and where, in few words: `7.6B, H200 16 cores`."""
    size = f"{cell.num_params / 1e9:.1f}B" if cell.num_params else cell.model
    return f"{size}, {machine_in_short(cell.machine)}"


def machine_in_short(machine: str) -> str:
    """`H200 16 cores` of a machine's name (machines.name_of)."""
    return " ".join(machine.replace("NVIDIA ", "").split(", ")[:2])


def measured_text(claim: Claim, cells: list[Cell]) -> str:
    """What these rows have for a claim, in its unit, by what was trained where; empty where they have nothing.

    FLOPs of context are under 6P + 12LhT, whatever the paper's are under, as in the figure.
    """
    formula = ATTENTION if claim.formula == ATTENTION or claim.study == "context" else "6P"
    told: dict[str, list[str]] = {}
    for one in cells_for(claim, cells):
        name = f"{style.name_of(one.standing.system)} {one.preset or ''}".strip()
        speed, mine = one.standing.speed, told.setdefault(f"{place_of(one)}, batch {one.batch_size}", [])
        if not one.standing.measured or speed is None:
            mine.append(f"{name} {one.standing.status_label}")
            continue
        unit = tflops(one, formula) / speed.value if claim.metric == "tflops" else 1.0
        ends = "" if speed.lo is None or speed.hi is None else f" ({unit * speed.lo:,.0f}–{unit * speed.hi:,.0f})"
        mine.append(f"{name} {unit * speed.value:,.0f}{ends}{' (numerics differ)' if one.standing.differs else ''}")
    return "; ".join(f"{where}: {', '.join(mine)}" for where, mine in told.items())


def ratio_text(claim: Claim, frame: pd.DataFrame) -> str:
    """Speeds over ZeRO-3's at the claim's model and length, each within one run's rows of one machine and shape.

    The base is named where it is not ZeRO-3 as it is, for none of these ran.
    """
    told = []
    parts = [part for rows in load.by_file(frame) for _, mine in rows.groupby("host", sort=False) for part in load.groups(mine)]
    for part in parts:
        first = cell_of(part.iloc[0].to_dict())
        if (first.model, first.seq_len) == (MODELS.get(claim.model), claim.seq_len):
            known = compare(part)
            over = f" over {known.baseline.label}" if known.baseline and known.baseline.preset not in AS_IT_IS else ""
            ratios = [
                f"{one.label} {interval_text(one.ratio)}{over}{' (numerics differ)' if one.differs else ''}"
                for one in known.standings
                if one.measured and one.system in OURS[claim.system] and one.ratio is not None
            ]
            told += [f"{place_of(first)}, batch {first.batch_size}: {', '.join(ratios)}"] if ratios else []
    return "; ".join(told)


def printed(frame: pd.DataFrame) -> list[str]:
    """What the paper prints for the size of a group that has MegaTrain and ZeRO-3: a note on its main GPU, or on each other."""
    systems, first = set(frame["system"]), frame.iloc[0]
    if BASELINE not in systems or not systems & set(OURS["megatrain"]):
        return []
    mine = [one for one in claims() if (MODELS.get(one.model), one.seq_len) == (first["model"], first["seq_len"])]
    speeds = [one for one in mine if one.metric == "tflops" and one.study in ("headline", "other_gpus") and one.value is not None]
    pairs = [
        (ours, theirs)
        for ours in speeds
        for theirs in speeds
        if (ours.system, theirs.system) == ("megatrain", BASELINE)
        and (ours.study, ours.hardware) == (theirs.study, theirs.hardware)
    ]
    ratios = {one.hardware: one for one in mine if one.metric == "ratio"}
    return [_printed(*pair, ratios.get(pair[0].hardware)) for pair in pairs if pair[0].study == pairs[0][0].study]


def _printed(ours: Claim, theirs: Claim, ratio: Claim | None) -> str:
    assert ours.value is not None
    assert theirs.value is not None
    quotient = f"{value_text(ratio)}x ({TRUST[ratio.trust]})" if ratio else f"{ours.value / theirs.value:.2f}x, as we divide,"
    mine, other = (f"{value_text(one)} TFLOPS ({TRUST[one.trust]})" for one in (ours, theirs))
    where = f"on one {ours.hardware}, {ours.batch_size or 'batch not found'} × {ours.seq_len:,} tokens, formula {ours.formula}"
    flags = "".join(f" † {one.flag}." for one in (ours, theirs) if one.flag)
    told = f"{quotient} of {style.name_of(theirs.system)} at {ours.model}: {mine} against {other}, {where}"
    return f"The paper prints {told}; another machine and batch than here.{flags}"


def change_text(found: Change) -> str:
    """`7.6B, H200 16 cores, batch 32: −31.3% (−33.0% to −29.5%)`."""
    gap = found.estimate
    ends = f" ({percent(gap.lo)} to {percent(gap.hi)})" if gap.lo is not None and gap.hi is not None else ""
    return f"{place_of(found.cell)}, batch {found.cell.batch_size}: {percent(gap.value)}{ends}"


def double_buffering(frame: pd.DataFrame) -> str:
    """The result of the double-buffering study in one sentence with its interval, beside the paper's; or how to get it.

    The best-founded pair speaks, the others with as many streams are named behind it.
    """
    claim = next(one for one in claims() if one.setting == "without double buffering" and one.metric == "change")
    assert claim.value is not None
    said = f"the paper reports {percent(claim.value)} ({claim.model} on one {claim.hardware}, {claim.source})"
    found = setting_changes(frame, claim.setting)
    if not found:
        how = "python -m sweeps.run +ablation=double_buffering"
        return f"Double buffering has not been measured here yet ({how} makes the rows); {said}."
    cell, gap = found[0].cell, found[0].estimate
    ends = f"95% interval {percent(gap.lo)} to {percent(gap.hi)}" if gap.lo is not None and gap.hi is not None else "no interval"
    what = f"one slot instead of two, {cell.config.get(STREAMS)} streams"
    where = f"{cell.model}, {cell.batch_size} × {cell.seq_len} tokens, {cell.machine}"
    rest = [one for one in found[1:] if one.cell.config.get(STREAMS) == cell.config.get(STREAMS)]
    others = "".join(f"; another pair {percent(one.estimate.value)} ({_basis(one)}, {place_of(one.cell)})" for one in rest)
    change = f"throughput changes by {percent(gap.value)} ({ends}, {_basis(found[0])}; {where}){others}"
    return f"Without double buffering ({what}) {change}; {said}."


def _basis(found: Change) -> str:
    """What a change rests on: windows and their steps, rounds, and the file that holds them."""
    rounds = f" in {found.num_rounds} rounds" if found.num_rounds > 1 else ""
    steps = f"{found.steps_per_window} step{'s' * (found.steps_per_window > 1)}"
    return f"{found.num_windows} windows of {steps} each{rounds}{f', {found.file}' if found.file else ''}"


def value_text(claim: Claim) -> str:
    """The paper's number as a table prints it; a dagger where it is flagged."""
    mark = "†" if claim.flag else ""
    if claim.value is None:
        return (OOM if claim.oom else "no number") + mark
    return (percent(claim.value) if claim.metric == "change" else f"{claim.value:,g}") + mark


def table(frame: pd.DataFrame, study: str | None = None) -> Sheet:
    """Every claim (of one study) beside what was measured; flags and conventions as caveats below."""
    cells, told = cells_in(load.latest(frame)), [one for one in claims() if study in (None, one.study)]
    title = ["study", "system", "setting", "hardware", "paper", "unit", "formula", "trust", "measured here", "source"]
    body = []
    for one in told:
        changes = setting_changes(frame, one.setting)[:1] if one.metric == "change" else []
        ratio = ratio_text(one, frame) if one.metric == "ratio" else ""
        here = ratio or "".join(map(change_text, changes)) or measured_text(one, cells)
        shape = f"{one.model}{f', {one.setting}' if one.setting else ''}{f', T {one.seq_len}' if one.study == 'context' else ''}"
        source = re.sub(r"^\((.*)\)$", r"\1", one.source.removeprefix("arXiv 2604.05091 "))
        unit = {"device_gb": "GB", "tokens_per_s": "tokens/s", "step_s": "s", "tflops": "TFLOPS", "percent": "%", "ratio": "×"}
        row = [one.study.replace("_", " "), style.name_of(one.system), shape, one.hardware, value_text(one)]
        body.append([*row, unit.get(one.metric, one.metric), one.formula or "—", one.trust, here or "—", source])
    machines = "; ".join(sorted(set(frame["machine_name"])))
    formula = f"under 6P, of context and where the paper's formula is that under {ATTENTION}"
    notes = [f"Measured on {machines}, with 95% intervals, {formula}; batches are not the paper's."]
    notes += [f"Trust, how a number of the paper is known: {', '.join(f'{key} {words}' for key, words in TRUST.items())}."]
    notes += [f"† {one.system} {one.model} {one.setting or one.seq_len or ''}: {one.flag}." for one in told if one.flag]
    return Sheet(cells=[title, *body], align="llllrlllll", notes=list(dict.fromkeys(notes)))


def latex(sheet: Sheet) -> str:
    """The table over as many pages as it takes, its title again on each, its notes as last rows."""
    title = " & ".join(tex.escaped(word) for word in sheet.cells[0])
    below = f"\\multicolumn{{{len(sheet.align)}}}{{@{{}}p{{\\linewidth}}@{{}}}}"
    notes = [f"{below}{{\\scriptsize {tex.escaped(note)}}} \\\\" for note in sheet.notes]
    sides = {"l": "\\raggedright", "r": "\\raggedleft"}
    columns = [
        f">{{{sides[side]}\\arraybackslash}}p{{{width}\\linewidth}}" for side, width in zip(sheet.align, WIDTHS, strict=True)
    ]
    lines = ["% \\usepackage{array,booktabs,longtable}", "{\\scriptsize\\setlength{\\tabcolsep}{2pt}"]
    lines += ["\\begin{longtable}{@{}", *[f"  {column}" for column in columns], "@{}}"]
    lines += ["\\toprule", f"{title} \\\\", "\\midrule", "\\endhead", "\\bottomrule", "\\endfoot", "\\endlastfoot"]
    lines += [*tex.body(sheet), "\\bottomrule", *notes, "\\end{longtable}}"]
    return "\n".join(lines) + "\n"
