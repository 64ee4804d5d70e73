"""What fills the memory of each system of a run, by kind: device as planned with its observed peak, host as observed."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import names, tables
from analysis.figures import style

KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "weights": ("weights", "#1b4b82", ("weights",)),
    "optimizer": ("master and optimizer state", "#d0632b", ("master", "moments", "optimizer")),
    "gradients": ("gradients", "#f0b68f", ("gradients",)),
    "activations": ("activations", "#3f8f3a", ("activations", "kept", "checkpoints")),
    "other": ("other", "#b0b0b0", ()),
}
"""Kind -> name, colour, and the kinds of a row's plan that it stands for; what no kind names is other."""


def split(sizes: dict[str, int]) -> dict[str, float]:
    """Bytes of a plan by the kinds above, in GB; master, moments and what a rival calls optimizer state are one kind."""
    found = dict.fromkeys(KINDS, 0.0)
    owner = {kind: name for name, (_, _, kinds) in KINDS.items() for kind in kinds}
    for kind, size in sizes.items():
        found[owner.get(kind, "other")] += size / 1e9
    return found


def draw(lines: pd.DataFrame) -> Figure:
    """lines: of one run of a comparison."""
    shown = lines[lines["tokens_per_s"].notna()].sort_values("tokens_per_s")
    figure = Figure(figsize=(style.PAGE_IN, 1.5 + 0.36 * len(shown)))
    device, host = figure.subplots(1, 2, sharey=True)
    for at, (_, line) in enumerate(shown.iterrows()):
        _stack(device, at, split(line["plan"].get("device") or {}))
        _stack(host, at, split(line["host_split"] or line["plan"].get("host") or {}))
        device.plot([line["device_gb"]] * 2, [at - 0.4, at + 0.4], color=style.INK, linewidth=1.6)
    device.set_yticks(range(len(shown)), [label.replace(", ", ",\n", 1) for label in tables.labels(shown)])
    details = lines.iloc[0]["machine_details"]
    for axes, place in ((device, "device"), (host, "host")):
        limit = details[f"{place}_bytes"] / 1e9
        axes.axvline(limit, color=style.ALARM, linewidth=0.9, linestyle="--")
        axes.set(title=f"{place.capitalize()} (has {limit:.0f} GB)", xlabel="GB")
        axes.grid(axis="y", visible=False)
    handles = [Patch(color=color, label=name) for name, color, _ in KINDS.values()]
    first = shown.iloc[0]
    about = f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step; {names.machine(details)}"
    about += "; device as planned, black: observed peak; host as observed"
    style.titled(figure, "What fills the memory of each system", about, legend=handles)
    return figure


def _stack(axes: Axes, at: int, sizes: dict[str, float]) -> None:
    left = 0.0
    for kind, size in sizes.items():
        if size > 0:
            axes.barh(at, size, left=left, height=0.66, color=KINDS[kind][1])
            left += size
