"""One look for every figure: a system has the same colour, marker and hatch wherever it is drawn; further rows of one system
in a figure (its variants) keep marker and hue, lighter, with another line, marker fill and a denser hatch.

Invariant: the four quickstart systems are at least 15 units of CIE lightness apart and any two systems 4.5, so they stay
apart in grey and for every colour vision; what was not measured here is hollow and dashed (predictions) or hollow and dotted
(somebody else's numbers); files are byte-identical when rebuilt (no dates, bundled font) and PDFs embed their fonts.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import ScaledTranslation

from analysis import whole

COLUMN_IN = 3.3
"""Width of one column of a two-column paper, inches."""
PAGE_IN = 6.9
"""Width of the text block, inches."""
INK = "#222222"
MUTED = "#6f6f6f"
ALARM = "#a4122a"
"""Failures and disagreements; always with a word beside it."""

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "axes.labelsize": 7.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "megatrain-bench",
    "figure.dpi": 100,
    "savefig.dpi": 300,
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one system is named and drawn."""

    name: str
    color: str
    marker: str
    hatch: str
    line: Any = "-"
    fill: str = "full"
    """Which part of a marker is filled."""


SYSTEMS: dict[str, Look] = {
    "in_memory": Look(name="in memory", color="#2b2b2b", marker="o", hatch=""),
    "megatrain": Look(name="MegaTrain", color="#1f5fa8", marker="s", hatch="///"),
    "zero3": Look(name="ZeRO-3", color="#e0701f", marker="^", hatch="..."),
    "fsdp2": Look(name="FSDP2", color="#8fd3c8", marker="D", hatch="\\\\\\"),
    "zero2": Look(name="ZeRO-2", color="#b94082", marker="v", hatch="xxx"),
    "zero3_optimizer": Look(name="ZeRO-3 optimizer", color="#f7d0b1", marker="<", hatch="---"),
    "zero3_twinflow": Look(name="ZeRO-3 Twin-Flow", color="#6eae52", marker="d", hatch="\\"),
    "zero_infinity": Look(name="ZeRO-Infinity", color="#6b461d", marker="*", hatch="**"),
    "superoffload": Look(name="SuperOffload", color="#4f336a", marker="P", hatch="|||"),
    "zenflow": Look(name="ZenFlow", color="#cfb84c", marker="X", hatch="+++"),
    "torchao_offload": Look(name="torchao offload", color="#7e7e7e", marker=">", hatch="ooo"),
    "published_megatrain": Look(name="MegaTrain (published)", color="#84afde", marker="p", hatch="//"),
}
"""Every system by its registry name, in the order in which it is listed when nothing else decides."""


PRESETS: dict[str, tuple[str | None, ...]] = {
    "megatrain": ("fast", "stream", "stream compiled", "paper", "long"),
    "zero3": (
        None,
        "compiled",
        "kept compiled",
        "optimizer compiled",
        "twinflow compiled",
        "twinflow kept compiled",
        "optimizer",
        "twinflow",
    ),
    "fsdp2": (None, "compiled", "kept compiled", "grad_op", "grad_op compiled"),
    "superoffload": (None, "compiled", "kept compiled"),
    "in_memory": (None, "compiled", "kept compiled"),
}
"""The presets (load.shown_preset) that have a variant of their own wherever they are drawn beside others of their system."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """How one kind of work is named and filled on a timeline."""

    name: str
    color: str
    hatch: str = ""
    ink: str = "white"
    """Colour of the hatch."""


WORK: dict[str, Fill] = {
    "forward": Fill(name="forward", color="#9cc5ea"),
    "recompute": Fill(name="recomputed forward", color="#9cc5ea", hatch="/////", ink="#1b4b82"),
    "head": Fill(name="head and loss", color="#f5dc6b", hatch=".....", ink="#5d5210"),
    "backward_recomputing": Fill(name="recompute + backward", color="#1b4b82", hatch="/////"),
    "backward": Fill(name="backward", color="#1b4b82"),
    "adamw": Fill(name="AdamW", color="#d0632b", hatch="\\\\\\\\\\"),
    "load": Fill(name="load weights", color="#4fa58c"),
    "store": Fill(name="store gradients", color="#5f4690", hatch="-----"),
    "activations": Fill(name="move activations", color="#e58fb0", hatch="....", ink="#6b1239"),
    "keep": Fill(name="gradient copy", color="#c9a6cf", hatch="xxxxx", ink="#5c3566"),
    "other": Fill(name="other", color="#9a9a9a"),
}
"""Work on a timeline, in the order of the legend: one hue for a computation's direction, slashes where it is done again."""

KINDS: dict[str, Fill] = {
    "weights": Fill(name="weights", color="#1b4b82"),
    "master": Fill(name="fp32 master", color="#9cc5ea", hatch="/////", ink="#1b4b82"),
    "moments": Fill(name="Adam moments", color="#d0632b"),
    "optimizer": Fill(name="optimizer state", color="#e9a23b", hatch="||||", ink="#7a4a08"),
    "gradients": Fill(name="gradients", color="#f0b68f", hatch="....", ink="#8a3c12"),
    "checkpoints": Fill(name="layer inputs", color="#6fb59f"),
    "kept": Fill(name="kept activations", color="#a8d5c2", hatch="\\\\\\\\\\", ink="#24705a"),
    "activations": Fill(name="activations", color="#5f4690", hatch="-----"),
    "staging": Fill(name="staging", color="#cdbfe3", hatch="xxxx", ink="#5f4690"),
    "workspace": Fill(name="workspace", color="#f5dc6b"),
    "other": Fill(name="other", color="#9a9a9a"),
}
"""Kinds of planned bytes, in the order in which they are stacked; a kind that is not here is drawn as other."""

LINES: tuple[Any, ...] = ("-", "-.", (0, (7, 1.2)), (0, (7, 1.2, 1, 1.2, 1, 1.2)))
FILLS = ("full", "left", "bottom", "right", "top")
"""Line and marker fill of the variants of one system, in turn: twenty before both repeat. Dashes, dots and hollow markers are
kept for what was not measured here."""

EDGE = 0.6
"""Share of a system's colour, the rest black, that its markers' edges have: the palest stand out on white."""

STATUS_LABELS: dict[str, str] = {
    "ok": "measured",
    "oom_device": "OOM (device)",
    "oom_host": "OOM (host)",
    "timeout": "timed out",
    "nonfinite": "non-finite loss",
    "unsupported": "unsupported",
    "wont_fit": "does not fit",
    "error": "error",
}

CROSSES: dict[str, str] = {"oom_device": "x", "oom_host": "x", "wont_fit": "+"}
"""Marker of a cell that was not measured, by its status; "1" (a three-legged star) for any other."""


def look(system: str, variant: int = 0) -> Look:
    """The look of a registered system; an unknown one is drawn in grey under its own name. `variant` 0 is the system's own."""
    own = SYSTEMS.get(system, Look(name=system, color="#a0a0a0", marker="h", hatch="oo"))
    if variant == 0:
        return own
    lighter = tint(own.color, max(0.36, 0.7 * 0.75 ** (variant - 1)))
    return replace(own, color=lighter, hatch=own.hatch * 2, line=LINES[variant % len(LINES)], fill=FILLS[variant % len(FILLS)])


def variants(system: str, presets: Sequence[str | None]) -> list[int]:
    """The variant of each row of one system in a figure: that of its preset, the next free one where there is none or it is taken;
    a system's only row has the system's own look."""
    if len(presets) == 1:
        return [0]
    known = PRESETS.get(system, (None,))
    own = {preset: known.index(preset) for preset in presets if preset in known}
    taken = set(own.values())
    free = (number for number in itertools.count() if number not in taken)
    return [own.pop(preset) if preset in own else next(free) for preset in presets]


def name_of(system: str) -> str:
    """The system's name as printed in tables and figures."""
    return look(system).name


def bar(system: str, variant: int = 0) -> dict[str, Any]:
    """Keyword arguments of a bar of this system: filled, hatched in white."""
    drawn = look(system, variant)
    return {"facecolor": drawn.color, "edgecolor": "white", "hatch": drawn.hatch, "linewidth": 0}


def curve(system: str, variant: int = 0) -> dict[str, Any]:
    """Keyword arguments of a line of this system: colour, dashes, and a marker that is filled or half filled."""
    drawn = look(system, variant)
    red, green, blue = (EDGE * channel for channel in to_rgb(drawn.color))
    return {
        "color": drawn.color,
        "markeredgecolor": (red, green, blue),
        "linestyle": drawn.line,
        "marker": drawn.marker,
        "fillstyle": drawn.fill,
        "markerfacecoloralt": "white",
        "markeredgewidth": 0.6,
    }


def predicted_bar(system: str, variant: int = 0) -> dict[str, Any]:
    """Keyword arguments of a bar that no run stands behind: hollow, dashed in the system's colour."""
    return {"facecolor": "none", "edgecolor": look(system, variant).color, "linestyle": "--", "linewidth": 0.9}


def claimed_bar(system: str) -> dict[str, Any]:
    """Keyword arguments of a bar of somebody else's number: hollow, dotted in the system's colour."""
    return predicted_bar(system) | {"linestyle": ":", "linewidth": 1.1}


def predicted_point(system: str, variant: int = 0) -> dict[str, Any]:
    """Keyword arguments of a point that no run stands behind: the system's marker, hollow; joined by a thin dashed line."""
    drawn = look(system, variant)
    looks = {"marker": drawn.marker, "markerfacecolor": "white", "markeredgewidth": 0.8}
    return {"color": drawn.color, "linestyle": (0, (2, 2)), "linewidth": 0.7, **looks}


def claimed_point(system: str) -> dict[str, Any]:
    """Keyword arguments of a point of somebody else's number: the system's marker, hollow; joined by a dotted line."""
    return predicted_point(system) | {"linestyle": ":", "linewidth": 0.9}


def cross(axes: Axes, x: float, y: float, **more: Any) -> None:
    """The mark of a cell that was not measured; its status stands in words beside it or in the legend."""
    axes.plot(x, y, **{"marker": "x", "color": ALARM, "markersize": 4, "clip_on": False, "linestyle": "", "zorder": 5, **more})


def crossed(axes: Axes, x: float, down_pt: float, looks: dict[str, Any], status: str, shift_pt: float = 0.0, **more: Any) -> None:
    """A point of a line that was not measured: its marker below the axis, where no value is, a cross by its status beside it.

    down_pt, shift_pt: how far below the axis, and to the right of its place, where several have the same. more: of the cross.
    """
    drawn_on = axes.get_figure(root=True)
    assert drawn_on is not None
    low = axes.get_xaxis_transform() + ScaledTranslation(shift_pt / 72, -down_pt / 72, drawn_on.dpi_scale_trans)
    axes.plot(x, 0, transform=low, **(looks | {"linestyle": "", "clip_on": False}))
    beside = low + ScaledTranslation(5 / 72, 0, drawn_on.dpi_scale_trans)
    cross(axes, x, 0, transform=beside, marker=CROSSES.get(status, "1"), **more)


def whisker(axes: Axes, x: float, y: float, **ends: Any) -> None:
    """An interval (`xerr` or `yerr`, distances from the value): a white halo first, so that it is seen on dark bars."""
    for color, width in (("white", 1.8), (INK, 0.8)):
        axes.errorbar(x, y, color=color, elinewidth=width, capthick=width, capsize=1.2 + width, zorder=6, **ends)


def tint(color: str, strength: float = 0.42) -> str:
    """The colour mixed with white, opaque (a grid line never shows through)."""
    mixed = [1 - strength * (1 - channel) for channel in to_rgb(color)]
    return to_hex((mixed[0], mixed[1], mixed[2]))


def context() -> AbstractContextManager[None]:
    """The style as a context; everything that builds or saves a figure runs inside it."""
    return matplotlib.rc_context(RC)


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure of this size, free of pyplot's global state."""
    return Figure(figsize=(width_in, height_in), layout=ConstrainedLayoutEngine(w_pad=0.07))


def value_grid(axes: Axes, axis: str) -> None:
    """Light lines along the value axis only."""
    axes.grid(True, axis="x" if axis == "x" else "y")


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as a small PNG, for notebooks."""
    buffer = io.BytesIO()
    with context():
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.png and stem.pdf, each whole, reproducibly (no dates inside); return their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.parent / f"{stem.name}.{kind}" for kind in ("png", "pdf")]
    drawn, printed = io.BytesIO(), io.BytesIO()
    with context():
        figure.savefig(drawn, format="png", metadata={"Software": None})
        engine = figure.get_layout_engine()
        figure.set_layout_engine("none")  # the PDF keeps the PNG's layout: it is the slow half of a save
        figure.savefig(printed, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
        figure.set_layout_engine(engine)
    for path, buffer in zip(paths, (drawn, printed), strict=True):
        whole.write(path, buffer.getvalue())
    return paths
