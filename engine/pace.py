"""Spreads transfers over the computations before the one that needs them.

Copies in one direction take turns on the link, whatever their streams: weights queue behind
activations that were issued before them. Issued in parts, as few as may be for each computation,
those leave the weights their turn. Invariant: every part has a turn, none before its item may come
and all before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence


def paced(first: Sequence[int], due: Sequence[int], parts: int) -> list[list[int]]:
    """Turn of each part of each item: no earlier than the item's `first` turn, all before its `due`
    one, in the items' order, with as few parts in one turn as that takes, at most `parts`.

    Items are given in the order in which they are due. One that can have a single turn has it for
    all its parts.
    """
    for most in range(1, parts):
        turns = _filled(first, parts, most)
        if all(item[-1] < last for item, last in zip(turns, due, strict=True)):
            return turns
    return _filled(first, parts, parts)


def _filled(first: Sequence[int], parts: int, most: int) -> list[list[int]]:
    """Each part in the first turn with room, after all parts before it, with `most` a turn."""
    turns: list[list[int]] = []
    turn, used = 0, 0
    for start in first:
        found = list[int]()
        for _ in range(parts):
            if used == most or turn < start:
                turn, used = max(turn + (used == most), start), 0
            found.append(turn)
            used += 1
        turns.append(found)
    return turns
