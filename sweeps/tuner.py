"""The search for a system's fastest knobs on this machine.

What may be tried is in conf/tune, what was found in conf/system/tuned.

Invariant: every search has the same budget and timing (a test compares them) and starts from the
system as it is, so what is written was at least as fast here; a trial without a number counts as 0
tokens/s and stops nothing. A trial whose first window is slower than PRUNE of the best so far ends
there.

    python -m sweeps.run +tune=zero3 model=qwen2.5-14b shape=b32x1024
    python -m sweeps.run system=tuned/zero3-qwen2.5-14b-h200-64cores model=qwen2.5-14b \\
        shape=b32x1024

Trials are cells like any other: stopped and started again, a search repeats none that has its
number (its sampler is seeded).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sweeps import auto
from sweeps.config import Cell
from sweeps.identity import NEUTRAL, TUNED, comparison_key, hashed, searched
from sweeps.result import Row
from sweeps.rows import Rows, comparable

PLUGIN = "hydra_plugins.hydra_optuna_sweeper"
PRUNE = 0.9


def require(overrides: Sequence[str]) -> None:
    """ValueError where a search is asked for without the packages it needs, or with a mode, which
    its trials choose."""
    asked = [override for override in overrides if override.lstrip("+").startswith("tune=")]
    if asked and importlib.util.find_spec(PLUGIN) is None:
        raise ValueError(
            f"tune: got {asked[-1].partition('=')[2]!r}, allowed where hydra-optuna-sweeper is "
            "installed; run pip install -c constraints.txt -e '.[tune]'"
        )
    modes = [override for override in overrides if asked and override.startswith("mode=")]
    if modes:
        got = modes[-1].partition("=")[2]
        raise ValueError(
            f"mode: got {got!r}, allowed none with +tune, whose trials choose it; start from "
            f"system=NAME_{got}"
        )


def require_trials(sweeper: DictConfig) -> None:
    """ValueError, one line, where a search would try nothing."""
    for name in ("n_trials", "n_jobs"):
        value = sweeper.get(name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"hydra.sweeper.{name}: got {value!r}, allowed an integer >= 1; correct it"
            )


def trials(start: Cell, rows: Rows) -> list[Row]:
    """The latest row of every trial of the search from `start`, on this machine.

    Its trials share the system, the work and the timing, and the study, which is called after the
    start's file in conf/system.
    """
    found: dict[str, Row] = {}
    for row in filter(lambda row: row.config, rows.of(start)):
        same_search = (row.experiment, row.system) == (start.experiment, start.system)
        same_work = row.compared_with == comparison_key(start.config)
        same_timing = hashed(row.config)["measure"] == hashed(start.config)["measure"]
        if same_search and same_work and same_timing and comparable(row, start):
            found[row.cell] = row
    return list(found.values())


def best_of(rows: Sequence[Row]) -> Row | None:
    """The fastest measured row."""
    return max(
        (row for row in rows if row.tokens_per_s),
        key=lambda row: row.tokens_per_s or 0.0,
        default=None,
    )


def pruned(cell: Cell, rows: Rows) -> Cell:
    """The same cell, which ends after its first window where that is well below the best trial."""
    best = best_of(trials(cell, rows))
    if best is None or best.tokens_per_s is None:
        return cell
    measure = replace(cell.measure, stop_below=PRUNE * best.tokens_per_s)
    config = {
        **cell.config,
        "measure": {**cell.config["measure"], "stop_below": measure.stop_below},
    }
    return replace(cell, measure=measure, config=config)


def machine_of(row: Row) -> str:
    """GPU and cores in words."""
    return f"{row.machine.get('gpu') or 'a CPU'} with {row.machine.get('num_cores')} cores"


def finish(start: Cell, choice: str, rows: Rows, folder: Path = TUNED) -> int:
    """Write the winner and the trials, say where they are and how to use them; the exit code.

    choice: the file of conf/system that the search started from; the winner is called after it.
    """
    found = trials(start, rows)
    best, default = best_of(found), next((row for row in found if row.cell == start.hash), None)
    if best is None or best.tokens_per_s is None:
        print(
            f"tune: none of {len(found)} trials from system={choice} has a number, so nothing is "
            f"written; see {start.rows_path}",
            file=sys.stderr,
        )
        return 1
    stem = searched(choice, best.model, best.machine)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.yaml"
    path.write_text(overlay(best, choice, len(found)))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(trial(row)) + "\n" for row in found))
    gain = (
        f", {best.tokens_per_s / default.tokens_per_s:.2f}x of {choice}"
        if default and default.tokens_per_s
        else ""
    )
    print(f"best of {len(found)} trials: {best.tokens_per_s:,.0f} tokens/s{gain}")
    print(f"written: {path} and {path.with_suffix('.jsonl').name}; use it as system=tuned/{stem}")
    return 0


def trial(row: Row) -> dict[str, Any]:
    """What is kept of one trial."""
    measured = ("cell", "status", "tokens_per_s", "step_s", "peak_device_bytes", "peak_host_bytes")
    where = ("allocator", "git_commit", "started_at")
    kept = {name: getattr(row, name) for name in (*measured, *where)}
    groups = {name: row.config[name] for name in ("system", "process")}
    return kept | {"boot": row.machine.get("boot")} | groups


def overlay(best: Row, choice: str, num_trials: int) -> str:
    """The winner as a file of conf/system over the start's: what differs, and what it was
    before."""
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        before: Any = OmegaConf.to_container(compose("config", [f"system={choice}"]), resolve=True)
    words = str(before["system"].get("preset") or "").split()
    preset = " ".join(
        ("tuned", *(word for word in words if word != "tuned"))
    )  # a tuned twinflow is no tuned zero3
    versions = ", ".join(
        f"{name} {best.versions[name]}" for name in ("torch", "deepspeed") if name in best.versions
    )
    process = _found(best.config, before, "process", ("timeout_s",))
    lines = [
        "# @package _global_",
        f"# {choice} as found by {num_trials} trials on {machine_of(best)}:",
        f"# {best.model}, {best.batch_size} x {best.seq_len} tokens, {best.tokens_per_s:,.0f} "
        f"tokens/s ({versions}).",
        "# The trials are in the .jsonl beside this file; written by sweeps/tuner.py.",
        "defaults:",
        f"  - /system/{choice}@system",
        "  - _self_",
        "",
        "system:",
        "  # Label of the settings below in rows and figures.",
        f"  preset: {preset}",
        *_found(best.config, before, "system", ("preset",)),
        *(["", "process:", *process] if process else []),
    ]
    return "\n".join(lines) + "\n"


def _found(
    best: Mapping[str, Any], before: Mapping[str, Any], group: str, besides: Sequence[str]
) -> list[str]:
    """Lines of YAML: what the best trial has otherwise than where the search began."""
    lines = []
    for key, value in best[group].items():
        neutral = key in NEUTRAL and not value and key not in before[group]
        if key in besides or neutral or before[group].get(key) == value:
            continue
        origin = json.dumps(before[group][key]) if key in before[group] else "not set"
        lines += [f"  # Before: {origin}.", f"  {key}: {json.dumps(value)}"]
    return lines
