"""What fills the memory of each system: device as planned and its peak, host as observed."""

from collections.abc import Iterable

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import names, studies, tables
from analysis.figures import style

TITLE = "What fills the memory of each system"
HEADLINE = "vs_zero3_14b"
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("#1b4b82", ("weights",)),
    "master and optimizer state": ("#d0632b", ("master", "moments", "optimizer")),
    "gradients": ("#f0b68f", ("gradients",)),
    "activations": ("#3f8f3a", ("activations", "kept", "checkpoints", "masks")),
    "other": ("#b0b0b0", ()),
}
"""Name -> colour, and the kinds of a row's plan that it stands for; what none names is other."""


def draw(lines: pd.DataFrame) -> Figure:
    """The leading run of the headline. lines: of the whole record."""
    lines = studies.leading(studies.listed()[HEADLINE], lines[lines["study"] == HEADLINE])
    shown = lines[lines["tokens_per_s"].notna()].sort_values("tokens_per_s")
    sizes = {
        "device": [plan.get("device") or {} for plan in shown["plan"]],
        "host": [
            line["host_split"] or line["plan"].get("host") or {} for _, line in shown.iterrows()
        ],
    }
    figure = Figure(figsize=(style.PAGE_IN, 1.5 + 0.36 * len(shown)))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (where, plans) in zip(panels, sizes.items(), strict=True):
        parts = _by_kind(plans)
        for kind, left in (parts.cumsum(axis=1) - parts).items():
            look = {"height": 0.66, "color": KINDS[str(kind)][0]}
            axes.barh(range(len(shown)), parts[kind], left=left, **look)
        limit = lines.iloc[0]["machine_details"][f"{where}_bytes"] / 1e9
        axes.axvline(limit, color=style.ALARM, linewidth=0.9, linestyle="--")
        axes.set(title=f"{where.capitalize()} (has {limit:.0f} GB)", xlabel="GB")
        axes.grid(axis="y", visible=False)
    for at, peak in enumerate(shown["device_gb"]):
        panels[0].plot([peak] * 2, [at - 0.4, at + 0.4], color=style.INK, linewidth=1.6)
    labels = [label.replace(", ", ",\n", 1) for label in tables.labels(shown)]
    panels[0].set_yticks(range(len(shown)), labels)
    handles = [Patch(color=color, label=name) for name, (color, _) in KINDS.items()]
    told = [
        f"{names.name(one)} {one['device_gb'] + one['host_gb']:.0f} GB"
        for one in (shown.iloc[-1], shown.iloc[-2 if len(shown) > 1 else -1])
    ]
    title = f"Device and host together: {told[0]}; {told[1]}"
    about = "device as planned, black: observed peak; host as observed"
    style.titled(figure, title, f"{names.setup(shown)}; {about}", legend=handles)
    return figure


def _by_kind(plans: Iterable[dict[str, int]]) -> pd.DataFrame:
    """GB of each plan by the kinds above."""
    owner = {kind: name for name, (_, kinds) in KINDS.items() for kind in kinds}
    sizes = pd.DataFrame(list(plans)).fillna(0.0).T / 1e9
    return (
        sizes.groupby(lambda kind: owner.get(kind, "other"))
        .sum()
        .T.reindex(columns=list(KINDS), fill_value=0.0)
    )
