"""What this machine can do at best: matrix peak, link and host memory bandwidth. The yardstick of MFU.

Invariant: measured here and now with random data, never copied from a data sheet; None where there is no GPU.

    python -m sweeps.ceilings            a table; the last line of stdout is JSON
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sweeps.environment import cpu_model, gpu

SIZE = 8192
"""Rows and columns of the square bf16 product."""
REPEATS = 7
COPY_BYTES = 1 << 30


def _seconds(work: Callable[[], object], synchronize: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of `work` after one warm-up."""
    samples = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        synchronize()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def matrix_peak_tflops() -> float:
    """bf16 product of two random 8192 x 8192 matrices on CUDA, 2 n^3 operations, ten a sample."""
    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def ten() -> None:
        for _ in range(10):
            torch.matmul(left, right, out=out)

    return 10 * 2 * SIZE**3 / _seconds(ten, torch.cuda.synchronize) / 1e12


def link_gb_per_s() -> tuple[float, float]:
    """(host to device, device to host), decimal GB/s, one pinned GiB a copy."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    load = _seconds(lambda: device.copy_(host, non_blocking=True), torch.cuda.synchronize)
    store = _seconds(lambda: host.copy_(device, non_blocking=True), torch.cuda.synchronize)
    return COPY_BYTES / load / 1e9, COPY_BYTES / store / 1e9


def host_gb_per_s(num_floats: int = 1 << 26) -> float:
    """fp32 a + b into c through torch: three passes over memory, decimal GB/s."""
    left, right, out = (torch.ones(num_floats) for _ in range(3))
    return 3 * 4 * num_floats / _seconds(lambda: torch.add(left, right, out=out), lambda: None) / 1e9


def measure() -> dict[str, Any]:
    """Every ceiling this machine has."""
    found: dict[str, Any] = {
        "gpu": None,
        "cpu": cpu_model(),
        "matrix_peak_tflops": None,
        "h2d_gb_per_s": None,
        "d2h_gb_per_s": None,
    }
    if torch.cuda.is_available():
        found["gpu"] = gpu()["gpu"]
        found["matrix_peak_tflops"] = matrix_peak_tflops()
        found["h2d_gb_per_s"], found["d2h_gb_per_s"] = link_gb_per_s()
    found["host_gb_per_s"] = host_gb_per_s()
    return found


def cached_matrix_peak(output_dir: Path, device: str, timeout_s: float = 300.0) -> float | None:
    """The GPU's matrix peak, measured once an output folder in a process of its own; None on the CPU or where it failed."""
    if device != "cuda":
        return None
    path, card = output_dir / "ceilings.json", gpu()["gpu"]
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("gpu") != card or found.get("matrix_peak_tflops") is None:
        command = [sys.executable, "-m", "sweeps.ceilings"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"ceilings: not measured, so MFU stays empty ({type(error).__name__})", file=sys.stderr)
            return None
        found = json.loads(done.stdout.splitlines()[-1])
        output_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(path)
    peak = found.get("matrix_peak_tflops")
    return None if peak is None else float(peak)


def main() -> None:
    """Print the table, then one line of JSON."""
    found = measure()
    for name, value in found.items():
        print(f"{name:>20}  {value:.1f}" if isinstance(value, float) else f"{name:>20}  {value if value is not None else '-'}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
