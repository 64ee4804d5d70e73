"""The way of one cell: its process, its row, the file, the mirror. Read `run_cell` from top to end.

Invariant: a cell that has its number is never run again, one that was killed is; whatever a cell
does, exactly one row follows, unless the command's time limit stopped it; a configuration that is
refused leaves no file behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sweeps import again, ceilings, environment, lock, ranks
from sweeps.agreement import compared
from sweeps.bench import remove_state
from sweeps.cell import state_folder
from sweeps.config import Cell
from sweeps.identity import PLAIN, drives_of, hashed, products_of, published, relabelled
from sweeps.isolate import Event, Outcome, run_isolated
from sweeps.memory import Crowd, DeviceSampler, device_sampler
from sweeps.places import named
from sweeps.result import DISK_RATES, Row, host_split
from sweeps.rows import Rows, room_for_row
from sweeps.sinks import Console, mirror
from sweeps.upload import offline_run

PROBED = ("pinned", "num_threads", "omp_num_threads", "huge_pages", "numactl", "torch_adamw")
"""Options of the engine that a probe of the machine's rates depends on."""
PEAKS = {
    "mfu": "matrix_peak_tflops",
    "mfu_sustained": "matrix_sustained_tflops",
    "mfu_datasheet": "datasheet_tflops",
}
"""Field of a row -> that of the machine whose share it is, TFLOPS of one GPU."""


class TimeIsUpError(Exception):
    """The command's time limit ended a cell, which has no row."""


def run_cell(
    cell: Cell, label: str, rows: Rows, deadline: float = math.inf, refused: Outcome | None = None
) -> Row:
    """The cell's row: the one that stands, or a new one from a process of its own.

    Studies that share an output folder share cells: what one of them has measured is written again
    with the other's label. Another process that measures the cell is waited for, for two at once
    would disturb each other. deadline: on time.monotonic's clock; TimeIsUpError, without a row,
    where the cell has not ended by then. refused: what is known of a cell without room, which then
    needs no process. ValueError for an invalid config.
    """
    known = rows.standing(cell)
    if known is not None and rows.is_labelled(known, cell) and _is_mirrored(known, cell):
        return _skipped(known, cell, label)

    def waiting(holder: str) -> None:
        print(
            f"{label} {cell.system}: {cell.hash} is "
            f"being measured by {holder}; waiting for its row",
            flush=True,
        )

    try:
        with lock.held(cell.output_dir / f".{cell.identity}.lock", deadline, waiting):
            if (known := rows.standing(cell)) is not None:  # another process measured it meanwhile
                return _taken(_skipped(known, cell, label), cell, rows)
            return _measured(cell, label, rows, deadline, refused)
    except lock.LockTimeoutError:
        raise TimeIsUpError from None
    except ValueError:
        tidy(cell.output_dir)
        raise


def _skipped(known: Row, cell: Cell, label: str) -> Row:
    """Say why the cell is not measured."""
    speed = f"{known.tokens_per_s:,.0f} tokens/s" if known.tokens_per_s else known.reason
    digits, dash, dirty = (known.git_commit or "no commit").partition("-")
    found = f"{speed}; {known.started_at}, {digits[:12] + dash + dirty}"
    print(
        f"{label} {cell.system}: skipped, {cell.hash} is already {known.status} ({found})",
        flush=True,
    )
    return known


def _is_mirrored(known: Row, cell: Cell) -> bool:
    logging = cell.logging
    if logging.wandb != "offline":
        return True
    return offline_run(known, cell.output_dir, logging.project) is not None


def _taken(known: Row, cell: Cell, rows: Rows) -> Row:
    """A row that stands, under the name of this study, and mirrored.

    A row of another study or preset in the same folder is written as the cell's; when and how it
    was measured stays in it. A row whose writer was stopped before the mirror had it is mirrored
    now.
    """
    if rows.is_labelled(known, cell):
        if not _is_mirrored(known, cell):
            mirror(known, cell.rows_path, cell.logging)
        return known
    taken = dataclasses.replace(
        known,
        experiment=cell.experiment,
        cell=cell.hash,
        preset=cell.options.get("preset"),
        config=relabelled(known.config, cell.config),
    )
    rows.append(cell.rows_path, taken)
    mirror(taken, cell.rows_path, cell.logging)
    print(f"  taken from the study {known.experiment}", flush=True)
    return taken


def _measured(cell: Cell, label: str, rows: Rows, deadline: float, refused: Outcome | None) -> Row:
    """Room for the row, the cell's process, its row, the comparison, the file, the mirror."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    commit = environment.git_commit()
    console = Console(label, cell)
    with contextlib.closing(console):
        with room_for_row(cell):
            console.start()
            if refused is not None:
                outcome, machine = refused, environment.machine(cell.machine, None)
            else:
                outcome, machine = _run(cell, rows, console.event, deadline)
            row = row_of(cell, outcome, started_at=started_at, machine=machine)
            row = dataclasses.replace(row, git_commit=_throughout(commit, row.git_commit))
            # A damaged file costs no measurement; analysis compares the row later.
            with contextlib.suppress(ValueError, OSError):
                row = compared(row, rows.of(cell))
        rows.append(cell.rows_path, row)
        mirror(row, cell.rows_path, cell.logging)
        console.row(row)
    return row


def _throughout(began: str | None, ended: str | None) -> str | None:
    """The commit that a cell began with, `-dirty` where the checkout was another when it ended."""
    return began if began == ended or not began else f"{began.removesuffix('-dirty')}-dirty"


def _run(
    cell: Cell, rows: Rows, on_event: Callable[[Event], None], deadline: float
) -> tuple[Outcome, dict[str, Any]]:
    """What became of the cell in a process of its own, of the state that it saved in another, and
    the machine that they ran on."""
    log = cell.output_dir / "logs" / f"{cell.system}-{cell.hash}.log"
    device = device_sampler(cell.machine.device, cell.process.num_gpus)
    if (crowd := device.crowd()) is not None:
        print(f"  machine.device: {crowd}", flush=True)
    peaks = ceilings.cached_peaks(cell.output_dir, cell.machine.device)
    rates, left_s = known_rates(cell, rows), deadline - time.monotonic()
    start = partial(_isolated, cell, device, deadline)
    try:
        beside = {"rates": rates} if rates else {}
        outcome = start("sweeps.cell", log, on_event, **beside)
        if outcome.timed_out and left_s < cell.process.timeout_s:
            _require_all_measured(cell, outcome)
        if cell.measure.save and outcome.status == "ok":
            resumed = partial(start, log=log.with_suffix(".resumed.log"))
            again.hold_against(outcome, resumed, deadline)
    except ValueError:
        log.unlink(missing_ok=True)
        raise
    finally:
        remove_state(state_folder(cell))
    if crowd is None and outcome.status == "oom_device":  # somebody may have come later
        crowd = device.crowd()
    _blame(outcome, crowd)
    return outcome, environment.machine(cell.machine, peaks)


def _isolated(
    cell: Cell,
    device: DeviceSampler,
    deadline: float,
    module: str,
    log: Path,
    on_event: Callable[[Event], None],
    **beside: Any,
) -> Outcome:
    """Run a module on the cell's ranks, with its config and what is beside it."""
    timeout_s = min(deadline - time.monotonic(), cell.process.timeout_s)
    with ranks.started(cell.process.num_ranks, timeout_s, module) as (runs, variables):
        return run_isolated(
            runs,
            {**cell.config, **beside},
            log=log,
            timeout_s=timeout_s,
            device=device,
            on_event=on_event,
            env=variables | environment.cell_variables(cell.process),
            wrapper=cell.process.wrapper,
            num_ranks=cell.process.num_ranks,
        )


def _require_all_measured(cell: Cell, outcome: Outcome) -> None:
    """TimeIsUpError, unless the cell had all that was asked and was giving its memory back."""
    measure = cell.measure
    if outcome.status != "ok" or measure.heldout_tokens or measure.exact_match or measure.trace:
        raise TimeIsUpError
    outcome.reason, outcome.cell_s = "", None


def _blame(outcome: Outcome, crowd: Crowd | None) -> None:
    """Say in the outcome that others had a part of the device."""
    if crowd is not None:
        outcome.crowd_device_bytes = crowd.num_bytes
        outcome.reason = "; ".join(filter(None, (outcome.reason, str(crowd))))


def known_rates(cell: Cell, rows: Rows) -> dict[str, float] | None:
    """What an earlier cell of the folder probed here at this commit, in the same way, on as many
    cores.

    Probes of one machine differ, and the placements that follow from them; but the cells of a
    study are to differ in what it varies. None for other systems.
    """
    machine, commit = environment.machine(cell.machine, None), environment.git_commit()
    if cell.system != "megatrain" or machine["boot"] is None:
        return None
    for row in rows.of(cell):
        alike = all(row.machine.get(name) == machine[name] for name in ("boot", "num_cores"))
        alike = alike and (row.num_ranks > 1) == (cell.process.num_ranks > 1)
        mine = alike and (row.system, row.git_commit) == (cell.system, commit)
        if (
            mine
            and row.config
            and "rates" in row.plan
            and _probing(row.config) == _probing(cell.config)
            and (cell.process.num_ranks == 1 or row.plan["rates"].get("peer_bytes"))
            and (not cell.options.get("disk_blocks") or all(map(row.plan["rates"].get, DISK_RATES)))
        ):
            return dict(row.plan["rates"])
    return None


def _probing(config: Mapping[str, Any]) -> list[Any]:
    """What a probe depends on: options, of which a row that is older has none, the drives, and what
    makes a layer of the model, for AdamW is probed on a block as large."""
    known = hashed(config)
    options = [known["system"].get(name) or None for name in PROBED]
    shape = known["model"].get("config") or {}
    layer = {name: value for name, value in shape.items() if name != "num_hidden_layers"}
    return [*options, drives_of(config), known["model"].get("model_type"), layer]


def row_of(cell: Cell, outcome: Outcome, *, started_at: str, machine: dict[str, Any]) -> Row:
    """What the cell and its watcher said, in one row. No speed unless every window was measured."""
    plan, preset = outcome.last("plan"), cell.options.get("preset")
    return Row(
        experiment=cell.experiment,
        cell=cell.hash,
        system=cell.system,
        model=cell.model.name,
        batch_size=cell.shape.batch_size,
        seq_len=cell.shape.seq_len,
        num_micro_batches=cell.shape.num_micro_batches,
        num_ranks=cell.process.num_ranks,
        status=outcome.status,
        preset=None if preset is None else str(preset),
        num_params=plan.get("num_params"),
        dtypes=dict(plan.get("dtypes", {})),
        caveat=named(plan["caveat"], cell) if plan.get("caveat") else None,
        plan=plan.get("plan", {}) | outcome.last("predicted").get("prediction", {}),
        **_timed(cell, outcome, machine),
        **_memory(cell, outcome),
        **dataclasses.asdict(outcome.pace),
        machine=machine,
        versions=environment.versions(),
        allocator=environment.allocator(),
        git_commit=environment.git_commit(),
        started_at=started_at,
        cell_s=outcome.cell_s,
        config=published(cell.config),
    )


def _timed(cell: Cell, outcome: Outcome, machine: Mapping[str, Any]) -> dict[str, Any]:
    """A row's speed, losses, evaluations and counters, and what is to be known of them."""
    measured = outcome.status == "ok"
    read = outcome.all("losses")
    windows = [event for event in read if event["seconds"] is not None]
    mine = windows if measured else []
    tokens_per_s = _tokens_per_s(windows) if measured else None
    tflops = _tflops(outcome.last("plan").get("flops_per_token", {}), tokens_per_s)
    reasons = (
        _stopped(cell, len(windows)) if measured else "",
        outcome.last("not_evaluated").get("reason"),
        outcome.reason,
    )
    asked = outcome.last("exact_match") if measured else {}
    return {
        "reason": named("; ".join(filter(None, reasons)), cell),
        "tokens_per_s": tokens_per_s,
        "step_s": [item["seconds"] / cell.measure.steps_per_window for item in mine],
        "steady_tokens_per_s": _steady(windows) if measured else None,
        "tflops_6p": tflops.get("6p"),
        "tflops_6p_causal": tflops.get("6p_causal"),
        "tflops_paper": tflops.get("paper"),
        **_utilisation(cell, tflops.get("6p"), machine),
        "losses": [loss for event in read for loss in event["losses"]],
        "gradient_norms": [norm for event in read for norm in event.get("gradient_norms") or []],
        "heldout_loss": outcome.last("heldout").get("loss") if measured else None,
        "exact_match": asked.get("share"),
        "num_questions": asked.get("num_questions"),
        "heldout": _all_but_name(outcome, "evaluated"),
        "counters": dict(outcome.last("done").get("counters", {})) | outcome.resumed,
        "window_counters": [dict(item.get("counters", {})) for item in mine],
    }


def _memory(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    """A row's bytes on device and host, as each observer saw them."""
    done, peak, num = outcome.last("done"), outcome.peak_host_bytes, cell.process.num_ranks
    seen = {name: done.get(f"{name}_bytes") for name in ("allocated", "reserved")}
    seen["nvml"] = outcome.peak_device_nvml_bytes
    split = host_split(
        outcome.last("plan").get("plan", {}),
        peak,
        on_gpu=cell.machine.device == "cuda",
        num_ranks=num,
    )
    return {
        "peak_device_bytes": seen["allocated"],
        "device_bytes": {kind: value for kind, value in seen.items() if value is not None},
        "all_device_bytes": done.get("all_allocated_bytes") if num > 1 else None,
        "crowd_device_bytes": outcome.crowd_device_bytes,
        "peak_host_bytes": peak,
        "rank_host_bytes": outcome.peak_rank_host_bytes,
        "host_bytes": outcome.peak_host,
        "host_split": split if outcome.status == "ok" else {},
    }


def _all_but_name(outcome: Outcome, name: str) -> list[dict[str, Any]]:
    """The fields of every event of that name, in order."""
    return [{key: one[key] for key in one if key != "event"} for one in outcome.all(name)]


def _tokens_per_s(windows: list[Event]) -> float:
    seconds: float = sum(item["seconds"] for item in windows)
    return float(sum(item["num_tokens"] for item in windows) / seconds)


def _steady(windows: list[Event]) -> float | None:
    known = [item for item in windows if item.get("steady_s")]
    tokens = float(sum(item["steady_tokens"] for item in known))
    return tokens / sum(item["steady_s"] for item in known) if known else None


def _tflops(flops_per_token: Mapping[str, float | None], speed: float | None) -> dict[str, float]:
    """By convention; nothing where the speed is unknown, no entry where a convention is not."""
    known = {name: flops for name, flops in flops_per_token.items() if flops is not None}
    return {} if speed is None else {name: flops * speed / 1e12 for name, flops in known.items()}


def _utilisation(cell: Cell, tflops: float | None, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The row's shares of the peaks of its GPUs, which are bfloat16's: float8 has none."""
    known = tflops if products_of(cell.config) == PLAIN else None
    num_gpus, found = cell.process.num_gpus, dict[str, Any]()
    for name, peak in PEAKS.items():
        of_one = machine.get(peak)
        found[name] = known / (of_one * num_gpus) if known and of_one else None
    return found


def _stopped(cell: Cell, num_windows: int) -> str:
    measure = cell.measure
    if num_windows == measure.windows:
        return ""
    after = f"stopped after {num_windows} of {measure.windows} windows"
    return f"{after}: slower than {measure.stop_below:,.0f} tokens/s"


def tidy(output_dir: Path) -> None:
    """Remove what was made for a study that was refused; a folder with rows in it is left alone."""
    if (output_dir / "rows.jsonl").exists():
        return
    (output_dir / ".hydra" / "multirun.yaml").unlink(missing_ok=True)
    for folder in (output_dir / ".hydra", output_dir / "logs", output_dir):
        with contextlib.suppress(OSError):  # not empty, or never made
            folder.rmdir()
