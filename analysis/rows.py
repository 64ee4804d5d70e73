"""Rows, from JSONL or from W&B -> one tidy frame: one line a measurement, which everything else in this room starts from.

Invariant: nothing is invented and nothing is edited. A null in a row is a null in the frame; what is derived is derived here; the
frame is the same whichever way its rows came. A run is what one boot of one machine measured for one study: ratios are taken
within a run, and two runs stand side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import runs
from sweeps.identity import FALLBACK, configuration, file_id, flat, in_force
from sweeps.result import Row, compared, host_split, is_compiled, read_rows
from sweeps.runfile import Tagged

GB = 1e9
RUN = r"\d{4}-\d\d-\d\d_[a-z0-9-]+_\w+"
"""DATE_MACHINE_BOOT, the name of a run."""
NUMBERS = ("tokens_per_s", "device_gb", "host_gb", "final_loss", "max_loss_difference", "mfu", "tflops_6p", "cell_s")
"""Columns that are numbers whichever rows there are: of a frame in which none is known too."""
VARIANTS = ("twinflow", "optimizer", "grad_op")
"""First words of a rival's preset that make another system of it; the others say how it was run."""


def frame(*sources: Path | str) -> pd.DataFrame:
    """The rows of all sources, oldest first; a cell that was measured again in its run counts once, by its last row.

    source: a JSONL file; a folder that holds some, at any depth; a W&B run or a folder of them; `wandb:entity/project`, with
    @group and #tag to take those runs alone. A folder with both is read by its JSONL. Raises ValueError, one line.
    """
    return _latest(every_row(*sources))


def from_rows(given: Sequence[Row], file: str = "rows") -> pd.DataFrame:
    """The frame of rows at hand, as if they stood in one file."""
    return _latest(_framed([Tagged(row, number, file, f"{file}.jsonl") for number, row in enumerate(given)]))


def _latest(found: pd.DataFrame) -> pd.DataFrame:
    return found.drop_duplicates(["experiment", "run", "cell"], keep="last").reset_index(drop=True)


def every_row(*sources: Path | str) -> pd.DataFrame:
    """As `frame`, with the attempts that a later row of the same cell replaces."""
    tagged = _tagged(sources)
    if not tagged:
        raise ValueError(f"{', '.join(map(str, sources)) or 'no path given'}: no rows in it; run a bench first (make bench)")
    return _framed(tagged)


def _framed(tagged: list[Tagged]) -> pd.DataFrame:
    found = pd.DataFrame([_record(item) for item in _compared(tagged)])
    found = found.astype(dict.fromkeys(NUMBERS, "float64"))
    found["run"] = _run_names(found)
    found["num_params"] = found.groupby("model_key")["num_params"].transform("first")
    return found


def machine_name(machine: Mapping[str, Any]) -> str:
    """`h200-16c`: the GPU's model, how many the host has if several, and the CPU cores; `cpu-2c` without a GPU."""
    gpu = str(machine.get("gpu") or "cpu").split()[-1].lower()
    count = machine.get("num_gpus") or 1
    return f"{gpu}{f'x{count}' if count > 1 else ''}-{machine.get('num_cores') or '?'}c"


def _run_names(found: pd.DataFrame) -> pd.Series:
    """DATE_MACHINE_BOOT of every row; a file of the record bears the name of its run.

    Rows older than the boot are known by their file, and named by when it began (tHHMM).
    """
    place = found["boot"].fillna(found["file"])
    first = found.groupby(["experiment", place])["started_at"].transform("min")
    boot = found["boot"].fillna("t" + first.str[11:13] + first.str[14:16])
    filed = found["source"].map(lambda source: Path(source).stem)
    return filed.where(filed.str.fullmatch(RUN), first.str[:10] + "_" + found["machine"] + "_" + boot)


def settings(found: pd.DataFrame, *paths: str) -> pd.DataFrame:
    """Columns of the rows' configs by dotted path (system.depth); null where a row has none."""
    flats = [dict(flat(in_force(config))) for config in found["config"]]
    wanted = paths or tuple(dict.fromkeys(key for one in flats for key in one))
    return pd.DataFrame([[one.get(path) for path in wanted] for one in flats], columns=list(wanted), index=found.index)


def _tagged(sources: Iterable[Path | str]) -> list[Tagged]:
    paths = list(dict.fromkeys(item for source in sources for item in _found(source)))
    files = [path for path in paths if isinstance(path, Path)]
    found = [item for path in files if path.suffix != ".wandb" for item in _read(path)]
    found += runs.offline([path for path in files if path.suffix == ".wandb"])
    return found + [item for path in paths if isinstance(path, str) for item in runs.online(path)]


def _found(source: Path | str) -> Iterator[Path | str]:
    """Files of rows, files of W&B runs, or the address of a project."""
    if isinstance(source, str) and source.startswith("wandb:"):
        yield source
        return
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl")) or runs.files_in(path)
        if not files:
            raise ValueError(f"{path}: no *.jsonl and no W&B run in this folder; run a bench first (make bench)")
        yield from files
    elif path.is_file():
        yield path
    else:
        raise ValueError(f"{path}: no such file or folder; name a rows file, a folder of some, or wandb:entity/project")


def _read(path: Path) -> list[Tagged]:
    try:
        return [Tagged(row, number, file_id(path), str(path)) for number, row in enumerate(read_rows(path))]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a JSONL file that sweeps.run wrote") from None


def _compared(tagged: list[Tagged]) -> list[Tagged]:
    """In order, each row held against its reference; what a row states itself stands."""
    ordered = _in_order(tagged)
    together: dict[str, list[Row]] = {}
    for item in sorted(tagged, key=lambda item: item.position):
        together.setdefault(item.file, []).append(item.row)
    late = [item.row.agrees is None and bool(item.row.config) for item in ordered]
    return [
        item._replace(row=compared(item.row, together[item.file], complete=True)) if again else item
        for item, again in zip(ordered, late, strict=True)
    ]


def _in_order(tagged: list[Tagged]) -> list[Tagged]:
    """By start; but within a file the place decides, whatever a clock that was set back says."""
    latest: dict[str, str] = {}
    starts = []
    listed = sorted(tagged, key=lambda item: item.position)
    for item in listed:
        latest[item.file] = max(latest.get(item.file, ""), item.row.started_at)
        starts.append((latest[item.file], item.position, item.row.cell))
    return [item for _, item in sorted(zip(starts, listed, strict=True), key=lambda pair: pair[0])]


def _record(item: Tagged) -> dict[str, Any]:
    """The row's own fields, then what is derived from them."""
    row = item.row
    own = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
    own["tokens_per_s"] = None if row.tokens_per_s is None else float(row.tokens_per_s)
    measure = row.config.get("measure", {})
    return own | {
        "file": item.file,
        "source": item.source,
        "configuration": configuration(row.config) if measure else row.cell,
        "position": item.position,
        **dict(zip(("family", "mode"), family_and_mode(row), strict=True)),
        "repeat": int(measure.get("repeat", 1)),
        "fallback": bool(row.config.get("system", {}).get(FALLBACK)),
        "machine": machine_name(row.machine),
        "machine_details": row.machine,
        "boot": row.machine.get("boot"),
        "model_key": f"{row.model} {row.config.get('model', row.num_params)!r}",
        "final_loss": row.losses[-1] if row.losses else None,
        "host_split": row.host_split or (_split(row) if row.status == "ok" else {}),
        "device_gb": row.peak_device_bytes and row.peak_device_bytes / GB,
        "host_gb": row.peak_host_bytes and row.peak_host_bytes / GB,
    }


def _split(row: Row) -> dict[str, int]:
    return host_split(row.plan, row.peak_host_bytes, on_gpu=bool(row.machine.get("gpu")))


def family_and_mode(row: Row) -> tuple[str, str]:
    """What a line is known by: (megatrain_fast, ''), (zero3, kept compiled), (zero3_twinflow, compiled).

    The engine's presets are families, and say themselves whether they compile; a rival's say how it was run.
    """
    preset = row.preset or ""
    if row.system == "megatrain":
        says_so = preset.startswith(("fast", "tuned")) or preset[:1].isdigit()
        return f"megatrain_{preset}".rstrip("_"), "compiled" if is_compiled(row) and not says_so else ""
    variant = next((name for name in VARIANTS if preset.startswith(name)), "")
    words = [preset.removeprefix(variant).strip("_ "), "compiled" if is_compiled(row) else ""]
    return f"{row.system}_{variant}".rstrip("_"), " ".join(filter(None, words))
