"""How this room writes a file: whole or not at all, at whatever moment its writer is killed."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Put `data` there in place of what was; OSError, which names the path, if that fails."""
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def write_changed(wanted: Mapping[Path, bytes], old: Iterable[Path] = ()) -> list[Path]:
    """Write what is not there yet or has other bytes; the paths that were written. Then remove
    those of `old` that nobody wants any more."""
    gone = set(old) - set(wanted)
    known = {path: path.read_bytes() for path in wanted if path.exists()}
    changed = [path for path, data in wanted.items() if known.get(path) != data]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, wanted[path])
    for path in gone:
        path.unlink()
    return changed
