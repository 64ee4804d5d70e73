"""Prints the outlook of one cell: bytes by kind, placement, predicted timeline.

Invariant: the bytes are those that a cell is refused by, and the timeline is the engine's own
schedule at the machine's rates, so the picture cannot say what the engine would not do.

    python -m sweeps.plan model=qwen2.5-7b system=megatrain_fast     # rates are probed on this GPU
    python -m sweeps.plan model=qwen2.5-32b system=megatrain_fast +rates=h200_64cores   # elsewhere
    python -m sweeps.plan --largest                          # the largest model, here and elsewhere
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from baselines.model_check import require_runnable
from baselines.system import Unsupported
from engine import USABLE_HOST, Fate, Machine, MegaTrain, Rates, Timeline, free_bytes
from sweeps import auto, environment
from sweeps.checks import require
from sweeps.command_line import asks_help, mend_streams
from sweeps.config import Cell, cell_from
from sweeps.errors import USER_ERRORS, one_line, overrides_in, parse
from sweeps.identity import label
from sweeps.memory import host_bytes
from sweeps.outlook import built, outlook_of

WIDTH = 60
"""Characters of a bar."""
SHADES = " ░▒▓█"
LANES = (
    ("compute", "compute"),
    ("h2d", "load"),
    ("d2h", "store"),
    ("peers", "ranks"),
    ("copy", "copies"),
    ("cpu", "CPU AdamW"),
    ("read", "disk read"),
    ("write", "disk write"),
)
"""Lane -> what it is called, in the order in which they are drawn."""
NEEDED = {"machine": ("device_bytes", "host_bytes"), "recipe": ("total_steps",), "model": ("name",)}
"""Fields that are read before the config is checked, where rates are given."""
LARGEST = "--largest"
"""Flag that asks for the largest model."""
WIDTHS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b", "dense-120b")
"""Models whose layers are repeated."""
DEEP = 140
"""Layers beyond which a wider model is told: few have more."""
GB = 10**9
ELSEWHERE = ((24 * GB, 64 * GB), (80 * GB, 256 * GB), (141 * GB, 512 * GB), (141 * GB, 1500 * GB))
"""Bytes of device and host memory of machines that are not here."""
ENDURANCE = 10_000
"""Steps whose writes are told."""
RATES = (1.0, 1e24)
"""Least and most that may happen in a second: beyond them it is a slip of the pen."""
MEMORY = ("device_memory", "host_memory")
"""Fields of a rates file that are sizes."""


def compose_plan(overrides: Sequence[str]) -> tuple[Cell, Machine | None]:
    """The cell that the command line names, and the machine, None for this one. ValueError, one
    line."""
    _check_single(overrides)
    elsewhere = any(item.lstrip("+").startswith("rates=") for item in overrides)
    auto.register("cuda" if elsewhere else None)
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        plain: Any = OmegaConf.to_container(
            compose("config", list(overrides)), resolve=True, throw_on_missing=True
        )
    given = plain.pop("rates", None)
    if not given:
        return cell_from(auto.resolve(OmegaConf.create(plain))), None
    require("", plain, ("machine", "measure", "model", "process", "recipe", "system", "shape"))
    for group, names in NEEDED.items():
        require(f"{group}.", plain[group], names)
    _check_rates(given)
    plain["system"] = label(plain["system"])
    plain["machine"] |= {"device": "cuda"} | {
        name: plain["machine"][name] or given[memory]
        for name, memory in zip(("device_bytes", "host_bytes"), MEMORY, strict=True)
    }
    if plain["recipe"]["total_steps"] is None:
        plain["recipe"]["total_steps"] = 1
    if plain["model"]["name"] == "auto":
        raise ValueError(
            "model: got 'auto', allowed the name of a model where rates are given; for example "
            "model=qwen2.5-7b"
        )
    plain["model"] = auto.with_checkpoint(plain["model"])
    rates = Rates(
        **{name: float(value) for name, value in given.items() if name not in (*MEMORY, "name")}
    )
    return cell_from(plain), Machine(
        rates=rates,
        device_memory=int(plain["machine"]["device_bytes"]),
        host_memory=int(plain["machine"]["host_bytes"]),
    )


def _check_single(overrides: Sequence[str]) -> None:
    flags = [item for item in overrides if item.startswith("-")]
    if flags:
        raise ValueError(
            f"command line: got {flags[0]}, allowed key=value, for a plan is of one cell; remove it"
        )
    for item in parse(overrides):
        if item.key_or_group == "tune":
            raise ValueError(
                f"tune: got {item.value()!r}, allowed with sweeps.run, for a plan is of one cell; "
                "give system=NAME"
            )
        if item.is_sweep_override():
            got = item.get_value_string()
            raise ValueError(
                f"{item.key_or_group}: got {got!r}, allowed one value, for a plan is of one cell; "
                "ask for one after the other"
            )


def _check_rates(given: Mapping[str, Any]) -> None:
    rates = dataclasses.fields(Rates)
    allowed = ("name", *MEMORY, *(item.name for item in rates))
    optional = {item.name for item in rates if item.default is not dataclasses.MISSING}
    require("rates.", given, [name for name in allowed if name not in optional])
    for name, value in given.items():
        if name not in allowed:
            raise ValueError(
                f"rates.{name}: got {value!r}, allowed fields {', '.join(allowed)}; remove it or "
                "correct its name"
            )
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name != "name" and not (known and RATES[0] <= value <= RATES[1]):
            raise ValueError(
                f"rates.{name}: got {value!r}, allowed a number from 1 to 1e24; see conf/rates for "
                "an example"
            )


def memory_lines(kinds: Mapping[str, int], has: int | None) -> list[str]:
    """One bar a kind, the whole width being what the machine has (or, unknown, what is needed)."""
    total = sum(kinds.values())
    scale = max(total, has or 0, 1)
    lines = [
        f"  {kind:<12} {size / 1e9:8.2f}  {'█' * round(WIDTH * size / scale)}"
        for kind, size in kinds.items()
        if size
    ]
    share = f" of {has / 1e9:.1f} GB, {total / has:.0%}" if has else " GB"
    return [*lines, f"  {'total':<12} {total / 1e9:8.2f}{share}"]


def layer_map(engine: MegaTrain) -> list[str]:
    """One letter a block: where its weights and optimizer state live, and whether its activations
    are kept."""

    def letter(block: int) -> str:
        kind = "DBP" if engine.blocks.on_device(block) else "·KO"
        fate = engine.blocks.fate(block) if block in engine.blocks.layers else Fate.RECOMPUTED
        return kind[list(Fate).index(fate)]

    blocks = engine.blocks
    letters = "".join(map(letter, range(blocks.num_blocks)))
    between = blocks.checkpoint_interval
    every = f", an input kept every {between} layers" if between > 1 else ""
    again = ", weights of kept layers loaded again for their backward"
    away, hosted = len(blocks.on_disks), len(blocks.hosted)
    passes = "two passes" if blocks.two_passes and away < hosted else "one pass"
    disk = [f"  optimizer state of {away} of these blocks on disk, updated in one pass"]
    return [
        f"  {letters[0]} {letters[1:-1]} {letters[-1]}   (embed, {len(letters) - 2} layers, "
        f"head{every})",
        "  · streamed, recomputed   K activations kept   O offloaded   D weights and optimizer on "
        "the device   B D+K   P D+O",
        *(disk if away else []),
        f"  AdamW on the host in {passes}{again if blocks.reload_weights else ''}",
    ]


def timeline_lines(timeline: Timeline) -> list[str]:
    """One row a lane: how busy it is in each sixtieth of the step, and the share hidden under the
    computation."""
    lines = []
    for lane, name in LANES:
        busy = timeline.busy_s(lane)
        if not busy:
            continue
        bar = "".join(SHADES[min(4, round(4 * share))] for share in _busy_shares(timeline, lane))
        hidden = "" if lane == "compute" else f", {timeline.hidden_share(lane):.0%} hidden"
        lines.append(f"  {name:<10} {bar} {busy:7.3f} s{hidden}")
    return lines


def _busy_shares(timeline: Timeline, lane: str) -> list[float]:
    """The part of each of WIDTH equal stretches of the step in which the lane is busy."""
    width = timeline.step_s / WIDTH
    edges = [(width * index, width * (index + 1)) for index in range(WIDTH)]
    items = [item for item in timeline.intervals if item.lane == lane]
    return [
        sum(max(0.0, min(item.end_s, end) - max(item.start_s, start)) for item in items) / width
        for start, end in edges
    ]


def report(cell: Cell, machine: Machine | None) -> list[str]:
    """All lines of the answer."""
    require_runnable(cell.model)
    system = built(cell, machine=machine)
    outlook = outlook_of(system, cell, elsewhere=machine is not None)
    has = environment.machine(cell.machine, None)
    num_params: int = outlook.events[0]["num_params"]
    num = cell.process.num_ranks
    host = {kind: num * size for kind, size in outlook.plan["host"].items()}
    here = ", host memory too on a CPU" if cell.machine.device == "cpu" and machine is None else ""
    lines = [
        _title(cell, num_params),
        "",
        f"device, GB{' a rank' if num > 1 else ''}{here}",
        *memory_lines(outlook.plan["device"], has["device_bytes"]),
        "",
        f"host, GB{f' of {num} ranks' if num > 1 else ''}",
        *memory_lines(host, has["host_bytes"]),
    ]
    if away := outlook.plan.get("disk"):
        free = _free_on(cell.machine.folders) if machine is None else None
        lines += ["", *disk_lines(num * sum(away.values()), free)]
    if caveat := outlook.events[0]["caveat"]:
        lines += ["", f"note: {caveat}"]
    if isinstance(system, MegaTrain):
        lines += ["", "placement", *layer_map(system)]
        if outlook.prediction is not None:
            window_step_s = outlook.prediction["window_step_s"]
            lines += ["", *prediction_lines(cell, system, num_params, window_step_s)]
        elif machine is None and cell.machine.device == "cpu":
            lines += ["", "no speed on a CPU; +rates=h200_16cores plans for a GPU"]
    elif hasattr(system, "placement"):
        lines += ["", f"room for the activations of {system.placement['kept_layers']} layers"]
    verdict = f"does not fit: {outlook.refusal}" if outlook.refusal else "fits"
    used = sum(host.values()) / (has["host_bytes"] or math.inf)
    if not outlook.refusal and used > USABLE_HOST:
        verdict += (
            f", barely: the kernel may end what fills more than {USABLE_HOST:.0%} of the host"
        )
    return [*lines, "", verdict]


def disk_lines(num_bytes: int, free: int | None) -> list[str]:
    """What lies on disk, of `free` bytes where the drives are here, and what a step does to it."""
    tbw = ENDURANCE * num_bytes / 1e12
    share = " " if free is None else f" of {free / 1e9:.1f} GB free,"
    return [
        "disk, GB",
        f"  {'optimizer':<12} {num_bytes / 1e9:8.2f}{share} which every step reads and writes",
        f"  {ENDURANCE:,} steps write {tbw:,.0f} TB: compare the drive's endurance (TBW)",
    ]


def _title(cell: Cell, num_params: int) -> str:
    preset = cell.options.get("preset")
    names = [cell.system, preset, "compiled" if cell.options.get("compile") else None]
    return (
        f"{cell.model.name} ({num_params / 1e9:.2f}B parameters), {cell.shape.batch_size} x "
        f"{cell.shape.seq_len} tokens, {' '.join(name for name in names if name)}"
    )


def prediction_lines(
    cell: Cell, engine: MegaTrain, num_params: int, window_step_s: float
) -> list[str]:
    """The predicted step: its speed, what each lane does in it, its seconds as the bench measures
    them."""
    timeline = engine.predict()
    tokens_per_s = cell.shape.num_tokens / timeline.step_s
    return [
        f"predicted step {timeline.step_s:.3f} s: {tokens_per_s:,.0f} tokens/s, "
        f"{6e-12 * num_params * tokens_per_s:.0f} TFLOPS 6P, at {rate_card(engine.rates)}",
        *timeline_lines(timeline),
        f"  {window_step_s:.3f} s in windows of {cell.measure.steps_per_window} steps, as the "
        "bench measures: each waits for its last update",
    ]


def rate_card(rates: Rates) -> str:
    """The rates in one line."""
    names = {
        "matmul_flops": (1e12, "TFLOPS bf16 product"),
        "adamw_params": (1e9, "G params/s AdamW"),
        "weights_params": (1e9, "its weights"),
        "moments_params": (1e9, "its moments"),
        "h2d_bytes": (1e9, "GB/s in"),
        "d2h_bytes": (1e9, "GB/s out"),
        "evict_bytes": (1e9, "GB/s out beside AdamW"),
        "device_bytes": (1e9, "GB/s device memory"),
        "peer_bytes": (1e9, "GB/s from other devices"),
        "disk_read_bytes": (1e9, "GB/s from disk"),
        "disk_write_bytes": (1e9, "GB/s to disk"),
        "adamw_threads": (1, "threads of AdamW"),
    }
    units = [(value, *names[name]) for name, value in dataclasses.asdict(rates).items() if value]
    return ", ".join(f"{value / unit:.4g} {text}" for value, unit, text in units)


def largest(overrides: Sequence[str]) -> list[str]:
    """The most layers, of several widths, that there is room for: on this machine, where it has a
    GPU, and on some that are not here; with all state in memory and with some on disk."""
    lines = [f"{'device + host, GB':18}{'in memory':>36}{'with state on disk':>48}"]
    machines = _machines(overrides)
    for machine in machines:
        device, host = machine.device_memory or 0, machine.host_memory or 0
        found = [_largest_of(overrides, machine, disk_blocks=n) for n in (0, -1)]
        told = [f"{num / 1e9:6.1f}B ({layers} layers of {name})" for num, layers, name, _ in found]
        away = f", {found[1][3] / 1e9:,.0f} GB"
        lines.append(f"{device / 1e9:6.0f} + {host / 1e9:<9.0f}{told[0]:>36}{told[1] + away:>48}")
    if len(lines) == 1 + len(ELSEWHERE):
        lines.append("this machine has no GPU")
    shape = _sized(overrides, WIDTHS[0], machines[-1], 0).shape
    parts = f" in {n} parts" if (n := shape.num_micro_batches) > 1 else ""
    tokens = f"{shape.batch_size} x {shape.seq_len} tokens{parts}"
    options = "system.checkpoint_interval=-1 system.device_optimizer=-1"
    return [*lines, f"streamed, {tokens}, with {options}; the last GB are on disk"]


def _machines(overrides: Sequence[str]) -> list[Machine]:
    """This one, where it has a GPU, with what its drives have free where they are named; and those
    of ELSEWHERE. ValueError, one line, where what is named is no folder."""
    machines = [Machine(device_memory=device, host_memory=host) for device, host in ELSEWHERE]
    card, host = environment.gpu(), host_bytes()
    if not card.get("device_bytes") or not host:
        return machines
    here = Machine(device_memory=card["device_bytes"], host_memory=host)
    cell = _sized(overrides, WIDTHS[0], here, -1)
    built(cell, machine=here)  # looks for the folders
    free = _free_on(cell.machine.folders) if _names_drives(overrides) else None
    return [dataclasses.replace(here, disk_bytes=free), *machines]


def _names_drives(overrides: Sequence[str]) -> bool:
    return any(item.key_or_group == "machine.nvme_path" for item in parse(overrides))


def _free_on(folders: Sequence[str]) -> int:
    return free_bytes([Path(name).expanduser() for name in folders])


def _largest_of(
    overrides: Sequence[str], machine: Machine, *, disk_blocks: int
) -> tuple[int, int, str, int]:
    """Parameters, layers, the model whose width they have, and bytes on disk, of the largest."""
    found = []
    for name in WIDTHS:
        cell = _sized(overrides, name, machine, disk_blocks)
        engine = built(cell, machine=machine)
        outer, layer = engine.work.layouts[0].num_params, engine.work.layouts[1].num_params
        outer += engine.work.layouts[-1].num_params
        number, away = engine.most_layers()
        found.append((outer + number * layer if number else 0, number, name, away))
    some = [one for one in found if one[1]] or found[:1]
    return max(some, key=lambda one: (one[1] <= DEEP, one[0] if one[1] <= DEEP else -one[1]))


def _sized(overrides: Sequence[str], name: str, machine: Machine, disk_blocks: int) -> Cell:
    """A cell of one layer of that width, on such a machine."""
    fixed = [
        f"model={name}",
        "system=megatrain",
        "model.config.num_hidden_layers=1",
        "system.checkpoint_interval=-1",
        "system.late_moments=false",  # nothing to choose by speed: bytes are the same
        f"system.disk_blocks={disk_blocks}",
        f"machine.device_bytes={machine.device_memory}",
        f"machine.host_bytes={machine.host_memory}",
        "+rates=h200_16cores",
    ]
    fixed += [] if _names_drives(overrides) else [f"machine.nvme_path={os.curdir}"]
    return compose_plan([*overrides, *fixed])[0]


def main() -> int:
    """Print the plan; 2 and one line where the command line is wrong or the system cannot run, 1
    where there is no room."""
    mend_streams()
    if asks_help(sys.argv[1:]):
        print(__doc__)
        return 0
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what it warns of is an error here
    try:
        asked = [item for item in sys.argv[1:] if item != LARGEST]
        lines = report(*compose_plan(asked)) if asked == sys.argv[1:] else largest(asked)
    except (*USER_ERRORS, Unsupported) as error:
        print(one_line(error, overrides_in(sys.argv[1:])), file=sys.stderr)
        return 2
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(lines[-1].startswith("does not fit"))


if __name__ == "__main__":
    sys.exit(main())
