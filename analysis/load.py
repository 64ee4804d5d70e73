"""Rows, from JSONL or from W&B -> one typed DataFrame, one row a cell.

Invariant: nothing is invented. A null in a row is a null in the frame; derived columns are computed here and nowhere else; the
frame is the same whichever way rows came, but for the column `source`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import machines, runs, stats
from analysis.cells import settings
from analysis.runs import Tagged
from analysis.style import name_of
from sweeps.identity import UNHASHED, configuration, file_id
from sweeps.result import Row, compared, host_split, is_compiled, read_rows

GROUP = ["experiment", "model", "size", "batch_size", "seq_len", "machine_name"]
"""What must be equal for two rows to be compared: a ratio never spans two machines, nor two sizes under one name."""

COLUMNS: dict[str, str] = {
    "experiment": "string",
    "cell": "string",
    "configuration": "string",
    "label": "string",
    "system": "string",
    "preset": "string",
    "model": "string",
    "num_params": "Int64",
    "size": "Int64",
    "batch_size": "Int64",
    "seq_len": "Int64",
    "num_micro_batches": "Int64",
    "status": "string",
    "reason": "string",
    "tokens_per_s": "Float64",
    "tokens_per_s_lo": "Float64",
    "tokens_per_s_hi": "Float64",
    "num_windows": "Int64",
    "step_s_median": "Float64",
    "tflops_6p": "Float64",
    "tflops_6p_causal": "Float64",
    "tflops_paper": "Float64",
    "mfu": "Float64",
    "mfu_datasheet": "Float64",
    "final_loss": "Float64",
    "heldout_loss": "Float64",
    "agrees": "boolean",
    "caveat": "string",
    "max_loss_difference": "Float64",
    "peak_device_bytes": "Int64",
    "peak_host_bytes": "Int64",
    "host_bytes_per_param": "Float64",
    "plan_device_bytes": "Int64",
    "plan_host_bytes": "Int64",
    "plan_step_s": "Float64",
    "machine_name": "string",
    "host": "string",
    "gpu": "string",
    "torch_version": "string",
    "deepspeed_version": "string",
    "allocator": "string",
    "git_commit": "string",
    "started_at": "string",
    "source": "string",
    "file": "string",
    "schema_version": "Int64",
    "bench_version": "Int64",
    "step_s": "object",
    "losses": "object",
    "dtypes": "object",
    "host_bytes": "object",
    "host_split": "object",
    "plan": "object",
    "counters": "object",
    "window_counters": "object",
    "machine": "object",
    "versions": "object",
    "config": "object",
}
"""Column -> pandas dtype. Bytes are integers; nullable dtypes throughout, lists and mappings as they were written."""

_UNTOLD = (*UNHASHED, "hydra", "machine", "measure")
"""Parts of a config that never distinguish two cells in a label, but for those in _TOLD."""
_TOLD = ("machine.device_bytes",)
COMPILES = re.compile(r"fast|tuned|\d")
"""How presets begin that compile, or that are the steps of a ladder."""


def load(*sources: Path | str) -> pd.DataFrame:
    """One frame of all rows in several sources, each as `frame` takes it; ValueError, in one line, for bad input."""
    found = list(dict.fromkeys(item for source in sources for item in _found(source)))
    tagged = [item for path in found if isinstance(path, Path) and path.suffix != ".wandb" for item in _read(path)]
    tagged += runs.offline([path for path in found if isinstance(path, Path) and path.suffix == ".wandb"])
    tagged += [item for address in found if isinstance(address, str) for item in runs.online(address)]
    if not tagged:
        raise ValueError(f"{', '.join(map(str, sources)) or 'no path given'}: no rows in it; run a bench first (make bench)")
    tagged = _in_order(_compared(tagged))
    return from_rows([i.row for i in tagged], sources=[i.source for i in tagged], files=[i.file for i in tagged])


def frame(source: Path | str) -> pd.DataFrame:
    """The rows of one source, by the time they were started, those of one file as they stand in it;
    ValueError, in one line, for bad input.

    source: a JSONL file; a folder that holds some, at any depth; an offline (or synced) run of W&B, or a folder of them;
    or `wandb:entity/project`, with @group and #tag to take those runs alone. A folder with both is read by its JSONL.
    """
    return load(source)


def from_rows(rows: Sequence[Row], sources: Sequence[str] | None = None, files: Sequence[str] | None = None) -> pd.DataFrame:
    """The typed frame of `rows`, in order. `sources` says where each came from, `files` which were in one JSONL file: two files are
    two runs, also when they come back from W&B."""
    origins = sources if sources is not None else [""] * len(rows)
    sizes = {_model(row): row.num_params for row in rows if row.num_params}
    records = [
        _record(row, origin) | {"size": sizes.get(_model(row)), "file": file}
        for row, origin, file in zip(rows, origins, files if files is not None else origins, strict=True)
    ]
    data = {column: pd.Series([record[column] for record in records], dtype=dtype) for column, dtype in COLUMNS.items()}
    frame = pd.DataFrame(data)
    frame["label"] = pd.Series(_labels(frame), dtype="string", index=frame.index)
    return frame


def _model(row: Row) -> tuple[str, str]:
    """What has one number of parameters, which a row that failed early does not state."""
    return row.model, repr(row.config.get("model", row.num_params))


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The last row of every cell on every kind of machine in each file: a resumed cell supersedes its failed attempt.

    Labels are made anew.
    """
    doubled = frame.duplicated(["experiment", "cell", "machine_name", "file"], keep="last")
    kept = frame[~doubled].reset_index(drop=True)
    kept["label"] = pd.Series(_labels(kept), dtype="string", index=kept.index)
    return kept


def by_file(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The latest rows of each JSONL file by itself, for no ratio spans two runs."""
    return [latest(rows) for _, rows in frame.groupby("file", sort=False)]


def groups(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The comparable parts of a frame (see GROUP), in order of first appearance."""
    parts = frame.groupby(GROUP, sort=False, dropna=False)
    return [part.reset_index(drop=True) for _, part in parts]


def _found(source: Path | str) -> Iterator[Path | str]:
    """Files of rows, files of runs, or the address of a project."""
    if isinstance(source, str) and source.startswith("wandb:"):
        yield source
        return
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl")) or runs.files_in(path)
        if not files:
            raise ValueError(
                f"{path}: no *.jsonl and no W&B run in this folder; run a bench first (make bench) or name a rows file"
            )
        yield from files
    elif path.is_file():
        yield path
    else:
        raise ValueError(
            f"{path}: no such file or folder; name a rows file (*.jsonl), a folder that holds some, a folder of W&B runs or "
            "wandb:entity/project"
        )


def _read(path: Path) -> list[Tagged]:
    try:
        return [Tagged(row, position, file_id(path), str(path)) for position, row in enumerate(read_rows(path))]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a JSONL file that sweeps.run wrote") from None


def _in_order(tagged: Iterable[Tagged]) -> list[Tagged]:
    """By start; but within a file the place decides, which no clock that is set back changes: a row starts no earlier than those
    before it."""
    latest: dict[str, str] = {}
    starts: list[tuple[str, int, str]] = []
    listed = sorted(tagged, key=lambda item: item.position)
    for item in listed:
        latest[item.file] = max(latest.get(item.file, ""), item.row.started_at)
        starts.append((latest[item.file], item.position, item.row.cell))
    return [item for _, item in sorted(zip(starts, listed, strict=True), key=lambda pair: pair[0])]


def _compared(tagged: Iterable[Tagged]) -> Iterator[Tagged]:
    """A row whose reference was measured after it (a resumed study) is compared now; what a row states itself stands."""
    files: dict[str, list[Tagged]] = {}
    for item in sorted(tagged, key=lambda item: item.position):
        files.setdefault(item.file, []).append(item)
    for together in files.values():
        rows = [item.row for item in together]
        for item in together:
            late = item.row.agrees is None and item.row.config
            yield item._replace(row=compared(item.row, rows, complete=True)) if late else item


def shown_preset(row: Row) -> str | None:
    """The row's preset, with `compiled` where the system was compiled and its preset does not say so by itself."""
    if not is_compiled(row) or COMPILES.match(row.preset or ""):
        return row.preset
    return f"{row.preset or ''} compiled".strip()


def _record(row: Row, source: str) -> dict[str, Any]:
    """One flat record: the row's own fields, then what is derived from them."""
    record: dict[str, Any] = {column: getattr(row, column) for column in COLUMNS if hasattr(row, column)}
    speed = stats.throughput(record["tokens_per_s"], row.step_s)
    host, params = row.peak_host_bytes, row.num_params
    gpu = row.machine.get("gpu")
    return record | {
        "configuration": configuration(row.config) if "measure" in row.config else row.cell,
        "preset": shown_preset(row),
        "label": name_of(row.system),
        "tokens_per_s_lo": speed.lo if speed else None,
        "tokens_per_s_hi": speed.hi if speed else None,
        "num_windows": len(row.step_s),
        "step_s_median": statistics.median(row.step_s) if row.step_s else None,
        "final_loss": row.losses[-1] if row.losses else None,
        "host_bytes_per_param": host / params if host is not None and params else None,
        **_planned(row, on_gpu=bool(gpu)),
        "host_split": row.host_split or (host_split(row.plan, host, on_gpu=bool(gpu)) if row.status == "ok" else {}),
        "plan_step_s": row.plan.get("step_s"),
        "machine_name": machines.name_of(row.machine),
        "host": machines.host_of(row.machine),
        "gpu": str(gpu) if gpu else None,
        "torch_version": row.versions.get("torch"),
        "deepspeed_version": row.versions.get("deepspeed"),
        "source": source,
    }


def _planned(row: Row, on_gpu: bool) -> dict[str, int | None]:
    """What was planned for the device and the host; without a GPU the host holds both shares."""
    device, host = _total(row.plan.get("device")), _total(row.plan.get("host"))
    if on_gpu or (device is None and host is None):
        return {"plan_device_bytes": device, "plan_host_bytes": host}
    return {"plan_device_bytes": None, "plan_host_bytes": (device or 0) + (host or 0)}


def _total(kinds: dict[str, int] | None) -> int | None:
    return sum(kinds.values()) if kinds else None


def _labels(frame: pd.DataFrame) -> list[str]:
    """The system's name, its preset, and as much of the config as tells apart the rows of one preset in one group.

    A preset stands for its settings: beside it, only what differs within it is told.
    """
    labels = [name_of(system) for system in frame["system"]]
    families: dict[tuple[Hashable, ...], list[int]] = {}
    for position, key in enumerate(frame[[*GROUP, "system", "preset"]].astype(object).itertuples(index=False, name=None)):
        families.setdefault(tuple(map(str, key)), []).append(position)
    configs, configurations = [dict(_told(config)) for config in frame["config"]], list(frame["configuration"])
    for family in families.values():
        differing = _differing([configs[position] for position in family])
        for position in family:
            preset, mine = frame["preset"].iloc[position], configs[position]
            told = [] if pd.isna(preset) else [str(preset)]
            told += [f"{key.rpartition('.')[2]}={mine[key]}" for key in differing if key in mine]
            labels[position] += f" {', '.join(told)}" if told else ""
        _number(labels, family, configurations)
    return labels


def _number(labels: list[str], family: Sequence[int], configurations: Sequence[str]) -> None:
    """Configurations that a label does not tell apart, for only their timing differs, are counted: `ZeRO-3`, `ZeRO-3 (2)`."""
    seen: dict[str, list[str]] = {}
    for position in family:
        alike = seen.setdefault(labels[position], [])
        if configurations[position] not in alike:
            alike.append(configurations[position])
        place = alike.index(configurations[position])
        labels[position] += f" ({place + 1})" if place else ""


def _differing(configs: Iterable[dict[str, Any]]) -> list[str]:
    together = list(configs)
    keys = dict.fromkeys(key for config in together for key in config)
    return [key for key in keys if len({repr(config.get(key)) for config in together}) > 1]


def _told(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What may stand in a label: not how long a constant schedule is, which the timing sets and nothing reads."""
    constant = config.get("recipe", {}).get("schedule") == "constant"
    for key, value in settings(config):
        told = key in _TOLD or key.split(".")[0] not in _UNTOLD
        if told and not (constant and key == "recipe.total_steps"):
            yield key, value
