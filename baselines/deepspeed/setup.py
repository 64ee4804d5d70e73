"""What DeepSpeed needs before it can be used here: itself, a compiler, ninja, a cache, its
accelerator's name.

Invariant: importing this module imports no DeepSpeed; what is missing is told in one line, before
anything is allocated.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from baselines.system import Unsupported
from engine import cache_directory

MIN_VERSION = (0, 19, 8)
"""First release whose ZeRO-3 gradient copies to the host do not block (DeepSpeed PR 8207)."""

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps the memory that two processes share; containers often have 64 MiB of it."""


def require_deepspeed() -> None:
    """Unsupported, in one line, where DeepSpeed is missing or too old or cannot be built."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Unsupported("deepspeed is not installed; pip install 'deepspeed>=0.19.8'")
    version = importlib.metadata.version("deepspeed")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < MIN_VERSION:
        raise Unsupported(
            f"deepspeed {version} blocks on every gradient copy; pip install 'deepspeed>=0.19.8'"
        )
    require_compiler("DeepSpeedCPUAdam")


def require_compiler(built: str) -> None:
    """Unsupported, in one line, where `built` cannot be built."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Unsupported(
            f"{compiler} is missing and {built} is built on first use; install a C++ compiler (g++)"
        )
    if _ninja_directory() is None:
        raise Unsupported(f"ninja is missing and {built} is built on first use; pip install ninja")


def add_ninja_to_path() -> None:
    """Have torch build into a fixed cache, with the ninja of an environment that was not
    activated."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_directory() / "torch_extensions"))
    ninja = _ninja_directory()
    if ninja is not None and shutil.which("ninja") is None:
        os.environ["PATH"] = f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}"


def require_shared_memory(num_bytes: int, name: str) -> None:
    """Unsupported, in one line, where two processes of a system cannot share `num_bytes`."""
    disk = os.statvfs(SHARED_MEMORY)
    free = disk.f_bavail * disk.f_frsize
    if num_bytes > free:
        raise Unsupported(
            f"{name} shares {num_bytes:,} bytes between two processes and {SHARED_MEMORY} has "
            f"{free:,} free; enlarge it (docker run --shm-size, or mount -o remount,size=)"
        )


def _ninja_directory() -> str | None:
    """Where ninja is: on PATH, or in the ninja package of an environment that was not activated."""
    found = shutil.which("ninja")
    if found is None and importlib.util.find_spec("ninja") is not None:
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR)
    return None if found is None else str(Path(found).parent)


@contextlib.contextmanager
def sole_builder() -> Iterator[None]:
    """While it lasts no other process builds DeepSpeed's operators, after `import_deepspeed`.

    torch's own lock is a file that outlives a killed builder, and the next process waits for it
    forever. This one dies with its holder and the ninja that the holder started, so a file of
    torch's that is there under it is a dead process's.
    """
    cache = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "building").open("w+") as lock, _as_stdin(lock):
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in cache.glob("*/lock"):
            left_behind.unlink(missing_ok=True)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # whatever else was started meanwhile and lives on


@contextlib.contextmanager
def _as_stdin(file: IO[str]) -> Iterator[None]:
    """While it lasts `file` is the standard input of this process, and so of those that it starts:
    no other file reaches them through torch's own subprocess.run."""
    own = os.dup(0)
    os.dup2(file.fileno(), 0)
    try:
        yield
    finally:
        os.dup2(own, 0)
        os.close(own)


def setup_phase() -> str:
    """Setup in words: it says so where DeepSpeed's operators have to be built first."""
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache_directory() / "torch_extensions")
    built = any(cache.rglob("cpu_adam*.so"))
    return "setup" if built else "setup, building DeepSpeed's operators first (minutes, once)"


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed quietly, for `device`; what it builds goes into a fixed cache."""
    add_ninja_to_path()
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops.adam

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
