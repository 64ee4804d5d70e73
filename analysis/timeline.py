"""One step's work on each lane, from a file that `measure.trace=true` leaves: NAME.timeline.json.

    {"measured": {"step_s": 2.53, "intervals": [["compute", "compute forward 3", 0.1, 0.2]]}}

and maybe the same under "predicted". Invariant: what is busy or hidden follows from the intervals
alone, so a measured and a predicted step go through the same lines.
"""

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
"""Kind and phase of an operation, as its label begins -> the work; the others are bookkeeping."""
COPIES = ("load weights", "store gradients", "move activations")


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
        return _seconds(self._united(self.intervals["lane"] == lane))

    def hidden_share(self, lane: str) -> float | None:
        """Share of a lane's work during which the device computes; None for the compute lane."""
        busy_s = self.busy_s(lane)
        if lane == "compute" or not busy_s:
            return None
        computes = (self.intervals["lane"] == "compute") & ~self.intervals["work"].isin(COPIES)
        either = self._united(computes | (self.intervals["lane"] == lane))
        return (busy_s + _seconds(self._united(computes)) - _seconds(either)) / busy_s

    def _united(self, wanted: pd.Series) -> pd.DataFrame:
        """The union of some intervals: start_s and end_s of pieces apart from each other."""
        pieces = self.intervals[wanted].sort_values("start_s")
        ended_s = pieces["end_s"].cummax().shift(fill_value=-1.0)
        grouped = pieces.groupby((pieces["start_s"] > ended_s).cumsum())
        return grouped.agg(start_s=("start_s", "min"), end_s=("end_s", "max"))


def _seconds(pieces: pd.DataFrame) -> float:
    return float((pieces["end_s"] - pieces["start_s"]).sum())


def load(path: Path) -> list[Step]:
    """The measured step of a file and maybe the predicted. Raises ValueError, one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = [kind for kind in ("measured", "predicted") if content.get(kind) is not None]
        if "measured" not in known:
            raise ValueError("no field 'measured'")
        return [_step(path, kind, content[kind]) for kind in known]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        remedy = "write one with python -m sweeps.run system=megatrain measure.trace=true"
        raise ValueError(f"{path}: not a timeline ({why}); {remedy}") from None


def _step(path: Path, kind: str, plain: dict[str, Any]) -> Step:
    found = pd.DataFrame(plain["intervals"], columns=["lane", "label", "start_s", "end_s"])
    found = found.astype({"start_s": float, "end_s": float})
    step_s, start_s, end_s = float(plain["step_s"]), found["start_s"], found["end_s"]
    good = (start_s >= 0) & (start_s <= end_s) & (end_s <= step_s * (1 + 1e-6))
    if not len(found) or not good.all() or not step_s > 0:
        raise ValueError(f"{kind}: intervals must lie within the step's {step_s} s")
    work = found["label"].str.rpartition(" ")[0].map(WORK).fillna("bookkeeping")
    name, intervals = path.name.removesuffix(SUFFIX), found.assign(work=work)
    return Step(name=name, step_s=step_s, intervals=intervals, predicted=kind == "predicted")
