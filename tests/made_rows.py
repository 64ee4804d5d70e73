"""Rows as the bench leaves them, made by hand, for the tests of whatever reads them."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.rows import frame
from sweeps.result import Row

GIB = 1 << 30
H200 = {
    "gpu": "NVIDIA H200",
    "num_gpus": 1,
    "cpu": "Xeon",
    "num_cores": 16,
    "host_bytes": 134_000_000_000,
}
CPU = {"gpu": None, "num_gpus": 0, "cpu": "EPYC", "num_cores": 2, "host_bytes": 16_000_000_000}
VERSIONS = {"torch": "2.11.0", "deepspeed": "0.19.8"}


def curve(num_steps: int, offset: float = 0.0) -> list[float]:
    """A decreasing loss with a wobble; `offset` grows linearly to its full size."""
    return [
        2.0 + 10.3 * math.exp(-step / 9) + 0.04 * math.sin(2.1 * step) + offset * step / num_steps
        for step in range(num_steps)
    ]


def row(system: str, step_s: list[float] | None = None, **fields: Any) -> Row:
    """A measured row of the 3B shape on an H200; any field can be overridden."""
    windows = step_s if step_s is not None else []
    tokens_per_s = 32 * 1024 * len(windows) / sum(windows) if windows else None
    params = 3_397_103_616
    defaults: dict[str, Any] = {
        "experiment": "quickstart",
        "cell": f"cell-{system}-{fields.get('preset')}",
        "system": system,
        "model": "qwen2.5-3b",
        "batch_size": 32,
        "seq_len": 1024,
        "num_micro_batches": 1,
        "status": "ok",
        "num_params": params,
        "tokens_per_s": tokens_per_s,
        "step_s": windows,
        "tflops_6p": 6 * params * tokens_per_s / 1e12 if tokens_per_s else None,
        "mfu": 6 * params * tokens_per_s / 1e12 / 794 if tokens_per_s else None,
        "machine": H200,
        "versions": VERSIONS,
        "git_commit": "0123456789abcdef",
        "started_at": "2026-11-21T08:00:00Z",
    }
    return Row(**(defaults | fields))


def plan(device: int, host: int) -> dict[str, dict[str, int]]:
    return {
        "device": {"slots": device // 2, "head": device - device // 2},
        "host": {"weights": host},
    }


def save(path: Path, rows: list[Row]) -> Path:
    """The rows as a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(one.to_json() + "\n" for one in rows))
    return path


def framed(rows: list[Row]) -> pd.DataFrame:
    """The frame of rows, as if they stood in one file."""
    with tempfile.TemporaryDirectory() as folder:
        return frame(save(Path(folder) / "rows.jsonl", rows))
