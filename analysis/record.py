"""The record: one folder a study, one file a run, every row once and byte for byte as the bench wrote it.

    results/STUDY/DATE_MACHINE_BOOT.jsonl     the rows of one run
    results/machines.yaml                     each kind of machine, and each boot with its measured matrix peak
    results/shared.yaml                       rows of one study's run that another study's run counts as its own

All three are written by `python -m analysis add PATH`, never by hand. Invariant: a row is filed once, a file only grows, and a
file appears whole or not at all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import rows, speeds, studies, whole

RESULTS = Path(__file__).parent / "results"
MACHINES, SHARED = "machines.yaml", "shared.yaml"
SAME = ["cell", "started_at"]
"""What two rows of one measurement have in common: a study may have copied it from another's, under its own name."""


def load(results: Path = RESULTS) -> pd.DataFrame:
    """The rows of the record with their `study`, and whether a later run supersedes theirs (studies.yaml)."""
    found = rows.frame(results)
    found = pd.concat([found, *_shared(found, results)], ignore_index=True)
    found = studies.assigned(found)
    old = [(study.name, run) for study in studies.all_studies() for run in study.superseded]
    places = list(zip(found["study"], found["run"], strict=True))
    return found.assign(superseded=[place in old for place in places])


def lines(results: Path = RESULTS) -> pd.DataFrame:
    """One line a configuration and run of the record, with `superseded`."""
    found = load(results)
    return speeds.lines(found)


def _shared(found: pd.DataFrame, results: Path) -> list[pd.DataFrame]:
    path = results / SHARED
    listed = yaml.safe_load(path.read_text()) if path.exists() else {}
    copies = []
    for place, cells in listed.items():
        experiment, run = place.split("/")
        for cell, origin in cells.items():
            source = found[(found["source"].map(_place) == origin) & (found["cell"] == cell)]
            copies.append(source.assign(experiment=experiment, run=run))
    return copies


def _place(source: str) -> str:
    path = Path(source)
    return f"{path.parent.name}/{path.stem}"


def add(sources: Iterable[Path], results: Path = RESULTS) -> list[str]:
    """File the rows of these files or folders; what was done, a line a run. Raises ValueError, one line, and files nothing."""
    found = rows.every_row(*sources)
    _refuse(found)
    raw = {source: Path(source).read_bytes().split(b"\n") for source in found["source"].unique()}
    numbers = {source: [i for i, line in enumerate(lines) if line.strip()] for source, lines in raw.items()}
    known = rows.every_row(results) if any(results.rglob("*.jsonl")) else pd.DataFrame(columns=found.columns)
    filed = {tuple(key): _place(source) for *key, source in known[[*SAME, "source"]].itertuples(index=False)}
    new: dict[str, list[bytes]] = defaultdict(list)
    shared: dict[str, dict[str, str]] = defaultdict(dict)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    copied = found["experiment"] != [config.get("experiment") for config in found["config"]]
    for _, row in pd.concat([found[~copied], found[copied]]).iterrows():
        place, key = f"{studies.study_of(row['experiment'])}/{row['run']}", (row["cell"], row["started_at"])
        if key not in filed:
            new[place].append(raw[row["source"]][numbers[row["source"]][row["position"]]])
            filed[key] = place
            counts[place][0] += 1
        elif filed[key] != place:
            shared[f"{row['experiment']}/{row['run']}"][row["cell"]] = filed[key]
        else:
            counts[place][1] += 1
    for place, lines in new.items():
        path = results / f"{place}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        whole.write(path, before + b"".join(line + b"\n" for line in lines))
    _write_yaml(results / SHARED, _merged(results / SHARED, shared))
    _write_yaml(results / MACHINES, machines(rows.every_row(results)))
    return [
        f"{place}: {added} rows filed" + (f", {again} were there already" if again else "")
        for place, (added, again) in sorted(counts.items())
    ]


def _refuse(found: pd.DataFrame) -> None:
    on_cpu = found[[not machine.get("gpu") for machine in found["machine_details"]]]
    if len(on_cpu):
        source = on_cpu["source"].iloc[0]
        raise ValueError(f"{source}: got rows measured without a GPU, allowed rows of a GPU; CPU speeds say nothing about GPUs")
    commits = found["git_commit"].astype("string")
    unclean = found[commits.isna() | commits.str.endswith("-dirty").fillna(False) | (found["started_at"] == "")]
    if len(unclean):
        got = unclean.iloc[0]
        commit = "unknown" if pd.isna(got["git_commit"]) else got["git_commit"]
        raise ValueError(
            f"{got['source']}: got a row of commit {commit}, started {got['started_at'] or 'at no time'}, allowed rows of a "
            "clean checkout; commit, and measure it again"
        )


def _merged(path: Path, new: dict[str, dict[str, str]]) -> dict[str, Any]:
    old = yaml.safe_load(path.read_text()) if path.exists() else {}
    return {place: {**(old or {}).get(place, {}), **new.get(place, {})} for place in sorted({*(old or {}), *new})}


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    head = "# Written by `python -m analysis add`; what it means is said in analysis/record.py.\n"
    whole.write(path, (head + yaml.safe_dump(content, sort_keys=False, width=120)).encode())


def machines(found: pd.DataFrame) -> dict[str, Any]:
    """Each kind of machine in the rows, and each boot with the matrix peaks that were measured on it, lowest and highest."""
    kinds: dict[str, Any] = {}
    for name, part in ((str(name), part) for name, part in found.groupby("machine")):
        details = max(part["machine_details"], key=lambda one: one.get("device_bytes") or 0)
        kinds[name] = {
            "gpu": details["gpu"],
            "gpus_of_the_host": details.get("num_gpus") or 1,
            "device_gb": round(details["device_bytes"] / rows.GB, 1),
            "cpu": details.get("cpu"),
            "cores": details.get("num_cores"),
            "host_gb": round(details["host_bytes"] / rows.GB, 1),
            "runs": {run: _peaks(mine) for run, mine in sorted(part.groupby("run"))},
        }
    return {"kinds": kinds}


def _peaks(part: pd.DataFrame) -> dict[str, Any]:
    peaks = sorted(peak for one in part["machine_details"] if (peak := one.get("matrix_peak_tflops")))
    return {"matrix_peak_tflops": [round(peaks[0], 1), round(peaks[-1], 1)] if peaks else None}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file as they stand, for tests and tools that must not interpret them."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
