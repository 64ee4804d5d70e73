"""One step's work on each lane, from a file that `measure.trace=true` leaves: NAME.timeline.json.

    {"measured": {"step_s": 2.53, "intervals": [["compute", "compute forward 3", 0.1, 0.2], ...]}, "predicted": {...}}

Invariant: what is busy or hidden follows from the intervals alone, so a measured and a predicted step go through the same lines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

SUFFIX = ".timeline.json"
LANES = {
    "compute": "compute",
    "h2d": "load (H2D)",
    "d2h": "store (D2H)",
    "fetch": "fetch (H2D)",
    "copy": "all copies",
    "cpu": "CPU",
}
WORK = {
    "compute embed": "forward",
    "compute forward": "forward",
    "compute forward_kept": "forward",
    "compute forward_offloaded": "forward",
    "compute tail": "head and loss",
    "compute recompute": "recomputed forward",
    "compute backward": "recompute + backward",
    "compute backward_kept": "backward",
    "compute backward_offloaded": "backward",
    "compute embed_backward": "backward",
    "load": "load weights",
    "store": "store gradients",
    "evict": "move activations",
    "fetch": "move activations",
    "keep": "gradient copy",
    "step": "AdamW",
    "step device_step": "AdamW",
}
"""Kind and phase of an operation, as its label begins -> the work it is; the others are bookkeeping."""
EXAMPLE = "write one with python -m sweeps.run system=megatrain measure.trace=true"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One steady step. intervals: lane, work, start_s, end_s."""

    name: str
    step_s: float
    intervals: pd.DataFrame
    predicted: bool = False

    @property
    def lanes(self) -> list[str]:
        """Those that do anything, in the order in which they are drawn."""
        return [lane for lane in LANES if lane in set(self.intervals["lane"])]

    def busy_s(self, lane: str) -> float:
        """Seconds that a lane works."""
        return sum(end - start for start, end in self._merged(self.intervals["lane"] == lane))

    def hidden_share(self, lane: str) -> float | None:
        """Share of a lane's work during which the device computes; None for the compute lane itself."""
        mine = self._merged(self.intervals["lane"] == lane)
        if lane == "compute" or not mine:
            return None
        copies = self.intervals["work"].isin(["load weights", "store gradients", "move activations"])
        computing = self._merged((self.intervals["lane"] == "compute") & ~copies)
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in mine for b in computing)
        return both / sum(end - start for start, end in mine)

    def _merged(self, wanted: pd.Series) -> list[tuple[float, float]]:
        """The union of some intervals: (start, end) in order, apart from each other."""
        pieces: list[tuple[float, float]] = []
        for start, end in self.intervals[wanted].sort_values("start_s")[["start_s", "end_s"]].itertuples(index=False):
            if pieces and start <= pieces[-1][1]:
                pieces[-1] = (pieces[-1][0], max(pieces[-1][1], end))
            elif end > start:
                pieces.append((start, end))
        return pieces


def load(path: Path) -> list[Step]:
    """The measured step of a file and, where it has one, the predicted. Raises ValueError, one line, for what is no timeline."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kinds = [kind for kind in ("measured", "predicted") if content.get(kind) is not None]
        if "measured" not in kinds:
            raise ValueError("no field 'measured'")
        return [_step(path, kind, content[kind]) for kind in kinds]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a timeline ({' '.join(str(error).split())}); {EXAMPLE}") from None


def _step(path: Path, kind: str, plain: dict[str, Any]) -> Step:
    found = pd.DataFrame(plain["intervals"], columns=["lane", "label", "start_s", "end_s"])
    found = found.astype({"start_s": float, "end_s": float})
    step_s = float(plain["step_s"])
    good = (found["start_s"] >= 0) & (found["start_s"] <= found["end_s"]) & (found["end_s"] <= step_s * (1 + 1e-6))
    if not len(found) or not good.all() or not step_s > 0:
        raise ValueError(f"{kind}: intervals must lie within the step's {step_s} s")
    work = found["label"].str.rpartition(" ")[0].map(WORK).fillna("bookkeeping")
    name = path.name.removesuffix(SUFFIX)
    return Step(name=name, step_s=step_s, intervals=found.assign(work=work), predicted=kind == "predicted")
