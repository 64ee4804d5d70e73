"""Which machine rows come from: its kind in words, what tells it from others of the kind, and what to know where there are several.

Invariant: nothing but the rows' own `machine` is read; it names no host.
"""

from __future__ import annotations

from typing import Any

import pandas as pd


def name_of(machine: dict[str, Any]) -> str:
    """The machine in words: GPU (or CPU), cores, host memory in decimal GB; only what the row states. A cell uses one GPU."""
    gpu, num_gpus = machine.get("gpu"), machine.get("num_gpus") or 1
    parts = [
        f"{gpu} (one of {num_gpus})"
        if gpu and num_gpus > 1
        else str(gpu)
        if gpu
        else f"CPU only ({machine.get('cpu') or 'unknown'})"
    ]
    if machine.get("num_cores"):
        parts.append(f"{machine['num_cores']} cores")
    if machine.get("host_bytes"):
        parts.append(f"{machine['host_bytes'] / 1e9:.0f} GB host")
    return ", ".join(parts)


def machine_of(machine: dict[str, Any]) -> str:
    """What a machine is known by among others of its kind: its boot, in rows older than that its matrix peak."""
    return str(machine.get("boot") or machine.get("matrix_peak_tflops"))


def host_of(machine: dict[str, Any]) -> str:
    """What tells one machine from another of its kind: its name, the boot, and the matrix peak that was measured on it.

    Rows older than the boot have the peak alone, which two machines hardly share; rows without either cannot be told apart.
    """
    peak = machine.get("matrix_peak_tflops")
    return f"{name_of(machine)}, boot {machine.get('boot') or 'unknown'}, {f'{peak:.3f} TFLOPS' if peak else 'no peak'}"


def notes(frame: pd.DataFrame) -> list[str]:
    """One note where the measured rows of a table or figure come from several machines of one kind; none else."""
    measured = [dict(machine) for machine in frame[frame["tokens_per_s"].notna()]["machine"]]
    known = {machine_of(machine) for machine in measured}
    if len(known) < 2:
        return []
    peaks = [machine["matrix_peak_tflops"] for machine in measured if machine.get("matrix_peak_tflops")]
    read = f", whose matrix peaks read {min(peaks):.0f} to {max(peaks):.0f} TFLOPS" if peaks else ""
    return [f"Rows of several machines of this kind{read}; differences between them are in these numbers."]
