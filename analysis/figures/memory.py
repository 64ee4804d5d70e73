"""What fills the memory of each system: device as planned and its peak, host as observed."""

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


def split(sizes: dict[str, int]) -> dict[str, float]:
    """GB of a plan by the kinds above."""
    owner = {kind: name for name, (_, kinds) in KINDS.items() for kind in kinds}
    found = dict.fromkeys(KINDS, 0.0)
    for kind, size in sizes.items():
        found[owner.get(kind, "other")] += size / 1e9
    return found


def draw(lines: pd.DataFrame) -> Figure:
    """The leading run of the headline. lines: of the whole record."""
    mine = lines[lines["study"] == HEADLINE]
    lines = studies.leading(studies.listed()[HEADLINE], mine)
    shown = lines[lines["tokens_per_s"].notna()].sort_values("tokens_per_s")
    details = lines.iloc[0]["machine_details"]
    places = list(range(len(shown)))
    sizes = {
        "device": [plan.get("device") or {} for plan in shown["plan"]],
        "host": [
            line["host_split"] or line["plan"].get("host") or {} for _, line in shown.iterrows()
        ],
    }
    figure = Figure(figsize=(style.PAGE_IN, 1.5 + 0.36 * len(shown)))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (where, plans) in zip(panels, sizes.items(), strict=True):
        parts = pd.DataFrame([split(plan) for plan in plans])
        for kind, left in (parts.cumsum(axis=1) - parts).items():
            axes.barh(places, parts[kind], left=left, height=0.66, color=KINDS[str(kind)][0])
        limit = details[f"{where}_bytes"] / 1e9
        axes.axvline(limit, color=style.ALARM, linewidth=0.9, linestyle="--")
        axes.set(title=f"{where.capitalize()} (has {limit:.0f} GB)", xlabel="GB")
        axes.grid(axis="y", visible=False)
    for at, peak in enumerate(shown["device_gb"]):
        panels[0].plot([peak] * 2, [at - 0.4, at + 0.4], color=style.INK, linewidth=1.6)
    labels = [label.replace(", ", ",\n", 1) for label in tables.labels(shown)]
    panels[0].set_yticks(places, labels)
    handles = [Patch(color=color, label=name) for name, (color, _) in KINDS.items()]
    best, second = shown.iloc[-1], shown.iloc[-2 if len(shown) > 1 else -1]
    told = [
        f"{names.name(one)} {one['device_gb'] + one['host_gb']:.0f} GB" for one in (best, second)
    ]
    title = f"Device and host together: {told[0]}; {told[1]}"
    about = "device as planned, black: observed peak; host as observed"
    about = f"{names.setup(shown)}; {about}"
    style.titled(figure, title, about, legend=handles)
    return figure
