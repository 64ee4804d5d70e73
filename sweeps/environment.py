"""Where a number came from: machine, versions, commit.

Invariant: reading it starts no CUDA context and imports no measured library, so the parent stays
out of the cell's way; what cannot be read is None.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine import cache_directory
from sweeps.flops import datasheet_tflops
from sweeps.groups import Machine, Process
from sweeps.memory import host_bytes, nvml_device

PACKAGES = ("torch", "transformers", "deepspeed", "torchao", "hydra-core", "wandb", "numpy")
ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
CODE = ("baselines", "conf", "engine", "sweeps")
"""Folders in which a file that git does not know may be what a row is of."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Random, made anew by the kernel at every start."""
NODES = Path("/sys/devices/system/node")
"""The kernel's list of NUMA nodes."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Its choice of three words, the one in force in brackets."""


def cell_variables(process: Process | None = None) -> dict[str, str]:
    """Environment of every cell, unless the user's own says otherwise; and what `process` asks for.

    Kernels compiled by one cell serve the next; and device memory grows in place, or the holes
    between blocks of unlike sizes cost up to 12 GB of an H200. CUDA counts GPUs as NVML does, which
    says what the row has of the first one.
    """
    ours = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCHINDUCTOR_CACHE_DIR": str(cache_directory() / "inductor"),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # the older name of the same
        del ours["PYTORCH_ALLOC_CONF"]
    asked = (
        {"OMP_NUM_THREADS": str(process.omp_num_threads)}
        if process and process.omp_num_threads
        else {}
    )
    asked |= (
        {"THP_MEM_ALLOC_ENABLE": "1"} if process and process.huge_pages else {}
    )  # read by torch's CPU allocator
    return {name: value for name, value in ours.items() if name not in os.environ} | asked


def allocator() -> str | None:
    """How torch's allocators are set in every cell: by `cell_variables`, or by the user's own
    environment in its place."""
    known = {**os.environ, **cell_variables()}
    return known.get("PYTORCH_ALLOC_CONF", known.get("PYTORCH_CUDA_ALLOC_CONF"))


def cpu_model() -> str:
    """The CPU's marketing name, or the architecture where the kernel does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu() -> dict[str, Any]:
    """Name and bytes of the first visible GPU and the number of visible ones; None and 0 without
    one."""
    try:
        nvml, handle = nvml_device()
    except RuntimeError:
        return {"gpu": None, "num_gpus": 0, "device_bytes": None}
    name, visible = nvml.nvmlDeviceGetName(handle), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "num_gpus": len(visible.split(",")) if visible else int(nvml.nvmlDeviceGetCount()),
        "device_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    }


def boot() -> str | None:
    """Eight hex digits that two rows share if one machine wrote both without a restart; a digest,
    so it names no host."""
    try:
        return hashlib.sha256(BOOT_ID.read_text().strip().encode()).hexdigest()[:8]
    except OSError:
        return None


def machine(overrides: Machine, peaks: Mapping[str, float] | None) -> dict[str, Any]:
    """The `machine` field of a row, with the `peaks` of sweeps.ceilings; a CPU cell names no GPU,
    whatever the machine holds."""
    card: dict[str, Any] = (
        gpu() if overrides.device == "cuda" else {"gpu": None, "num_gpus": 0, "device_bytes": None}
    )
    if overrides.device_bytes is not None:
        card["device_bytes"] = overrides.device_bytes
    return {
        **card,
        "cpu": cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "host_cores": os.cpu_count(),
        "numa_nodes": len(numa_nodes()) or None,
        "huge_pages": huge_pages(),
        "host_bytes": overrides.host_bytes or host_bytes(),
        "boot": boot(),
        "matrix_peak_tflops": (peaks or {}).get("matrix_peak_tflops"),
        "matrix_sustained_tflops": (peaks or {}).get("matrix_sustained_tflops"),
        "datasheet_tflops": datasheet_tflops(card["gpu"]),
    }


def numa_nodes() -> list[int]:
    """The NUMA nodes that the kernel shows, in order; empty where it shows none."""
    numbers = (path.name.removeprefix("node") for path in NODES.glob("node[0-9]*"))
    return sorted(int(number) for number in numbers if number.isdigit())


def huge_pages() -> str | None:
    """When the kernel backs host memory with huge pages: always, madvise or never; None where it
    does not say."""
    try:
        found = re.search(r"\[(\w+)\]", HUGE_PAGES.read_text())
    except OSError:
        return None
    return found[1] if found else None


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python and of every package that can change a number; a missing package is left
    out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of this very checkout, with `-dirty` where tracked files differ from it, or code or a
    config of CODE is not of it.

    No variable of git's chooses another repository, and none that the checkout lies in stands
    for it. Where the tree was copied without its history, MEGATRAIN_GIT_COMMIT says which it is;
    else None.
    """
    commit = _git("rev-parse", "HEAD") or os.environ.get("MEGATRAIN_GIT_COMMIT")
    if not commit:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    new = _git("status", "--porcelain", "--untracked-files=all", "--", *CODE)
    return commit + ("-dirty" if changed or new else "")


def _git(*arguments: str) -> str | None:
    known = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    known["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env=known
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
