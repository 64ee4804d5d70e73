"""Rows, from JSONL or from W&B -> one tidy frame, a line a measurement.

Columns are the row's own fields, what is derived from them, and every field of its config by its
dotted path (`system.depth`), None where the row has none. Invariant: nothing is invented and
nothing is edited. A null in a row is a null in the frame; what is derived is derived here; the
frame is the same whichever way its rows came. A run is what one boot of one machine measured for
one study; two runs stand side by side.
"""

import dataclasses
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from analysis import names
from sweeps import runfile
from sweeps.agreement import COMPARED_STEPS, compared, is_compiled, tolerance
from sweeps.identity import (
    FALLBACK,
    PLAIN,
    configuration,
    file_id,
    flat,
    in_force,
    products_of,
)
from sweeps.result import DISK_RATES, RETRIED, Row, host_split
from sweeps.rowfile import read_rows
from sweeps.runfile import Tagged

GB = 1e9
RUN = r"\d{4}-\d\d-\d\d_[a-z0-9-]+_\w+"
"""DATE_MACHINE_BOOT, the name of a run, which a file of the record bears."""
NUMBERS = "tokens_per_s device_gb host_gb final_loss max_loss_difference mfu tflops_6p cell_s "
NUMBERS += "joules_per_token sm_mhz heldout_loss exact_match predicted steady_tokens_per_s "
NUMBERS += "predicted_window disk_gb drive_gb_s"
"""Columns that are numbers even in a frame where none is known."""
TRAINING = "log.jsonl"
"""What `sweeps.train` writes, a line a step."""
ONLINE = re.compile(r"wandb:(?P<path>[^/@#]+/[^/@#]+)(@(?P<group>[^#]+))?(#(?P<tags>.+))?")
"""wandb:entity/project, then @group and #tag where only those runs are meant."""
END_S = 5.0
"""What W&B's service gets to end by itself after the program that asked it."""
VARIANTS = ("twinflow", "optimizer", "grad_op")
"""Words of a rival's preset that make another system of it; the others say how it was run."""


def frame(*sources: Path | str) -> pd.DataFrame:
    """The rows of all sources, oldest first; of a cell measured again in its run the last one, but
    none that another attempt may change where one was measured.

    source: a JSONL file; a folder that holds some, at any depth; a W&B run or a folder of them;
    `wandb:entity/project`, with @group and #tag to take those runs alone. A folder with both is
    read by its JSONL. Raises ValueError, one line, and OSError.
    """
    every, same = every_row(*sources), ["experiment", "run", "cell"]
    measured = every["status"].eq("ok").groupby([every[name] for name in same]).transform("any")
    standing = every[~(measured & every["status"].isin(RETRIED))]
    return standing.drop_duplicates(same, keep="last").reset_index(drop=True)


def every_row(*sources: Path | str) -> pd.DataFrame:
    """What `frame` gives, and the attempts that a later row of the same cell replaces."""
    online = [one for one in sources if isinstance(one, str) and one.startswith("wandb:")]
    folders = [Path(source) for source in sources if source not in online]
    files = dict.fromkeys(path for folder in folders for path in _files(folder))
    tagged = [
        Tagged(row, at, file_id(path), str(path))
        for path in files
        if path.suffix != ".wandb"
        for at, row in enumerate(read_rows(path))
    ]
    tagged += _offline([path for path in files if path.suffix == ".wandb"])
    tagged += [item for address in dict.fromkeys(online) for item in _online(address)]
    if not tagged:
        where = ", ".join(map(str, sources)) or "no path given"
        raise ValueError(f"{where}: no rows in it; run a bench first (make bench)")
    return _framed(tagged)


def _files(path: Path) -> list[Path]:
    """Files of rows in a folder, else those of W&B runs; a file is itself. The log of a training
    has none."""
    if path.is_file():
        return [path]
    lines = sorted(one for one in path.rglob("*.jsonl") if one.name != TRAINING)
    inside = lines or sorted(path.rglob("run-*.wandb"))
    if not inside:
        empty = "no *.jsonl and no W&B run in this folder"
        got = empty if path.exists() else "no such file or folder"
        allowed = "name a rows file, a folder of some, or wandb:entity/project"
        raise ValueError(f"{path}: {got}; run a bench first (make bench), or {allowed}")
    return inside


def _offline(files: list[Path]) -> list[Tagged]:
    """The rows of W&B runs on disk, synced or not; of several with one id the last that is whole.
    Raises ValueError, one line, for runs that lack a part: never a shorter curve."""
    with ThreadPoolExecutor() as pool:
        read = [(file.stem, pool.submit(runfile.read, file)) for file in files]
    whole = {stem: one.result() for stem, one in read if one.exception() is None}
    torn = [one.exception() for stem, one in read if stem not in whole]
    if torn:
        raise ValueError(f"{torn[0]}{f'; so are {len(torn) - 1} more' if torn[1:] else ''}")
    return list(whole.values())


def _online(source: str) -> list[Tagged]:
    """The rows of a project, by its whole history, never the sampled one. ValueError, one line."""
    match = ONLINE.fullmatch(source)
    if match is None:
        allowed = "allowed wandb:entity/project[@group][#tag]; see its address in W&B"
        raise ValueError(f"{source}: got no project, {allowed}")
    path, filters = match["path"], {name: match[name] for name in ("group", "tags") if match[name]}
    from wandb import Api, Error

    threading.Thread(target=_end_service, name="end-wandb", daemon=True).start()
    try:
        runs = Api().runs(path, filters=filters)
        found = [(run.id, run.config, list(run.scan_history())) for run in runs]
    except (Error, ValueError, OSError) as error:
        told = " ".join(str(error).split())
        remedy = "check name, `wandb login` and network, or load the JSONL or offline runs instead"
        raise ValueError(f"{source}: W&B said {told!r}; {remedy}") from None
    if not found:
        allowed = "allowed those that sweeps.upload has fed; check @group and #tag"
        raise ValueError(f"{source}: got no such runs, {allowed}")
    return [runfile.tagged(config, steps, f"wandb:{path}/{name}") for name, config, steps in found]


def _end_service() -> None:
    """Let this program end: the service of W&B 0.31 may wait for ever after a request it gave up.
    Where a run of the program's own is open, the service has that to end, and is left alone."""
    import wandb

    threading.main_thread().join()
    time.sleep(END_S)
    for child in psutil.Process().children() if wandb.run is None else ():
        if child.name().startswith("wandb-core"):
            child.kill()


def _framed(tagged: list[Tagged]) -> pd.DataFrame:
    """In order of start; in a file the place decides, whatever a clock that was set back says."""
    tagged = sorted(tagged, key=lambda item: item.position)
    together: dict[str, list[Row]] = defaultdict(list)
    for item in tagged:
        together[item.file].append(item.row)
    found = pd.DataFrame([_record(item, together[item.file]) for item in tagged])
    found = found.astype(dict.fromkeys(NUMBERS.split(), "float64"))
    started = found["started_at"].rank(method="dense").groupby(found["file"]).cummax()
    found = found.assign(started=started).sort_values(["started", "position", "cell"])
    found = found.drop(columns="started").reset_index(drop=True)
    place = found["boot"].fillna(found["file"])  # rows older than the boot: tHHMM, when it began
    first = found.groupby(["experiment", place])["started_at"].transform("min")
    boot = found["boot"].fillna("t" + first.str[11:13] + first.str[14:16])
    named = first.str[:10] + "_" + found["machine"] + "_" + boot
    filed = found["source"].map(lambda source: Path(source).stem)
    found["run"] = filed.where(filed.str.fullmatch(RUN), named)
    found["num_params"] = found.groupby("model_key")["num_params"].transform("first")
    configs = [dict(flat(in_force(config))) for config in found["config"]]
    paths = dict.fromkeys(path for one in configs for path in one if path not in found)
    settings = [{path: one.get(path) for path in paths} for one in configs]
    return found.join(pd.DataFrame(settings, index=found.index, dtype=object))


def _record(item: Tagged, together: Sequence[Row]) -> dict[str, Any]:
    """The row's own fields, then what is derived. How far its losses lie from the reference's
    stands as the row states it, but where it compared all steps of a long run; whether that agrees
    is today's tolerance."""
    row = item.row
    if row.config and (row.agrees is None or len(row.losses) > COMPARED_STEPS):
        row = compared(row, together, complete=True)
    elif row.max_loss_difference is not None:
        row = dataclasses.replace(row, agrees=row.max_loss_difference <= tolerance(row))
    own = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
    family, mode = family_and_mode(row)
    on_gpu = bool(row.machine.get("gpu"))
    peak = row.peak_host_bytes
    split = host_split(row.plan, peak, on_gpu=on_gpu, num_ranks=row.num_ranks)
    unseen = peak is not None and split.get("other", 0) < -peak  # more than twice was planned
    return own | {
        "file": item.file,
        "source": item.source,
        "position": item.position,
        "configuration": configuration(row.config) if row.config.get("measure") else row.cell,
        "system.preset": row.preset,
        "family": family,
        "mode": mode,
        "fallback": bool(row.config.get("system", {}).get(FALLBACK)),
        "plain": products_of(row.config) == PLAIN,
        "machine": machine_name(row.machine),
        "machine_details": row.machine,
        "boot": row.machine.get("boot"),
        "model_key": f"{row.model} {row.config.get('model', row.num_params)!r}",
        "size": row.model.removeprefix("qwen2.5-").upper(),
        "final_loss": row.losses[-1] if row.losses else None,
        "host_split": row.host_split or (split if row.status == "ok" else {}),
        "device_gb": row.peak_device_bytes and row.peak_device_bytes / GB,
        "host_gb": None if unseen else row.peak_host_bytes and row.peak_host_bytes / GB,
        "host_unseen": unseen,
        "disk_gb": sum(row.plan.get("disk", {}).values()) / GB or None,
        "drive_gb_s": _drive_rate(row.plan.get("rates", {})),
        "predicted": _predicted(row, "step_s"),
        "predicted_window": _predicted(row, "window_step_s"),
        "joules_per_token": row.power_w and row.tokens_per_s and row.power_w / row.tokens_per_s,
    }


def _drive_rate(rates: Mapping[str, float]) -> float | None:
    """GB that the drives, as probed, read and write in a second, both at once: the lower rate."""
    known = [rates[name] for name in DISK_RATES if rates.get(name)]
    return min(known, default=0.0) / GB or None


def _predicted(row: Row, of: str) -> float | None:
    """Tokens a second by a step's seconds in the row's plan; None without any."""
    seconds = row.plan.get(of)
    return row.batch_size * row.seq_len / seconds if seconds else None


def machine_name(machine: Mapping[str, Any]) -> str:
    """`h200-16c`: the GPU, how many if several, and the cores; `cpu-2c` without a GPU."""
    gpu = names.gpu(machine.get("gpu") or "cpu").lower().replace(" ", "-")
    count = machine.get("num_gpus") or 1
    return f"{gpu}{f'x{count}' if count > 1 else ''}-{machine.get('num_cores') or '?'}c"


def family_and_mode(row: Row) -> tuple[str, str]:
    """What a line is known by: (megatrain_fast, ''), (zero3, kept compiled). The engine's presets
    are families, and say themselves whether they compile; a rival's say how it was run."""
    preset = row.preset or ""
    compiled = "compiled" if is_compiled(row) else ""
    float8 = "" if products_of(row.config) == PLAIN else "float8"
    if row.system == "megatrain":
        says_so = preset.startswith(("fast", "tuned")) or preset[:1].isdigit()
        words = ["" if says_so else compiled, "" if float8 in preset else float8]
        return f"megatrain_{preset}".rstrip("_"), " ".join(filter(None, words))
    variant = next((name for name in VARIANTS if name in preset), "")
    rest = preset.replace(variant, "", 1).strip("_").split()  # a tuned twinflow is no tuned zero3
    words = [*rest, compiled, float8]
    return f"{row.system}_{variant}".rstrip("_"), " ".join(filter(None, words))
