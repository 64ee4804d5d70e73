"""The saved states of a run: the newest are kept, and the newest that is whole is gone on from.

Invariant: a state counts once its folder has its name, which comes last; it is removed only after a
newer one counts. Order follows the steps in the names, never a clock.

    states/step-00000500/position.json     where in the text, and what was counted until then
    states/step-00000500/state/            what the system wrote
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baselines.system import TrainingSystem
from engine import sync

POSITION, STATE = "position.json", "state"
PREFIX = "step-"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is, between two steps."""

    step: int = 0
    """Optimizer steps taken."""
    data: Mapping[str, int] = field(default_factory=lambda: {"epoch": 0, "sequence": 0})
    """The place in the text (`sweeps.data.Stream.state`)."""
    tokens: int = 0
    """Label tokens trained on."""
    seconds: float = 0.0
    """Of training, over all starts; evaluations are not among them."""
    log_bytes: int = 0
    """What the log held then."""


class Generations:
    """The states of one run. `begin` starts to save one, `settle` takes it up once it is there."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._unusable: list[Path] = []
        self._begun: Path | None = None

    def found(self) -> list[Path]:
        """The folders of all states that count, the newest first."""
        every = [path for path in self.folder.glob(f"{PREFIX}*") if (path / STATE).is_dir()]
        return sorted(every, key=_step, reverse=True)

    def resume(self, system: TrainingSystem) -> Position | None:
        """Load the newest state that is whole; None where there is none at all.

        One that is not is named on stderr. ValueError where no state can be used.
        """
        self._tidy()
        self._unusable = []
        for folder in self.found():
            try:
                position = _read(folder / POSITION)
                system.resume(folder / STATE)
            except ValueError as error:
                self._unusable.append(folder)
                print(f"not used: {one_line(error)}", file=sys.stderr, flush=True)
            else:
                return position
        if self._unusable:
            raise ValueError(
                f"output_dir: got {len(self._unusable)} states in {self.folder}, none of which can "
                "be gone on from, allowed one that can; move them away to begin anew"
            )
        return None

    def _tidy(self) -> None:
        """Remove what a killed run had begun to write or to remove."""
        for path in self.folder.glob(f".{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{PREFIX}*"):
            unnamed = [path] if not (path / STATE).is_dir() else path.glob(f".{STATE}-*")
            for scratch in unnamed:
                shutil.rmtree(scratch, ignore_errors=True)

    def begin(self, system: Any, position: Position, *, room: int) -> None:
        """Save, beside the steps that come where the system can do that. OSError where the disk
        does not take it."""
        folder = self.folder / f"{PREFIX}{position.step:08}"
        if folder in self.found() and folder not in self._unusable:
            return  # a run that was stopped right after it was saved
        _remove(folder)
        self._unusable = [other for other in self._unusable if other != folder]
        folder.mkdir(parents=True)
        self._begun = folder
        try:
            _write(folder / POSITION, position)
            for path in (folder, self.folder, self.folder.parent):
                sync(path)
            if hasattr(system, "save_beside"):
                system.save_beside(folder / STATE, room=room)
            else:
                system.save(folder / STATE)
        except BaseException:
            self._give_up()
            raise
        self.settle(system)

    @property
    def writing(self) -> bool:
        """Whether a state that was begun has not been taken up."""
        return self._begun is not None

    def settle(self, system: Any, *, wait: bool = False) -> None:
        """Take up the state that was begun, if it is there, and remove those that are too old.

        wait: until it is there. OSError where it will not be.
        """
        if self._begun is None or not (wait or (self._begun / STATE).is_dir()):
            return
        try:
            if hasattr(system, "saved"):
                system.saved()
        except OSError:
            self._give_up()
            raise
        self._begun = None
        whole = [folder for folder in self.found() if folder not in self._unusable]
        for folder in [*self._unusable, *whole[self.keep :]]:
            _remove(folder)
        self._unusable = []

    def _give_up(self) -> None:
        if self._begun is not None:
            _remove(self._begun)
        self._begun = None


def one_line(error: BaseException) -> str:
    """The words of an error without its line breaks."""
    return " ".join(str(error).split())


def _step(folder: Path) -> int:
    digits = folder.name.removeprefix(PREFIX)
    return int(digits) if digits.isdecimal() else -1


def _remove(folder: Path) -> None:
    """Take a state's name away first, so that none is seen that lacks a part."""
    if folder.exists():
        gone = folder.with_name(f".{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _write(path: Path, position: Position) -> None:
    known = dataclasses.asdict(position)
    path.write_text(json.dumps({**known, "sha256": _digest(known)}))
    sync(path)


def _read(path: Path) -> Position:
    """ValueError, one line, for a file that is not as it was written."""
    known: Any = None
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    if not isinstance(known, dict) or known.pop("sha256", None) != _digest(known):
        raise ValueError(f"{path} is not as it was written; copy the state whole or take another")
    return Position(**known)


def _digest(known: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def replace_file(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)
