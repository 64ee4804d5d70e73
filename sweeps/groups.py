"""The groups of a cell's configuration that the bench reads itself, one class each.

Invariant: an instance is valid by itself; what a user mistyped is a ValueError of one line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sweeps.checks import allow, at_least
from sweeps.identity import folders_of

VALUED = (
    "--interleave",
    "--weighted-interleave",
    "--preferred",
    "--preferred-many",
    "--membind",
    "--cpunodebind",
    "--physcpubind",
)
"""Options of numactl(8) that bind a process and take a value, which is given as OPTION=NODES."""

FLAGS = ("--localalloc", "--balancing", "--all")
"""Options of numactl(8) that bind a process and take no value."""

Files = str | Sequence[str]

Word = str | None

FIELDS = ("text_field", "chat_field", "prompt_field", "answer_field")
"""Fields of data that name a field of the files."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the training text comes from (conf/data)."""

    max_bytes: int = 1 << 25
    """Bytes of the standard library read at most."""
    heldout_fraction: float = 0.02
    digest: str = ""
    """Digest of the bytes, filled in when they are read. Another text is another cell."""
    files: Files = ()
    """One file or several (data=text); () is the standard library's sources."""
    tokenizer: Word = None
    """Folder of a tokenizer of transformers; None takes bytes."""
    text_field: Word = None
    """Field that holds a document; None is `text` where no other field is named."""
    chat_field: Word = None
    """Field that holds a conversation, as a list of messages."""
    prompt_field: Word = None
    answer_field: Word = None
    """Fields of a question and of its answer, on which alone the loss is taken."""

    def __post_init__(self) -> None:
        at_least("data.max_bytes", self.max_bytes, 1 << 16)
        for name in ("files", "tokenizer", *FIELDS):
            _check_words(f"data.{name}", getattr(self, name), several=name == "files")
        self._check_fields()
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(
                f"data.heldout_fraction: got {self.heldout_fraction}, allowed 0 <= fraction < 1; "
                "0.02 is usual"
            )

    def _check_fields(self) -> None:
        """ValueError, one line, for fields that are read together by no kind of text."""
        if self.paths and self.max_bytes != Data.max_bytes:
            raise ValueError(
                f"data.max_bytes: got {self.max_bytes}, allowed without files alone; leave it out"
            )
        named = tuple(name for name in FIELDS if getattr(self, name) is not None)
        if (named or self.tokenizer is not None) and not self.paths:
            given = named[0] if named else "tokenizer"
            raise ValueError(
                f"data.{given}: got {getattr(self, given)!r}, allowed with files alone; choose "
                "data=text and give data.files"
            )
        if named and named not in (FIELDS[:1], FIELDS[1:2], FIELDS[2:]):
            raise ValueError(
                f"data.{named[0]}: got {' and '.join(named)}, allowed text_field alone, chat_field "
                "alone, or prompt_field with answer_field; leave the others out"
            )
        if self.chat_field is not None and self.tokenizer is None:
            raise ValueError(
                f"data.chat_field: got {self.chat_field!r} without a data.tokenizer, allowed with "
                "one that has a chat template; give data.tokenizer"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files; none is the standard library."""
        return (self.files,) if isinstance(self.files, str) else tuple(self.files)


def _check_words(path: str, value: Any, *, several: bool) -> None:
    """ValueError unless `value` is text that is not blank; or a list of it, or nothing."""
    if value == () or (value is None and not several):
        return
    words = value if several and isinstance(value, (list, tuple)) and value else [value]
    for word in words:
        if not isinstance(word, str) or not word.strip():
            allowed = "a path or a list of paths" if several else "text that is not blank, or null"
            raise ValueError(f"{path}: got {value!r}, allowed {allowed}; give {path}=...")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Which steps are timed (conf/measure)."""

    warmup_steps: int = 3
    windows: int = 3
    steps_per_window: int = 3
    trace: bool = False
    repeat: int = 1
    """Number of this repeat of the measurement; each repeat is a cell of its own."""
    repeated: Sequence[str] = ()
    """Files of conf/system that every repeat measures; the first repeat measures all. Empty: every
    repeat measures all."""
    stop_below: float = 0.0
    """Tokens/s. Where the first window is slower, it is the last. A search sets this."""
    save: bool = False
    """Whether a state is saved beside every window, which then has what that costs."""
    heldout_tokens: int = 0
    """Held-out tokens on which the trained parameters are evaluated after the measurement."""
    heldout_every_window: bool = False
    """Whether the system evaluates them too, before the first step and after every window."""

    exact_match: int = 0
    """Held-out questions that the plain model answers with the trained parameters afterwards."""
    answer_pattern: Word = None
    """Regular expression whose last match in an answer is what is compared; None compares all."""

    def __post_init__(self) -> None:
        at_least("measure.repeat", self.repeat, 1)
        at_least("measure.exact_match", self.exact_match, 0)
        self._check_pattern()
        if not self.stop_below >= 0:
            raise ValueError(
                f"measure.stop_below: got {self.stop_below}, allowed >= 0; 0 measures every window"
            )
        at_least("measure.heldout_tokens", self.heldout_tokens, 0)
        if self.heldout_every_window and not self.heldout_tokens:
            raise ValueError(
                "measure.heldout_every_window: got true with measure.heldout_tokens=0, allowed "
                "with some; give measure.heldout_tokens"
            )
        at_least("measure.warmup_steps", self.warmup_steps, 0)
        at_least("measure.windows", self.windows, 1)
        at_least("measure.steps_per_window", self.steps_per_window, 1)

    def _check_pattern(self) -> None:
        pattern = self.answer_pattern
        if pattern is None:
            return
        got = f"measure.answer_pattern: got {pattern!r}"
        if not self.exact_match:
            raise ValueError(f"{got}, allowed with measure.exact_match; give a number of questions")
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{got} ({error}), allowed a regular expression of Python; correct it"
            ) from None

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the cell, warm-up included."""
        return self.warmup_steps + self.windows * self.steps_per_window


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Where rows are mirrored to (conf/logging)."""

    wandb: str = "offline"
    project: str = "megatrain-bench"

    def __post_init__(self) -> None:
        allow("logging.wandb", self.wandb, ("offline", "online", "disabled"))
        if not 1 <= len(self.project) <= 128 or set(self.project) & set("/\\#?%:"):
            raise ValueError(
                f"logging.project: got {self.project!r}, allowed 1 to 128 characters without / \\ "
                "# ? % :; correct it"
            )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to plan with. None asks the machine."""

    device: str = "cpu"
    host_bytes: int | None = None
    device_bytes: int | None = None
    checkout: str | None = None
    """Folder of a clone of the authors' code of a system that is run from one, or a folder of such
    clones. Neither rows nor hashes have it."""
    nvme_path: str | None = None
    """Folder on a local disk, or for the engine several on as many disks, separated by colons. Rows
    and hashes have `drives` of it."""
    drives: str | None = None
    """What a row has in its place: a digest."""

    @property
    def folders(self) -> list[str]:
        """Those of `nvme_path`."""
        return folders_of(self.nvme_path)

    def __post_init__(self) -> None:
        allow("machine.device", self.device, ("cpu", "cuda"))
        for name in ("host_bytes", "device_bytes"):
            if getattr(self, name) is not None:
                at_least(f"machine.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Process:
    """How the processes that run a cell are started (conf/process)."""

    num_gpus: int = 1
    """GPUs, each with a process of its own; no row has other than 1 on the CPU."""
    num_cpu_ranks: int = 1
    """Processes without a GPU."""
    omp_num_threads: int = 0
    """OMP_NUM_THREADS, and the threads of the engine's AdamW; 0 leaves both to the machine."""
    numactl: str = ""
    """Arguments of numactl(8), which then starts the process; empty starts it directly."""
    huge_pages: bool = False
    """Whether torch asks for transparent huge pages for host memory that is not pinned."""
    timeout_s: float = 900.0
    """Seconds after which it is killed."""

    def __post_init__(self) -> None:
        at_least("process.num_gpus", self.num_gpus, 1)
        at_least("process.num_cpu_ranks", self.num_cpu_ranks, 1)
        at_least("process.omp_num_threads", self.omp_num_threads, 0)
        require_numactl(tuple(self.numactl.split()))
        if not self.timeout_s > 0:
            raise ValueError(
                f"process.timeout_s: got {self.timeout_s}, allowed > 0; give the seconds that one "
                "cell may take"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that train together; one of the two numbers is 1."""
        return max(self.num_gpus, self.num_cpu_ranks)

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The command that starts the process; empty where it is started directly."""
        return ("numactl", *self.numactl.split()) if self.numactl.strip() else ()


@lru_cache
def require_numactl(arguments: Sequence[str]) -> None:
    """ValueError, one line, for arguments that numactl(8) does not take on this machine."""
    if not arguments:
        return
    got = f"process.numactl: got {' '.join(arguments)!r}"
    for word in arguments:  # numactl would run what is no option as a command
        name, _, value = word.partition("=")
        if name not in (VALUED if value else FLAGS):
            allowed = ", ".join([*(f"{option}=NODES" for option in VALUED), *FLAGS])
            raise ValueError(f"{got}, where {word!r} is not allowed, only {allowed}; correct it")
    if shutil.which("numactl") is None:
        raise ValueError(
            f"{got}, allowed nothing where numactl is not installed; install it or leave it out"
        )
    command = ["numactl", *arguments, "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word why"])[0]
        raise ValueError(f"{got}, allowed what numactl(8) takes here ({said}); correct it")
