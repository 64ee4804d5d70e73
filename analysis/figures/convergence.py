"""Loss curves of all systems on one axis, and below it each one's difference from the reference.

Invariant: a pure function of the frame; every loss of every row is drawn, of runs that stopped too. Without a reference there is
no difference, and the figure says so.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.compare import Comparison, compare
from analysis.figures import layout
from analysis.figures.quickstart import difference_panel, heading, loss_panel
from analysis.studies import study_of


def figure(frame: pd.DataFrame) -> Figure:
    """One column from the rows of one group (`load.groups`): losses, and below them the differences where there is a reference."""
    told = heading(frame).replace(", batch", "\nbatch")
    return _drawn(compare(frame), f"{told}, {frame.iloc[0]['machine_name']}")


def study_figure(frame: pd.DataFrame) -> Figure:
    """The same of the cells of one study, which differ in a setting: against the first that keeps an fp32 master."""
    study = study_of(frame)
    words = [study.words(one) for one in study.cells]
    labels = [" / ".join(mine.values()) for mine in words]
    named = [
        replace(one.standing, label=label, variant=at) for at, (one, label) in enumerate(zip(study.cells, labels, strict=True))
    ]
    first = next((mine for mine, one in zip(named, study.cells, strict=True) if one is study.first), None)
    on_gpu = not study.machine.startswith("CPU only")
    comparison = Comparison(standings=named, baseline=None, reference=first, on_gpu=on_gpu, numerics_checked=False)
    return _drawn(comparison, f"{study.subject}\n{study.machine}\nlines: {' / '.join(words[0])}")


def _drawn(comparison: Comparison, told: str) -> Figure:
    reference = comparison.reference
    compared = reference is not None and sum(bool(one.losses) for one in comparison.standings) > 1
    with style.context():
        drawn = style.new_figure(style.COLUMN_IN, 3.3 if compared else 2.4)
        if compared and reference is not None:
            loss, difference = drawn.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
            difference_panel(difference, comparison, reference)
            difference.set_title(f"Difference from {reference.label}")
            difference.set_ylabel("nats / token")
        else:
            loss = drawn.subplots()
        loss_panel(loss, comparison)
        loss.set_xlabel("" if compared else "optimizer step (no reference was measured)")
        legend = loss.get_legend()
        if legend is not None:
            handles = [line for line in loss.get_lines() if not str(line.get_label()).startswith("_")]
            legend.remove()
            for line in layout.legend_below(drawn, handles, 2).get_lines():
                line.set_linewidth(1.2)
        drawn.suptitle(told, x=0.01, ha="left", fontsize=6.5, color=style.MUTED)
    return drawn
