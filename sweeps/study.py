"""A study: its cells one by one, each to a row, and the report at the end.

Invariant: a cell that has its number is never run again, one that was killed is; whatever a cell does, exactly one
row follows, unless the command's time limit stopped it; a configuration that is refused leaves no file behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sweeps import auto, ceilings, environment, lock
from sweeps.check import SURVEY_S, survey
from sweeps.config import Cell, Machine, cell_from
from sweeps.data import batches, corpus_of
from sweeps.identity import hashed, published, relabelled
from sweeps.isolate import Event, Outcome, run_isolated
from sweeps.memory import device_sampler
from sweeps.places import named
from sweeps.result import BENCH_VERSION, Row, compared, host_split, read_rows
from sweeps.sinks import ConsoleSink, JsonlSink, Sink, wandb_sink
from sweeps.upload import offline_run

RETRIED = ("error", "timeout", "oom_host", "unsupported", "wont_fit")
"""Statuses that another run may change: installing, freeing memory, raising a limit. The others stand, oom_device unless others
had a part of the device."""
PROBED = ("pinned", "num_threads", "omp_num_threads", "huge_pages", "numactl", "torch_adamw")
"""Options of the engine that a probe of the machine's rates depends on."""
REFUSED: dict[str, Outcome] = {}
"""By hash, the cells of this command that `check` found no room for."""


class TimeIsUpError(Exception):
    """The command's time limit ended a cell, which has no row."""


def compose_cell(cfg: DictConfig) -> Cell:
    """The validated cell of a composed config, the text's digest filled in. Raises ValueError, one line."""
    plain = auto.resolve(cfg)
    cell = cell_from(plain)
    corpus = corpus_of(cell.data)
    batches(corpus, cell.shape, cell.seed)  # lazy: refuses a text too short for the shape, makes no batch
    plain["data"]["digest"] = corpus.digest
    return cell_from(plain)


def check(cells: Sequence[Cell], left_s: float = math.inf) -> dict[str, float]:
    """Predicted seconds a step of the cells of a sweep that are not measured yet, by hash, as far as they are known.

    ValueError, one line, for a cell that its system would refuse; a cell alone says so itself at once. Cells without room are
    found by the way, and cost no process later. left_s: seconds that the look may take at most.
    """
    new = [cell for cell in cells if not stands(cell)]
    if len(cells) < 2 or not new:
        return {}
    found = survey(new, min(left_s, SURVEY_S))
    REFUSED.update(found.refused)
    return found.step_s


def rows_of(path: Path) -> list[Row]:
    """Rows so far; none where there is no file yet."""
    return read_rows(path) if path.exists() else []


def latest(cell: Cell) -> Row | None:
    """The last row of a cell on this kind of machine."""
    return next((row for row in reversed(rows_of(cell.rows_path)) if row.identity == cell.identity and _of_here(row, cell)), None)


def comparable(row: Row, cell: Cell) -> bool:
    """Whether the row's speed says something of the cell's: measured by this bench, on this kind of machine."""
    return row.bench_version == BENCH_VERSION and _of_here(row, cell)


def _of_here(row: Row, cell: Cell) -> bool:
    return not row.machine or environment.kind(row.machine) == _here(cell.machine.device)


@lru_cache(maxsize=2)
def _here(device: str) -> str:
    return environment.kind(environment.machine(Machine(device=device), None))


def stands(cell: Cell) -> bool:
    """Whether the cell has a row that another run would not change."""
    row = latest(cell)
    if row is None or row.bench_version != BENCH_VERSION or row.status in RETRIED:
        return False
    return row.status != "oom_device" or not row.crowd_device_bytes


def run_cell(cell: Cell, label: str, deadline: float = math.inf) -> Row:
    """The cell's row: the one it already has, or a new one from a fresh process. ValueError for an invalid config.

    deadline: on time.monotonic's clock; TimeIsUpError, without a row, where the cell has not ended by then.
    Studies that share an output folder share cells: what one of them has measured is written again with the other's label.
    Another process that measures the cell is waited for: two at once would disturb each other.
    """
    known = latest(cell)
    if known is not None and stands(cell) and _labelled(known, cell) and not _unmirrored(known, cell):
        _say_skipped(known, cell, label)
        return known

    def waiting(holder: str) -> None:
        print(f"{label} {cell.system}: {cell.hash} is being measured by {holder}; waiting for its row", flush=True)

    try:
        with lock.held(cell.output_dir / f".{cell.identity}.lock", deadline, waiting):
            return _run_locked(cell, label, deadline)
    except lock.LockTimeoutError:
        raise TimeIsUpError from None
    except ValueError:
        tidy(cell.output_dir)
        raise


def _run_locked(cell: Cell, label: str, deadline: float) -> Row:
    """`run_cell` in the one process that measures the cell; what another one measured before it stands."""
    known = latest(cell)
    if known is not None and stands(cell):
        _say_skipped(known, cell, label)
        if not _labelled(known, cell):
            return _relabelled(known, cell)
        if _unmirrored(known, cell):
            _mirror(cell).row(known)  # who wrote it was stopped before that
        return known
    sinks: list[Sink] = [*_records(cell), ConsoleSink(label)]
    log = cell.output_dir / "logs" / f"{cell.system}-{cell.hash}.log"
    try:
        try:
            row = _measure(cell, log, sinks, deadline)
        except ValueError:
            log.unlink(missing_ok=True)
            raise
        for sink in sinks:
            sink.row(row)
    finally:
        for sink in sinks:
            sink.close()
    return row


def _say_skipped(known: Row, cell: Cell, label: str) -> None:
    speed = f"{known.tokens_per_s:,.0f} tokens/s" if known.tokens_per_s else known.reason
    digits, dash, dirty = (known.git_commit or "no commit").partition("-")
    told = f"{speed}; {known.started_at}, {digits[:12] + dash + dirty}"
    print(f"{label} {cell.system}: skipped, {cell.hash} is already {known.status} ({told})", flush=True)


def _unmirrored(known: Row, cell: Cell) -> bool:
    logging = cell.logging
    return logging.wandb == "offline" and offline_run(known, cell.output_dir, logging.project) is None


def _records(cell: Cell) -> list[Sink]:
    return [JsonlSink(cell.rows_path), _mirror(cell)]


def _mirror(cell: Cell) -> Sink:
    return wandb_sink(cell.rows_path, cell.logging.wandb, cell.logging.project)


def _labelled(row: Row, cell: Cell) -> bool:
    """Whether this measurement is there under the name of the cell's own study."""
    mine = [one for one in rows_of(cell.rows_path) if one.cell == cell.hash and one.experiment == cell.experiment]
    return any(one.started_at == row.started_at and one.machine == row.machine for one in mine)


def _relabelled(row: Row, cell: Cell) -> Row:
    """`row`, of another study or preset in the same folder, written as the cell's; when and how it was measured stays in it."""
    config, preset = relabelled(row.config, cell.config), cell.options.get("preset")
    taken = dataclasses.replace(row, experiment=cell.experiment, cell=cell.hash, preset=preset, config=config)
    for sink in _records(cell):
        sink.row(taken)
        sink.close()
    print(f"  taken from the study {row.experiment}", flush=True)
    return taken


def _measure(cell: Cell, log: Path, sinks: Sequence[Sink], deadline: float) -> Row:
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    for sink in sinks:
        sink.start(cell)
    if cell.hash in REFUSED:
        return row_of(cell, REFUSED[cell.hash], started_at=started_at, machine=environment.machine(cell.machine, None))
    device = device_sampler(cell.machine.device)
    crowd = device.crowd()
    if crowd is not None:
        print(f"  machine.device: {crowd}", flush=True)
    peaks = ceilings.cached_peaks(cell.output_dir, cell.machine.device)

    rates, left_s = known_rates(cell), deadline - time.monotonic()

    def tell(event: Event) -> None:
        for sink in sinks:
            sink.event(event)

    outcome = run_isolated(
        "sweeps.cell",
        {**cell.config, **({"rates": rates} if rates else {})},
        log=log,
        timeout_s=min(left_s, cell.process.timeout_s),
        device=device,
        on_event=tell,
        env=environment.cell_variables(cell.process),
        starter=cell.process.starter,
    )
    if outcome.timed_out and left_s < cell.process.timeout_s:
        if outcome.status != "ok" or cell.measure.heldout_tokens or cell.measure.trace:
            raise TimeIsUpError
        outcome.reason, outcome.cell_s = "", None  # it had all that was asked, and was giving its memory back
    if crowd is None and outcome.status == "oom_device":  # somebody may have come later
        crowd = device.crowd()
    if crowd is not None:
        outcome.crowd_device_bytes = crowd.num_bytes
        outcome.reason = "; ".join(filter(None, (outcome.reason, str(crowd))))
    row = row_of(cell, outcome, started_at=started_at, machine=environment.machine(cell.machine, peaks))
    try:
        return compared(row, rows_of(cell.rows_path))
    except (ValueError, OSError):  # a file that was damaged meanwhile costs no measurement; analysis compares the row later
        return row


def known_rates(cell: Cell) -> dict[str, float] | None:
    """What an earlier cell in this folder probed on this machine, in the same way and at the same commit; None for other systems.

    Probes of one machine differ, and the placements that follow from them: cells of a study are to differ in what it varies.
    """
    here, commit = environment.boot(), environment.git_commit()
    if cell.system != "megatrain" or here is None:
        return None
    for row in rows_of(cell.rows_path):
        mine = (row.system, row.machine.get("boot"), row.git_commit) == (cell.system, here, commit)
        if mine and row.config and "rates" in row.plan and _probing(row.config) == _probing(cell.config):
            return dict(row.plan["rates"])
    return None


def _probing(config: Mapping[str, Any]) -> list[Any]:
    """The options that a probe depends on; a row of before one of them existed has none, which is false."""
    return [hashed(config)["system"].get(name) or None for name in PROBED]


def row_of(cell: Cell, outcome: Outcome, *, started_at: str, machine: dict[str, Any]) -> Row:
    """What the cell and its watcher said, in one row. Speeds stay empty unless every window was measured."""
    plan, predicted, done = outcome.last("plan"), outcome.last("predicted"), outcome.last("done")
    read = [event for event in outcome.events if event["event"] == "losses"]
    windows = [event for event in read if event["seconds"] is not None]
    measured, on_gpu = outcome.status == "ok", cell.machine.device == "cuda"
    tokens_per_s = sum(item["num_tokens"] for item in windows) / sum(item["seconds"] for item in windows) if measured else None
    tflops = {
        name: flops * tokens_per_s / 1e12
        for name, flops in plan.get("flops_per_token", {}).items()
        if flops is not None and tokens_per_s is not None
    }
    memory = {name: done.get(f"{name}_bytes") for name in ("allocated", "reserved")} | {"nvml": outcome.peak_device_nvml_bytes}
    return Row(
        experiment=cell.experiment,
        cell=cell.hash,
        system=cell.system,
        model=cell.model.name,
        batch_size=cell.shape.batch_size,
        seq_len=cell.shape.seq_len,
        num_micro_batches=cell.shape.num_micro_batches,
        status=outcome.status,
        reason=named("; ".join(filter(None, (_stopped(cell, len(windows), measured), outcome.reason))), cell),
        preset=None if cell.options.get("preset") is None else str(cell.options["preset"]),
        num_params=plan.get("num_params"),
        tokens_per_s=tokens_per_s,
        step_s=[item["seconds"] / cell.measure.steps_per_window for item in windows] if measured else [],
        tflops_6p=tflops.get("6p"),
        tflops_6p_causal=tflops.get("6p_causal"),
        tflops_paper=tflops.get("paper"),
        mfu=_share(tflops.get("6p"), machine.get("matrix_peak_tflops")),
        mfu_sustained=_share(tflops.get("6p"), machine.get("matrix_sustained_tflops")),
        mfu_datasheet=_share(tflops.get("6p"), machine.get("datasheet_tflops")),
        losses=[loss for event in read for loss in event["losses"]],
        heldout_loss=outcome.last("heldout").get("loss") if measured else None,
        dtypes=dict(plan.get("dtypes", {})),
        caveat=named(plan["caveat"], cell) if plan.get("caveat") else None,
        peak_device_bytes=memory["allocated"],
        device_bytes={kind: value for kind, value in memory.items() if value is not None},
        crowd_device_bytes=outcome.crowd_device_bytes,
        **dataclasses.asdict(outcome.pace),
        peak_host_bytes=outcome.peak_host_bytes,
        host_bytes=outcome.peak_host,
        host_split=host_split(plan.get("plan", {}), outcome.peak_host_bytes, on_gpu=on_gpu) if measured else {},
        plan=plan.get("plan", {}) | predicted.get("prediction", {}),
        counters=dict(done.get("counters", {})),
        window_counters=[dict(item.get("counters", {})) for item in windows] if measured else [],
        machine=machine,
        versions=environment.versions(),
        allocator=environment.allocator(),
        git_commit=environment.git_commit(),
        started_at=started_at,
        cell_s=outcome.cell_s,
        config=published(cell.config),
    )


def _share(tflops: float | None, peak: float | None) -> float | None:
    return tflops / peak if tflops and peak else None


def _stopped(cell: Cell, num_windows: int, measured: bool) -> str:
    if not measured or num_windows == cell.measure.windows:
        return ""
    return f"stopped after {num_windows} of {cell.measure.windows} windows: slower than {cell.measure.stop_below:,.0f} tokens/s"


def tidy(output_dir: Path) -> None:
    """Remove what was made for a study that was refused; a folder with rows in it is left alone."""
    if (output_dir / "rows.jsonl").exists():
        return
    (output_dir / ".hydra" / "multirun.yaml").unlink(missing_ok=True)
    for folder in (output_dir / ".hydra", output_dir / "logs", output_dir):
        with contextlib.suppress(OSError):  # not empty, or never made
            folder.rmdir()


def finish(cells: Sequence[Cell]) -> int:
    """Say what was not measured, print the table and figure, say where everything is; the exit code.

    0 where a cell has its number and every report was made.
    """
    measured, failed = 0, False
    for path in dict.fromkeys(cell.rows_path for cell in cells):
        mine = [cell for cell in cells if cell.rows_path == path]
        rows = [(cell, latest(cell)) for cell in mine]
        good = sum(row is not None and row.status == "ok" for _, row in rows)
        measured += good
        sys.stdout.flush()
        if path.exists() and good:
            command = [sys.executable, "-m", "analysis", "report", str(path)]
            # In a session of its own a Ctrl-C reaches this process alone, which stops the report without its traceback.
            done = subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)
            if done.returncode:
                failed = True
                print(f"report: not made; make it again with python -m analysis report {path}", file=sys.stderr, flush=True)
        lacking = [(cell.system, row) for cell, row in rows if row is None or row.status != "ok"]
        whys = [(system, f"{row.status}: {row.reason}" if row else "not run") for system, row in lacking]
        for (system, why), count in Counter(whys).items():
            print(f"not measured: {system}{f', {count} cells' if count > 1 else ''} ({why})", file=sys.stderr, flush=True)
        if path.exists():
            print(f"rows: {path}")
        if (path.parent / "wandb").is_dir() and mine[0].logging.wandb != "disabled":
            print(f"W&B: {path.parent / 'wandb'}")
    return 0 if measured and not failed else 1
