"""What this machine can do at best: matrix peak, link, host memory and drives; and how near CPU
AdamW and the engine's reads and writes come to it.

Invariant: measured here and now, never copied from a data sheet; None where there is no GPU. The
matrix peak is the yardstick of MFU. It is a burst; `matrix_sustained_tflops` is what the same
product keeps up for seconds, once power or heat hold the clock down. The host's bandwidth is that
of the fastest simple kernel (sweeps/host_memory.py says what is counted). Drives are touched where
folders on them are named; to each a dozen times --disk-mib is written, and to several two dozen.

    python -m sweeps.ceilings            everything, as tables; the last line of stdout is JSON
    python -m sweeps.ceilings --quick    without AdamW: seconds, and DeepSpeed compiles nothing
    python -m sweeps.ceilings --quick --disk /data1 /data2    drives too: minutes
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sweeps import adamw_speed, disk_speed, host_memory
from sweeps.command_line import Parser, count, mend_streams
from sweeps.environment import boot, cpu_model, gpu
from sweeps.memory import DeviceSampler, Look, Pace, device_sampler, pace

SIZE = 8192
"""Rows and columns of the square bf16 product."""
REPEATS = 7
SETTLE_S, HELD_S = 1.0, 4.0
"""Seconds of products until the clock is what it stays at, and then of those that count."""
COPY_BYTES = 1 << 30
PEAKS = ("matrix_peak_tflops", "matrix_sustained_tflops")
"""What rows have of it."""
LEAST_ELEMENTS = 1024
"""Every kernel has something to do: they cut their arrays in four."""


def _seconds(
    work: Callable[[], object], synchronize: Callable[[], object], repeats: int = REPEATS
) -> float:
    """Median seconds of `work` after one warm-up."""
    samples = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        synchronize()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def matrix_peaks() -> dict[str, Any]:
    """bf16 product of two random 8192 x 8192 matrices on CUDA, 2 n^3 operations: ten a sample, then
    held."""
    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def products(number: int) -> None:
        for _ in range(number):
            torch.matmul(left, right, out=out)

    peak = 10 * 2 * SIZE**3 / _seconds(lambda: products(10), torch.cuda.synchronize) / 1e12
    # Fifty before each wait, so that it leaves no gap to speak of.
    runs_per_s, paced = held(
        lambda: products(50), torch.cuda.synchronize, device_sampler("cuda"), SETTLE_S, HELD_S
    )
    return {
        "matrix_peak_tflops": peak,
        "matrix_sustained_tflops": 50 * 2 * SIZE**3 * runs_per_s / 1e12,
        **{f"sustained_{name}": value for name, value in dataclasses.asdict(paced).items()},
    }


def held(
    work: Callable[[], object],
    synchronize: Callable[[], object],
    device: DeviceSampler,
    settle_s: float,
    held_s: float,
) -> tuple[float, Pace]:
    """Runs of `work` a second during `held_s`, after `settle_s` of the same, and the device's pace
    meanwhile."""
    looks: list[Look] = []

    def runs_per_s(seconds: float) -> float:
        started, num_runs = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds or not num_runs:
            work()
            if (seen := device.look()) is not None:
                looks.append(seen)
            synchronize()
            num_runs += 1
        return num_runs / passed

    runs_per_s(settle_s)
    looks.clear()
    return runs_per_s(held_s), pace(looks)


def link_gb_per_s() -> tuple[float, float]:
    """(host to device, device to host), decimal GB/s, one pinned GiB a copy."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    load = _seconds(lambda: device.copy_(host, non_blocking=True), torch.cuda.synchronize)
    store = _seconds(lambda: host.copy_(device, non_blocking=True), torch.cuda.synchronize)
    return COPY_BYTES / load / 1e9, COPY_BYTES / store / 1e9


def measure(
    num_elements: int,
    num_threads: int,
    rounds: int,
    *,
    quick: bool,
    folders: Sequence[Path] = (),
    disk_bytes: int = 0,
) -> dict[str, Any]:
    """Every ceiling this machine has; `adamw` is None where `quick`. Arrays shrink where memory is
    short. disk_bytes: of each folder's file, twice."""
    found: dict[str, Any] = {
        "gpu": None,
        "boot": boot(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": num_threads,
        **dict.fromkeys(PEAKS),
        "h2d_gb_per_s": None,
        "d2h_gb_per_s": None,
    }
    if torch.cuda.is_available():
        found["gpu"] = gpu()["gpu"]
        found["h2d_gb_per_s"], found["d2h_gb_per_s"] = link_gb_per_s()
        found |= matrix_peaks()
    adamw: list[host_memory.Speed] = []
    if quick:
        num_elements = host_memory.affordable(12, num_elements)
        streams = host_memory.in_turns(host_memory.streams(num_elements, num_threads), rounds)
    else:
        num_elements = host_memory.affordable(adamw_speed.HELD_BYTES, num_elements)
        streams, adamw = adamw_speed.measure(num_elements, num_threads, rounds)
    best = max(streams, key=lambda stream: stream.gb_per_s or 0.0)
    return found | {
        "host_gb_per_s": best.gb_per_s,
        "host_kernel": best.name,
        "num_elements": num_elements,
        "streams": [dataclasses.asdict(stream) for stream in streams],
        "adamw": None if quick else [dataclasses.asdict(row) for row in adamw],
        "disks": [dataclasses.asdict(row) for row in disk_speed.measure(folders, disk_bytes)],
    }


def cached_peaks(output_dir: Path, device: str, timeout_s: float = 300.0) -> dict[str, float]:
    """The GPU's PEAKS, measured in a process of its own once a machine and output folder; {} on the
    CPU or on failure."""
    if device != "cuda":
        return {}
    path, here = output_dir / "ceilings.json", (gpu()["gpu"], boot())
    found = _earlier(path)
    if (found.get("gpu"), found.get("boot")) != here or any(
        found.get(name) is None for name in PEAKS
    ):
        command = [sys.executable, "-m", "sweeps.ceilings", "--quick", "--rounds", "5"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            print(
                f"ceilings: not measured, so MFU stays empty ({type(error).__name__})",
                file=sys.stderr,
            )
            return {}
        found = json.loads(done.stdout.splitlines()[-1])
        output_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(path)
    return {name: float(found[name]) for name in PEAKS if found.get(name) is not None}


def _earlier(path: Path) -> dict[str, Any]:
    """What was found before; nothing, and a line on stderr, where the file is not what was
    written."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict) and all(
            isinstance(found.get(name), (int, float, type(None))) for name in PEAKS
        ):
            return found
    except ValueError:  # no JSON, or no text
        pass
    print(
        f"{path}: got no ceilings, allowed a JSON object as sweeps.ceilings prints it; measuring "
        "them again",
        file=sys.stderr,
    )
    return {}


def _lines(found: dict[str, Any]) -> list[str]:
    """The tables: one value a line, then the streams and the optimizers with their share of the
    fastest stream."""
    single = {name: value for name, value in found.items() if not isinstance(value, list)}
    shown = {
        name: "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
        for name, value in single.items()
    }
    lines = [f"{name:>26}  {value}" for name, value in shown.items()]
    lines += [
        "",
        f"{'host memory, in turns':<30}"
        f"{'G elements/s':>14}{'B/element':>11}{'GB/s':>8}{'share':>8}",
    ]
    for row in [*found["streams"], *(found["adamw"] or [])]:
        if row["reason"] is not None:
            lines.append(f"{row['name']:<30}  {row['reason']}")
            continue
        share = f"{row['gb_per_s'] / found['host_gb_per_s']:.0%}"
        lines.append(
            f"{row['name']:<30}{row['g_elements_per_s']:>14.2f}{row['bytes_per_element']:>11}{row['gb_per_s']:>8.1f}{share:>8}"
        )
    return lines + _disk_lines(found["disks"])


def _disk_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of drives, with the share of the loop's speed that the engine reaches."""
    width = max((len(row["name"]) for row in rows), default=0) + 2
    head = f"{'loop GB/s':>11}{'at a time':>11}{'engine GB/s':>13}{'share':>8}"
    lines = ["", f"{'drives, in turns':<{width}}{head}"]
    for row in rows:
        loop, ours = row["loop_gb_per_s"], row["drives_gb_per_s"]
        fast = "" if row["reason"] else f"{loop:>11.2f}{row['at_a_time']:>11}"
        reached = fast and f"{fast}{ours:>13.2f}{ours / loop:>8.0%}"
        lines.append(f"{row['name']:<{width}}{reached or row['reason']}")
    return lines if rows else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, then one line of JSON."""
    mend_streams()
    parser = Parser(prog="python -m sweeps.ceilings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="leave out AdamW and the compiling of DeepSpeed's"
    )
    parser.add_argument(
        "--num-elements",
        type=count(LEAST_ELEMENTS, 1 << 40),
        default=host_memory.NUM_ELEMENTS,
        help="length of every host array",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads",
        type=count(1, cores),
        default=cores,
        help="CPU threads; a CUDA run of the engine leaves two cores free",
    )
    parser.add_argument(
        "--rounds",
        type=count(1, 10_000),
        default=host_memory.ROUNDS,
        help="samples of every host kernel",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        default=[],
        help="folders on drives to write to and read; none by default",
    )
    parser.add_argument(
        "--disk-mib",
        type=count(4, 1 << 24),
        default=1024,
        help="MiB of a folder's file; two of them lie there for as long as it takes",
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if not args.quick:
        print(
            "ceilings: DeepSpeedCPUAdam is compiled on its first use on a machine, which takes "
            "minutes",
            file=sys.stderr,
        )
    found = measure(
        args.num_elements,
        args.threads,
        args.rounds,
        quick=args.quick,
        folders=args.disk,
        disk_bytes=args.disk_mib << 20,
    )
    print("\n".join(_lines(found)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
