"""The record: one folder a study, one file a run, every row once and byte for byte.

    results/STUDY/DATE_MACHINE_BOOT.jsonl     the rows of one run
    results/machines.yaml                     each kind of machine, each boot with its matrix peak
    results/shared.yaml                       rows that another study's run counts as its own

All three are written by `python -m analysis add PATH`, never by hand. Invariant: a row is filed
once, a file only grows, and a file appears whole or not at all.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import rows, speeds, studies

RESULTS = Path(__file__).parent / "results"
MACHINES, SHARED = "machines.yaml", "shared.yaml"
HEAD = "# Written by `python -m analysis add`; what it means is said in analysis/record.py.\n"


def lines(results: Path = RESULTS) -> pd.DataFrame:
    """One line a configuration and run of the record, with `superseded`."""
    return speeds.lines(load(results))


def load(results: Path = RESULTS) -> pd.DataFrame:
    """The rows of the record with their `study`, and whether a later run supersedes theirs."""
    found = rows.frame(results)
    places, copies = found["source"].map(_place), []
    for place, cells in _yaml(results / SHARED).items():
        experiment, run = place.split("/")
        for cell, origin in cells.items():
            mine = found[(places == origin) & (found["cell"] == cell)]
            copies.append(mine.assign(experiment=experiment, run=run))
    found = studies.assigned(pd.concat([found, *copies], ignore_index=True))
    old = [(study.name, run) for study in studies.listed().values() for run in study.superseded]
    return found.assign(superseded=found.set_index(["study", "run"]).index.isin(old))


def _place(source: str) -> str:
    return "/".join(Path(source).with_suffix("").parts[-2:])


def _yaml(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text()) if path.exists() else None) or {}


def add(sources: Iterable[Path], results: Path = RESULTS) -> list[str]:
    """File the rows of these files or folders; what was done, a line a run. Raises ValueError, one
    line, and files nothing."""
    found = studies.assigned(rows.every_row(*sources))
    _refuse(found)
    known = rows.every_row(results) if any(results.rglob("*.jsonl")) else found[:0]
    homes = dict(zip(_measurement(known), known["source"].map(_place), strict=True))
    copied = found["experiment"] != [config.get("experiment") for config in found["config"]]
    found = pd.concat([found[~copied], found[copied]])  # of two studies the one that measured it
    key, place = _measurement(found), found["study"] + "/" + found["run"]
    new = ~key.isin(homes) & ~key.duplicated()
    found = found.assign(home=[homes.setdefault(*pair) for pair in zip(key, place, strict=True)])
    wanted = {}
    for to, mine in found[new].groupby(place):
        path = results / f"{to}.jsonl"
        old = path.read_bytes() if path.exists() else b""
        wanted[path] = old + b"".join(_line(row) for _, row in mine.iterrows())
    shared = _yaml(results / SHARED)
    for _, row in found[found["home"] != place].iterrows():
        shared.setdefault(f"{row['experiment']}/{row['run']}", {})[row["cell"]] = row["home"]
    write_changed(wanted)
    kinds = machines(rows.every_row(results))
    for name, content in {SHARED: dict(sorted(shared.items())), MACHINES: kinds}.items():
        text = HEAD + yaml.safe_dump(content, sort_keys=False, width=120)
        write(results / name, text.encode())
    counts = new[found["home"] == place].groupby(place).agg(["sum", "size"])
    return [
        f"{to}: {num} new row{'' if num == 1 else 's'}{f', {all - num} known' if all > num else ''}"
        for to, num, all in counts.itertuples()
    ]


def _measurement(found: pd.DataFrame) -> pd.Series:
    """What two rows of one measurement share: a study may have copied another's."""
    return found["cell"] + " " + found["started_at"]


def _line(row: pd.Series) -> bytes:
    """The row as it stands in its file."""
    lines = Path(str(row["source"])).read_bytes().split(b"\n")
    return [line for line in lines if line.strip()][int(row["position"])] + b"\n"


def _refuse(found: pd.DataFrame) -> None:
    for _, row in found.iterrows():
        if not str(row["source"]).endswith(".jsonl"):
            why = "got a run of W&B, allowed a file of rows (rows.jsonl) or a folder with one"
            raise ValueError(f"{row['source']}: {why}; give that")
        commit = row["git_commit"] if isinstance(row["git_commit"], str) else "unknown"
        if not row["machine_details"].get("gpu"):
            why = "got rows measured without a GPU, allowed rows of a GPU"
            raise ValueError(f"{row['source']}: {why}; CPU speeds say nothing about GPUs")
        if commit == "unknown" or commit.endswith("-dirty") or not row["started_at"]:
            got = f"got a row of commit {commit}, started {row['started_at'] or 'never'}"
            allowed = "allowed rows of a clean checkout; commit, and measure it again"
            raise ValueError(f"{row['source']}: {got}, {allowed}")


def machines(found: pd.DataFrame) -> dict[str, Any]:
    """Each kind of machine, and each boot with its lowest and highest matrix peak, in a burst and,
    where rows know it, held for seconds."""
    kinds = {}
    for name, part in found.groupby("machine"):
        details = max(part["machine_details"], key=lambda one: one.get("device_bytes") or 0)
        runs: dict[str, dict[str, Any]] = {str(run): {} for run in sorted(part["run"].unique())}
        for peak in ("matrix_peak_tflops", "matrix_sustained_tflops"):
            values = part["machine_details"].str.get(peak).astype(float).round(1)
            for run, lo, hi in values.groupby(part["run"]).agg(["min", "max"]).itertuples():
                if not pd.isna(lo):
                    runs[run][peak] = [lo, hi]
                elif peak == "matrix_peak_tflops":
                    runs[run][peak] = None
        kinds[str(name)] = {
            "gpu": details["gpu"],
            "gpus_of_the_host": details.get("num_gpus") or 1,
            "device_gb": round(details["device_bytes"] / rows.GB, 1),
            "cpu": details.get("cpu"),
            "cores": details.get("num_cores"),
            "host_gb": round(details["host_bytes"] / rows.GB, 1),
            "runs": runs,
        }
    return {"kinds": kinds}


def write(path: Path, data: bytes) -> None:
    """Put `data` there in place of what was, whole or not at all, at whatever moment its writer is
    killed; OSError, which names the path, if that fails."""
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def write_changed(wanted: Mapping[Path, bytes], old: Iterable[Path] = ()) -> list[Path]:
    """Write what is not there yet or has other bytes; the paths that were written. Then remove
    those of `old` that nobody wants any more."""
    known = {path: path.read_bytes() for path in wanted if path.exists()}
    changed = [path for path, data in wanted.items() if known.get(path) != data]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, wanted[path])
    for path in set(old) - set(wanted):
        path.unlink()
    return changed
