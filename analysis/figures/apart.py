"""Points of one panel kept apart: what ran out of memory in rows below the axis, and side by side what would lie on another point.

Invariant: a point moves sideways alone, by points of the page and never in its data, inside the axes and nearer its own place than
the next; what a line joins stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation

from analysis import style

HALO = withStroke(linewidth=1.5, foreground="white")
PANEL_PT = 100.0
"""Height of a panel's axes, points."""
HALF_PT = 2.4
"""Half a marker with its edge; an interval's box ends as far above and below it."""
BESIDE_PT = 4.0
"""From the middle of a marker to the letter beside it."""
LETTER_PT = 3.5
"""Width of a letter."""
GAP_PT = 1.1
"""Between a point, or its letter, and the next beside it."""
CROSS_PT = -16.0
"""From what is crossed to the next beside it."""
ROW_PT = 6.5
"""Height of a row of crosses, below the axis."""
DAGGER_PT = 9.0
"""How far above (or below) its claim a dagger ends."""
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What was drawn of one system and preset on one machine: place -> height, and the ends of its interval."""

    artists: list[Artist]
    heights: dict[float, float]
    ends: dict[float, Range]
    mark: str
    """The machine's letter, at the last point; empty where there is one machine."""
    half_pt: float = HALF_PT
    """Half a marker with its edge."""

    @property
    def joined(self) -> bool:
        """Whether it has more than one point."""
        return len(self.heights) > 1

    def box(self, at: float, unit: float) -> tuple[Range, Range]:
        """What the point at this place takes with its interval and letter, points; `unit` of them a unit of height."""
        low, high = self.ends[at]
        right = BESIDE_PT + LETTER_PT * len(self.mark) if self.mark and at == max(self.heights) else self.half_pt
        return (-self.half_pt, right), (unit * low - self.half_pt, unit * high + self.half_pt)


class Taken:
    """What is drawn in one panel, whose x axis is set and about this wide: boxes in points, from the axes' lower left corner.

    What is asked or added stands at one of the places, `across` counted from there. reach: how much of the way to the next place
    something may be moved.
    """

    def __init__(self, axes: Axes, width_in: float, places: Sequence[float], reach: float = 0.5) -> None:
        self.width_pt = 72 * width_in
        shares = {place: (axes.transScale + axes.transLimits).transform((place, 1.0))[0] for place in places}
        self.places_pt = {place: self.width_pt * float(share) for place, share in shares.items()}
        self.reach = reach
        self.boxes: list[tuple[Range, Range]] = []

    def add(self, at: float, across: Range, upwards: Range) -> None:
        """One more box."""
        middle = self.places_pt[at]
        self.boxes.append(((middle + across[0], middle + across[1]), upwards))

    def free(self, at: float, across: Range, upwards: Range) -> bool:
        """Whether a box there would lie on none."""
        middle = self.places_pt[at]
        first, last = middle + across[0], middle + across[1]
        return not any(
            first < right and left < last and upwards[0] < high and low < upwards[1] for (left, right), (low, high) in self.boxes
        )

    def aside(self, at: float, across: Range, upwards: Range, step_pt: float) -> float:
        """How far beside its place a box is free, points: 0, a step, a step the other way, two steps, ... It is added there.

        Steps that would take it out of the axes or too far towards the next place are skipped; where none is left it stays.
        """
        furthest = math.ceil(self.width_pt / abs(step_pt))
        for shift in (0.0, *(way * number * step_pt for number in range(1, furthest + 1) for way in (1, -1))):
            moved = across[0] + shift, across[1] + shift
            if self._allowed(at, shift, moved) and self.free(at, moved, upwards):
                self.add(at, moved, upwards)
                return shift
        self.add(at, across, upwards)
        return 0.0

    def _allowed(self, at: float, shift: float, moved: Range) -> bool:
        if not shift:
            return True
        middle = self.places_pt[at]
        ways = (other - middle for other in self.places_pt.values())
        near = all(abs(shift) <= self.reach * abs(way) for way in ways if way * shift > 0)
        return near and middle + moved[0] >= 0 and middle + moved[1] <= self.width_pt


class Crosses:
    """What ran out of memory in one panel: a row for each system and preset, in it one beside the other at a place."""

    def __init__(self, axes: Axes, taken: Taken) -> None:
        self.axes = axes
        self.taken = taken
        self.rows: dict[str, int] = {}

    def add(self, name: str, at: float, look: dict[str, Any], status: str, meaning: str, mark: str = "") -> None:
        """Draw one, with the letters of its machines on its left."""
        down_pt = below(self.rows.setdefault(name, len(self.rows)))
        left = BESIDE_PT + LETTER_PT * len(mark) if mark else HALF_PT
        shift_pt = self.taken.aside(at, *crossed_box(down_pt, left), CROSS_PT)
        style.crossed(self.axes, at, down_pt, look, status=status, shift_pt=shift_pt, label=meaning)
        make_room(self.axes, len(self.rows))
        if mark:
            where = self.axes.get_xaxis_transform()
            _mark(self.axes, mark, (at, 0), (shift_pt - BESIDE_PT, -down_pt), "right", xycoords=where)


def below(row: int) -> float:
    """How far below the axis a row of crosses is, points; row: from 0."""
    return ROW_PT * (row + 0.8)


def make_room(axes: Axes, num_rows: int) -> None:
    """Move the names of the ticks below so many rows of crosses."""
    axes.tick_params(axis="x", pad=below(num_rows) - ROW_PT / 2)


def crossed_box(down_pt: float, left_pt: float = HALF_PT) -> tuple[Range, Range]:
    """What a marker so far below the axis and the cross beside it take, points; left_pt: on the marker's left."""
    return (-left_pt, 5 + HALF_PT), (-down_pt - HALF_PT, -down_pt + HALF_PT)


def keep_clear(axes: Axes, claimed: Sequence[Range], taken: Taken) -> None:
    """Nothing that is placed from now on lies on these points, (place, height); the axes' limits are set."""
    unit = PANEL_PT / axes.get_ylim()[1]
    for at, value in claimed:
        taken.add(at, (-HALF_PT, HALF_PT), (unit * value - HALF_PT, unit * value + HALF_PT))


def set_apart(axes: Axes, flagged: Sequence[Range], lines: Sequence[Line], taken: Taken) -> bool:
    """A dagger above each flagged claim, below where something is there; each line's letter at its end; and a point by itself that
    would lie on a line's point, a cross, another such point or what is to be kept clear, moved beside it; whether any was moved.

    flagged: (place, height).
    """
    unit, moved = PANEL_PT / axes.get_ylim()[1], False
    for line in (line for line in lines if line.joined):
        for at in line.heights:
            taken.add(at, *line.box(at, unit))
    for at, value in flagged:
        _dagger(axes, at, value, unit, taken)
    for line in lines:
        at, height = max(line.heights.items())
        shift_pt = 0.0
        if not line.joined:
            (left, right), upwards = line.box(at, unit)
            shift_pt = taken.aside(at, (left, right), upwards, right - left + GAP_PT)
        if shift_pt:
            _move(axes, line.artists, shift_pt)
            moved = True
        if line.mark:
            _mark(axes, line.mark, (at, height), (shift_pt + BESIDE_PT, 0), "left")
    return moved


def _dagger(axes: Axes, at: float, value: float, unit: float, taken: Taken) -> None:
    across, height = (-1.5, 1.5), unit * value
    above = taken.free(at, across, (height + HALF_PT, height + DAGGER_PT))
    taken.add(at, across, (height + HALF_PT, height + DAGGER_PT) if above else (height - DAGGER_PT, height - HALF_PT))
    place: Any = {"textcoords": "offset points", "ha": "center", "va": "baseline" if above else "top"}
    axes.annotate("†", (at, value), (0, 3 if above else -2), fontsize=6.5, **place)


def _mark(axes: Axes, mark: str, at: Range, offset_pt: Range, side: str, **more: Any) -> None:
    place: Any = {"textcoords": "offset points", "ha": side, "va": "center", **more}
    axes.annotate(mark, at, offset_pt, fontsize=6, color=style.MUTED, path_effects=[HALO], **place)


def _move(axes: Axes, artists: Sequence[Artist], shift_pt: float) -> None:
    drawn_on = axes.get_figure(root=True)
    assert drawn_on is not None
    for artist in artists:
        artist.set_transform(axes.transData + ScaledTranslation(shift_pt / 72, 0, drawn_on.dpi_scale_trans))
