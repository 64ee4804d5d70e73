"""What one setting does to speed: pairs of cells of a study that differ in it and in nothing else.

Invariant: both cells of a pair were measured in one study on one machine, with losses not known to differ from the reference's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from analysis.cells import Cell, change, comparable
from analysis.stats import Estimate
from analysis.studies import VARIED, Study

SETTINGS: dict[str, tuple[str, int, int]] = {
    "without double buffering": ("system.depth", 1, 2),
    "checkpoint interval 1": ("system.checkpoint_interval", 1, 4),
}
"""A setting of the paper's ablation -> the field that stands for it, its value, and the value it is held against."""
STREAMS = "system.streams"


@dataclass(frozen=True, kw_only=True)
class Change:
    """What changing one field did: two cells that differ in nothing else, and tokens/s of the first over the second's, less 1."""

    cell: Cell
    base: Cell
    estimate: Estimate


def setting_change(groups: Iterable[Study], setting: str) -> Change | None:
    """What a setting of the paper's ablation does in these studies; None where no two cells differ in it alone.

    Of several such pairs that with most streams (overlap is what is taken away), then the one measured last.
    """
    if setting not in SETTINGS:
        return None
    key, value, base_value = SETTINGS[setting]
    found = [pair for study in groups for pair in _pairs(study.cells, key, value, base_value)]
    return max(enumerate(found), key=lambda pair: (pair[1].cell.config.get(STREAMS, 0), pair[0]), default=(0, None))[1]


def _pairs(cells: list[Cell], key: str, value: int, base_value: int) -> list[Change]:
    """Comparable cells with `value`, each with the one that has `base_value` and is equal otherwise."""
    ready = [one for one in cells if comparable(one)]
    bases = {_rest(one, key): one for one in ready if one.config.get(key) == base_value}
    pairs = [(one, bases[_rest(one, key)]) for one in ready if one.config.get(key) == value and _rest(one, key) in bases]
    return [Change(cell=one, base=base, estimate=gap) for one, base in pairs if (gap := change(one, base)) is not None]


def _rest(cell: Cell, key: str) -> tuple[object, ...]:
    varied = sorted((name, repr(value)) for name, value in cell.config.items() if name.startswith(VARIED) and name != key)
    return cell.standing.system, cell.model, cell.batch_size, cell.seq_len, tuple(varied)
