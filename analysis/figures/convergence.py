"""Loss curves of all systems on one axis, and below it each one's difference from the reference.

Invariant: a pure function of the frame; every loss of every row is drawn, of runs that stopped too. Without a reference there is
no difference, and the figure says so.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.compare import compare
from analysis.figures.quickstart import difference_panel, heading, loss_panel


def figure(frame: pd.DataFrame) -> Figure:
    """One column from the rows of one group (`load.groups`): losses, and below them the differences where there is a reference."""
    comparison = compare(frame)
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
            below = drawn.legend(handles=handles, loc="outside lower center", ncols=2, columnspacing=1.2)
            for line in below.get_lines():
                line.set_linewidth(1.2)
        told = heading(frame).replace(", batch", "\nbatch")
        drawn.suptitle(f"{told}, {frame.iloc[0]['machine_name']}", x=0.01, ha="left", fontsize=6.5, color=style.MUTED)
    return drawn
