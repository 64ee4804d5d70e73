"""Points of one panel kept apart: what ran out of memory in rows above the axis, and side by side what would lie on another point.

Invariant: a point moves sideways alone, by points of the page and never in its data; what a line joins stays where it is.
"""

from __future__ import annotations

import itertools
from collections import Counter
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
ASIDE_PT = 11.0
"""From a point to the next beside it: a marker, its letter, a gap."""
ROW_SHARE = 0.055
"""Height of a row of crosses, share of the panel's."""
DAGGER_PT = 9.0
"""How far above (or below) its claim a dagger ends."""
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What was measured of one system and preset on one machine, drawn: place -> height, and the ends of its interval."""

    artists: list[Artist]
    heights: dict[float, float]
    ends: dict[float, Range]
    mark: str
    """The machine's letter, at the last point; empty where there is one machine."""

    @property
    def joined(self) -> bool:
        """Whether it has more than one point."""
        return len(self.heights) > 1

    def box(self, at: float, unit: float) -> tuple[Range, Range]:
        """What the point at this place takes with its interval and letter, points; `unit` of them a unit of height."""
        low, high = self.ends[at]
        letter = BESIDE_PT - HALF_PT + LETTER_PT * len(self.mark) if self.mark and at == max(self.heights) else 0.0
        return (-HALF_PT, HALF_PT + letter), (unit * low - HALF_PT, unit * high + HALF_PT)


class Taken:
    """What is drawn at each place of one panel: boxes in points, from the place rightwards and from the axis upwards."""

    def __init__(self) -> None:
        self.boxes: list[tuple[float, Range, Range]] = []

    def add(self, at: float, across: Range, upwards: Range) -> None:
        """One more box."""
        self.boxes.append((at, across, upwards))

    def free(self, at: float, across: Range, upwards: Range) -> bool:
        """Whether a box there would lie on none."""
        return not any(
            at == place and across[0] < right and left < across[1] and upwards[0] < high and low < upwards[1]
            for place, (left, right), (low, high) in self.boxes
        )

    def aside(self, at: float, across: Range, upwards: Range) -> float:
        """How far beside its place a box is free, points: 0, on the right, on the left, further on the right, ... It is added."""
        shifts = (ASIDE_PT * ((step + 1) // 2) * (1 if step % 2 else -1) for step in itertools.count())
        shift = next(shift for shift in shifts if self.free(at, (across[0] + shift, across[1] + shift), upwards))
        self.add(at, (across[0] + shift, across[1] + shift), upwards)
        return shift


class Crosses:
    """What ran out of memory in one panel: a row for each system and preset, in it one beside the other at a place."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.rows: dict[str, int] = {}
        self.counts: Counter[tuple[str, float]] = Counter()
        self.taken = Taken()

    def add(self, name: str, at: float, look: dict[str, Any], status: str, meaning: str, mark: str = "") -> None:
        """Draw one, with the letters of its machines on its left."""
        share = 0.04 + ROW_SHARE * self.rows.setdefault(name, len(self.rows))
        shift_pt = -16.0 * self.counts[name, at]
        self.counts[name, at] += 1
        style.crossed(self.axes, at, share, look, status=status, shift_pt=shift_pt, label=meaning)
        if mark:
            _mark(self.axes, mark, (at, share), shift_pt - BESIDE_PT, "right", xycoords=self.axes.get_xaxis_transform())
        left = BESIDE_PT + LETTER_PT * len(mark) if mark else HALF_PT
        height = PANEL_PT * share
        self.taken.add(at, (shift_pt - left, shift_pt + 5 + HALF_PT), (height - HALF_PT, height + HALF_PT))


def set_apart(axes: Axes, claimed: Sequence[Range], flagged: Sequence[Range], lines: Sequence[Line], crosses: Crosses) -> None:
    """A dagger above each flagged claim, below where something is there; each line's letter at its end; and a point by itself that
    would lie on a claim, a line's point, a cross or another such point, moved beside it.

    claimed, flagged: (place, height).
    """
    unit, taken = PANEL_PT / axes.get_ylim()[1], crosses.taken
    for at, value in claimed:
        taken.add(at, (-HALF_PT, HALF_PT), (unit * value - HALF_PT, unit * value + HALF_PT))
    for line in (line for line in lines if line.joined):
        for at in line.heights:
            taken.add(at, *line.box(at, unit))
    for at, value in flagged:
        _dagger(axes, at, value, unit, taken)
    for line in lines:
        at, height = max(line.heights.items())
        shift_pt = 0.0 if line.joined else taken.aside(at, *line.box(at, unit))
        if shift_pt:
            _move(axes, line.artists, shift_pt)
        if line.mark:
            _mark(axes, line.mark, (at, height), shift_pt + BESIDE_PT, "left")


def _dagger(axes: Axes, at: float, value: float, unit: float, taken: Taken) -> None:
    across, height = (-1.5, 1.5), unit * value
    above = taken.free(at, across, (height + HALF_PT, height + DAGGER_PT))
    taken.add(at, across, (height + HALF_PT, height + DAGGER_PT) if above else (height - DAGGER_PT, height - HALF_PT))
    place: Any = {"textcoords": "offset points", "ha": "center", "va": "baseline" if above else "top"}
    axes.annotate("†", (at, value), (0, 3 if above else -2), fontsize=6.5, **place)


def _mark(axes: Axes, mark: str, at: Range, right_pt: float, side: str, **more: Any) -> None:
    place: Any = {"textcoords": "offset points", "ha": side, "va": "center", **more}
    axes.annotate(mark, at, (right_pt, 0), fontsize=6, color=style.MUTED, path_effects=[HALO], **place)


def _move(axes: Axes, artists: Sequence[Artist], shift_pt: float) -> None:
    drawn_on = axes.get_figure(root=True)
    assert drawn_on is not None
    for artist in artists:
        artist.set_transform(axes.transData + ScaledTranslation(shift_pt / 72, 0, drawn_on.dpi_scale_trans))
