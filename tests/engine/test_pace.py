"""Transfers are spread over the turns before they are needed."""

import itertools

import pytest

from engine.pace import paced


@pytest.mark.parametrize(
    ("first", "due", "turns"),
    [
        # Far ahead: one part a turn.
        ([0, 1], [9, 11], [[0, 1, 2], [3, 4, 5]]),
        # The second has two turns between room and need.
        ([0, 5], [6, 7], [[0, 0, 1], [5, 5, 6]]),
        # One turn each: all parts at once.
        ([0, 1], [1, 2], [[0, 0, 0], [1, 1, 1]]),
        ([], [], []),
    ],
)
def test_as_few_parts_a_turn_as_bring_all_in_time(first, due, turns):
    assert paced(first, due, 3) == turns


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_no_part_comes_before_there_is_room_or_after_it_is_needed(parts):
    """Every choice of room for three items, each with its own turn before it is due."""
    for first in itertools.combinations(range(6), 3):
        for waits in itertools.product(range(1, 5), repeat=3):
            due = [start + wait for start, wait in zip(first, waits, strict=True)]
            found = paced(first, due, parts)
            assert [len(turns) for turns in found] == [parts] * 3
            flat = [turn for turns in found for turn in turns]
            assert flat == sorted(flat)
            for turns, start, last in zip(found, first, due, strict=True):
                assert start <= turns[0]
                assert turns[-1] < last
