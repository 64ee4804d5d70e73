"""Values as a user typed them: each of the type that its field has, or a ValueError of one line.

Invariant: the line has the config path, what it got, what is allowed and what to do.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from sweeps.identity import MOVED

T = TypeVar("T")

_TYPES: dict[str, type] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "Mapping[str, Any]": dict,
    "Sequence[str]": list,
}
"""What a field's annotation says -> the type that a value of it must have."""


def build_group(kind: type[T], group: str, config: Mapping[str, Any]) -> T:
    """`kind` from one group. ValueError, one line, for an unknown, missing or mistyped field."""
    require(f"{group}.", config[group], ())
    values = dict(config[group])
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known:
            refuse_moved(f"{group}.{name}", value)
            raise ValueError(
                f"{group}.{name}: got {value!r}, allowed fields {', '.join(known)}; remove it or "
                "correct its name"
            )
        type_ = _TYPES.get(str(known[name].type).split(" |")[0], object)
        values[name] = typed(f"{group}.{name}", value, type_)
    require(f"{group}.", values, [name for name, item in known.items() if _is_required(item)])
    return kind(**values)


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def require(prefix: str, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """ValueError, one line, for a group or a field that is not there.

    On the command line `~name` takes one out, and so does a value in a group's place.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{prefix.rstrip('.')}: got {config!r}, allowed a group with fields; choose one of its "
            "options"
        )
    for name in names:
        if name not in config:
            path = f"{prefix}{name}"
            raise ValueError(f"{path}: got nothing, allowed a value; do not delete it (~{path})")


def typed(path: str, value: Any, kind: type[T]) -> T:
    """`value` as `kind`. An integer is a float too; None stands for what only the machine knows."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and number:
        return _float(path, value)  # type: ignore[return-value]
    if value is None and path.startswith("machine."):
        return value  # type: ignore[return-value]
    truth_for_number = isinstance(value, bool) and kind is not bool
    if kind in _TYPES.values() and (truth_for_number or not isinstance(value, kind)):
        name = kind.__name__
        raise ValueError(f"{path}: got {value!r}, allowed a value of type {name}; correct it")
    return value  # type: ignore[no-any-return]


def _float(path: str, value: int) -> float:
    if abs(value) > 1 << 1000:
        bits = value.bit_length()
        raise ValueError(
            f"{path}: got an integer of {bits} bits, allowed one that a float holds; correct it"
        )
    return float(value)


def text(path: str, value: Any) -> str:
    """Text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path}: got {value!r}, allowed text that is not blank; give a name")
    return value


def folder(path: str, value: Any) -> Path:
    """A folder that exists, or that could be made, as far as its name tells."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}: got {value!r}, allowed a path; name a folder")
    try:
        kind = Path(value).stat().st_mode
    except FileNotFoundError:
        return Path(value)
    except (OSError, ValueError) as error:  # below a file, too long a name, a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{path}: got {value!r} ({why}), allowed a folder that can be made; choose another"
        ) from None
    if not stat.S_ISDIR(kind):
        raise ValueError(f"{path}: got {value!r}, which is no folder, allowed one; choose another")
    return Path(value)


def seed_of(value: Any) -> int:
    """A seed that torch takes."""
    seed = typed("seed", value, int)
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed: got {seed}, allowed 0 to 2^63 - 1; correct it")
    return seed


def limit(path: str, value: Any) -> float | None:
    """Seconds > 0, or None."""
    if value is not None and not typed(path, value, float) > 0:
        raise ValueError(
            f"{path}: got {value!r}, allowed seconds > 0, or null for no limit; correct it"
        )
    return None if value is None else float(value)


def count(path: str, value: Any) -> int:
    """An integer >= 0."""
    at_least(path, number := typed(path, value, int), 0)
    return number


def allow(path: str, got: str, allowed: tuple[str, ...]) -> None:
    """ValueError, one line, unless `got` is one of `allowed`."""
    if got not in allowed:
        raise ValueError(f"{path}: got {got!r}, allowed {', '.join(allowed)}; choose one of these")


def at_least(path: str, got: int, least: int) -> None:
    """ValueError, one line, where `got` is smaller."""
    if got < least:
        raise ValueError(f"{path}: got {got}, allowed >= {least}; give a larger number")


def refuse_moved(path: str, value: Any) -> None:
    """ValueError, one line, for a setting that has another name now."""
    if path in MOVED:
        new = MOVED[path]
        raise ValueError(f"{path}: got {value!r}, allowed under another name; give {new}")
