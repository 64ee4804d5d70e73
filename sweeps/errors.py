"""What a user can get wrong, in one line: config path, what it got, what is allowed, what to do.

Invariant: one line out for any error in; Hydra's and OmegaConf's paragraphs are condensed, our own ValueErrors pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from sweeps.auto import CONF
from sweeps.identity import PATHS

USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
"""What ends in one line and exit code 2."""
FIELD_ERRORS = (ConfigKeyError, ConfigAttributeError)


def one_line(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """The error in one line; `overrides` tell what the user had typed."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: got an override that Hydra cannot read, allowed key=value; quote special characters"
    key_error = error if isinstance(error, FIELD_ERRORS) else cause
    if isinstance(key_error, FIELD_ERRORS) and "not in struct" in str(key_error.msg):
        return _unknown_field(key_error, overrides)
    if isinstance(error, InterpolationKeyError):
        return f"{error.full_key}: got an interpolation that leads nowhere, allowed the path of a field; {_flat(error.msg)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: got no value, allowed any; give one as {error.full_key}=..."
    if isinstance(error, OmegaConfBaseException):
        return (
            f"{getattr(error, 'full_key', None) or 'config'}: got a value it cannot hold, allowed one of its type; {_flat(error)}"
        )
    if isinstance(error, HydraException):
        return _hydra(_flat(error), overrides)
    if isinstance(error, OSError):
        where = f"{error.filename} ({error.strerror})" if error.filename else str(error)
        return f"output_dir: got {where}, allowed a folder that can be made and written; choose another or make it writable"
    return _flat(error)


def _missing_option(missing: str, options: Sequence[str]) -> str:
    group, _, got = missing.rpartition("/")
    allowed = ", ".join(sorted(options)) or "none (there is no such group)"
    return f"{group or 'config'}: got {got!r}, allowed {allowed}; choose one of these"


def _unknown_field(error: Any, overrides: Sequence[str]) -> str:
    path = str(error.full_key or error.key)
    parent = error.parent_node
    allowed = sorted(str(key) for key in (parent.keys() if parent is not None else ()) if key != "hydra")
    got = _typed_value(path, overrides)
    listed = ", ".join(allowed) or "none (it holds a single value)"
    name = path.removeprefix("system.")
    remedy = f"give machine.{name}, which goes with every system" if name in PATHS else "choose a group option that has it"
    return f"{path}: got {got}, an unknown field, allowed {listed}; correct the name, or {remedy}"


def _typed_value(path: str, overrides: Sequence[str]) -> str:
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+~") == path:
            return repr(value)
    return "a value"


def _hydra(text: str, overrides: Sequence[str]) -> str:
    """Hydra's other complaints name the override; what to do follows it in their text."""
    for override in overrides if "No match in the defaults list" in text else ():
        group, _, value = override.partition("=")
        if f"'{group}'" in text and (CONF / group).is_dir():
            return _without_plus(group, value)
    named = next((item for item in overrides if item.lstrip("+~").split("=")[0] in text.replace("'", " ").split()), None)
    return f"{named.lstrip('+~').split('=')[0] if named else 'config'}: got {named or 'an override'}, not allowed here; {text}"


def _without_plus(group: str, value: str) -> str:
    """A group that is laid over the others is not among them until a plus puts it there."""
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    if value in names:
        return f"{group}: got {value!r} without a plus, allowed with one; give +{group}={value}"
    folder = f", or choose a folder for a study of your own, output_dir=outputs/{value}" if group == "experiment" else ""
    return f"{group}: got {value!r}, allowed {', '.join(names)}, with a plus; give +{group}=NAME{folder}"


def parse(overrides: Sequence[str]) -> list[Any]:
    """Parsed overrides; OverrideParseException for one that is not key=value."""
    return OverridesParser.create().parse_overrides(list(overrides))


def _flat(error: object) -> str:
    return " ".join(str(error).split())
