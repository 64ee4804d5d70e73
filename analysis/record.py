"""The record: one folder a study, one file a run, every row once and byte for byte.

    results/STUDY/DATE_MACHINE_BOOT.jsonl     the rows of one run
    results/machines.yaml                     each kind of machine, each boot with its matrix peak
    results/shared.yaml                       rows that another study's run counts as its own

All three are written by `python -m analysis add PATH`, never by hand. Invariant: a row is filed
once, a file only grows, and a file appears whole or not at all.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import rows, speeds, studies, whole

RESULTS = Path(__file__).parent / "results"
MACHINES, SHARED = "machines.yaml", "shared.yaml"


def load(results: Path = RESULTS) -> pd.DataFrame:
    """The rows of the record with their `study`, and whether a later run supersedes theirs."""
    found = rows.frame(results)
    copies = [
        found[(found["source"].map(_place) == origin) & (found["cell"] == cell)].assign(
            **dict(zip(("experiment", "run"), place.split("/"), strict=True))
        )
        for place, cells in _yaml(results / SHARED).items()
        for cell, origin in cells.items()
    ]
    found = studies.assigned(pd.concat([found, *copies], ignore_index=True))
    old = [(study.name, run) for study in studies.listed().values() for run in study.superseded]
    return found.assign(superseded=found.set_index(["study", "run"]).index.isin(old))


def lines(results: Path = RESULTS) -> pd.DataFrame:
    """One line a configuration and run of the record, with `superseded`."""
    return speeds.lines(load(results))


def _place(source: str) -> str:
    path = Path(source)
    return f"{path.parent.name}/{path.stem}"


def _yaml(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text()) if path.exists() else None) or {}


def add(sources: Iterable[Path], results: Path = RESULTS) -> list[str]:
    """File the rows of these files or folders; what was done, a line a run.

    Raises ValueError, one line, and files nothing.
    """
    found = studies.assigned(rows.every_row(*sources))
    _refuse(found)
    known = rows.every_row(results) if any(results.rglob("*.jsonl")) else found[:0]
    filed = dict(zip(_measurements(known), known["source"].map(_place), strict=True))
    new: dict[str, list[bytes]] = defaultdict(list)
    shared: dict[str, dict[str, str]] = defaultdict(dict, _yaml(results / SHARED))
    again: dict[str, int] = defaultdict(int)
    copied = found["experiment"] != [config.get("experiment") for config in found["config"]]
    found = pd.concat([found[~copied], found[copied]])
    for key, (_, row) in zip(_measurements(found), found.iterrows(), strict=True):
        place = f"{row['study']}/{row['run']}"
        if key not in filed:
            lines = [line for line in Path(row["source"]).read_bytes().split(b"\n") if line.strip()]
            new[place].append(lines[row["position"]] + b"\n")
            filed[key] = place
        elif filed[key] == place:
            again[place] += 1
        else:
            shared[f"{row['experiment']}/{row['run']}"][row["cell"]] = filed[key]
    wanted = {results / f"{place}.jsonl": b"".join(added) for place, added in new.items()}
    for path in filter(Path.exists, wanted):
        wanted[path] = path.read_bytes() + wanted[path]
    whole.write_changed(wanted)
    _write_yaml(results / SHARED, dict(sorted(shared.items())))
    _write_yaml(results / MACHINES, machines(rows.every_row(results)))
    told = []
    for place in sorted({*new, *again}):
        old = f", {again[place]} known" if again[place] else ""
        told.append(f"{place}: {len(new[place])} new row{'s' * (len(new[place]) != 1)}{old}")
    return told


def _measurements(found: pd.DataFrame) -> list[tuple[str, str]]:
    """What two rows of one measurement share: a study may have copied another's."""
    return list(zip(found["cell"], found["started_at"], strict=True))


def _refuse(found: pd.DataFrame) -> None:
    for _, row in found.iterrows():
        got = row["source"]
        commit = row["git_commit"] if isinstance(row["git_commit"], str) else "unknown"
        if not row["machine_details"].get("gpu"):
            why = "allowed rows of a GPU; CPU speeds say nothing about GPUs"
            raise ValueError(f"{got}: got rows measured without a GPU, {why}")
        if commit == "unknown" or commit.endswith("-dirty") or not row["started_at"]:
            raise ValueError(
                f"{got}: got a row of commit {commit}, started {row['started_at'] or 'never'}, "
                "allowed rows of a clean checkout; commit, and measure it again"
            )


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    head = "# Written by `python -m analysis add`; what it means is said in analysis/record.py.\n"
    whole.write(path, (head + yaml.safe_dump(content, sort_keys=False, width=120)).encode())


def machines(found: pd.DataFrame) -> dict[str, Any]:
    """Each kind of machine, and each boot with its lowest and highest matrix peak."""
    kinds: dict[str, Any] = {}
    for name, part in found.groupby("machine"):
        details = max(part["machine_details"], key=lambda one: one.get("device_bytes") or 0)
        kinds[str(name)] = {
            "gpu": details["gpu"],
            "gpus_of_the_host": details.get("num_gpus") or 1,
            "device_gb": round(details["device_bytes"] / rows.GB, 1),
            "cpu": details.get("cpu"),
            "cores": details.get("num_cores"),
            "host_gb": round(details["host_bytes"] / rows.GB, 1),
            "runs": {},
        }
        for run, mine in part.groupby("run"):
            told = [one.get("matrix_peak_tflops") for one in mine["machine_details"]]
            peaks = sorted(round(peak, 1) for peak in told if peak)
            ends = [peaks[0], peaks[-1]] if peaks else None
            kinds[str(name)]["runs"][run] = {"matrix_peak_tflops": ends}
    return {"kinds": kinds}
