"""What a user can get wrong, in one line: config path, what it got, what is allowed, what to do.

Invariant: one line out for any error in; Hydra's and OmegaConf's paragraphs are condensed, our own
ValueErrors pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
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
from sweeps.identity import MOVED

USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
"""What ends in one line and exit code 2."""
FIELD_ERRORS = (ConfigKeyError, ConfigAttributeError)


def one_line(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """The error in one line; `overrides` tell what the user had typed."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: got an override that Hydra cannot read, allowed key=value; quote "
            "special characters"
        )
    key_error = error if isinstance(error, FIELD_ERRORS) else cause
    if isinstance(key_error, FIELD_ERRORS) and "not in struct" in str(key_error.msg):
        return _unknown_field(key_error, overrides)
    if isinstance(error, InterpolationKeyError):
        return (
            f"{error.full_key}: got an interpolation that leads nowhere, allowed the path of a "
            f"field; {_flat(error.msg)}"
        )
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: got no value, allowed any; give one as {error.full_key}=..."
    if isinstance(error, OmegaConfBaseException):
        return (
            f"{getattr(error, 'full_key', None) or 'config'}: got a value it cannot hold, allowed "
            f"one of its type; {_flat(error)}"
        )
    if isinstance(error, HydraException):
        return _hydra(_flat(error), overrides)
    if isinstance(error, OSError) and error.errno is not None:  # else it is a line of our own
        where = f"{error.filename} ({error.strerror})" if error.filename else str(error)
        return (
            f"output_dir: got {where}, allowed a folder that can be made and written; choose "
            "another or make it writable"
        )
    if _flat(error).startswith("Config group override must be a string"):
        return _no_option(overrides)
    return _flat(error)


def overrides_in(arguments: Sequence[str]) -> list[str]:
    """Those of a command line that set or delete something."""
    return [argument for argument in arguments if "=" in argument or argument.startswith("~")]


def _missing_option(missing: str, options: Sequence[str]) -> str:
    group, _, got = missing.rpartition("/")
    if not group:
        return f"--config-name: got {got!r}, allowed config; leave it out"
    allowed = ", ".join(sorted(options)) or "none (there is no such group)"
    if group == "hydra/launcher" and got.startswith("submitit"):
        return (
            f"{group}: got {got!r}, which is not installed, allowed {allowed}; pip install "
            "'megatrain-bench[cluster]'"
        )
    return f"{group or 'config'}: got {got!r}, allowed {allowed}; choose one of these"


def _unknown_field(error: Any, overrides: Sequence[str]) -> str:
    path = str(error.full_key or error.key)
    if path in MOVED:
        return (
            f"{path}: got {_typed_value(path, overrides)}, allowed under another name; give "
            f"{MOVED[path]}"
        )
    parent = error.parent_node
    allowed = sorted(
        str(key) for key in (parent.keys() if parent is not None else ()) if key != "hydra"
    )
    got = _typed_value(path, overrides)
    listed = ", ".join(allowed) or "none (it holds a single value)"
    return (
        f"{path}: got {got}, an unknown field, allowed {listed}; correct the name, or choose a "
        "group option that has it"
    )


def _typed_value(path: str, overrides: Sequence[str]) -> str:
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+~") == path:
            return repr(value)
    return "a value"


def _hydra(text: str, overrides: Sequence[str]) -> str:
    """Hydra's other complaints name the override; what to do follows it in their text."""
    twice = re.match(r"Multiple values for ([\w/]+)|([\w/]+) appears more than once", text)
    if twice:
        group = twice[1] or twice[2]
        got = " and ".join(item for item in overrides if item.lstrip("+").split("=")[0] == group)
        return (
            f"{group}: got {got}, which makes two of one group, allowed one; give one, without a "
            "plus if the group has a default"
        )
    for override in overrides if "No match in the defaults list" in text else ():
        group, _, value = override.partition("=")
        if f"'{group}'" in text and (CONF / group).is_dir():
            return _without_plus(group, value)
    words = text.replace("'", " ").split()
    named = next(
        (item for item in overrides if item in words or item.lstrip("+~").split("=")[0] in words),
        None,
    )
    return (
        f"{named.lstrip('+~').split('=')[0] if named else 'config'}: got {named or 'an override'}, "
        f"not allowed here; {text}"
    )


def _no_option(overrides: Sequence[str]) -> str:
    """A number, null or nothing was given for a group."""
    for override in overrides:
        group, _, value = override.partition("=")
        if not group:
            return f"command line: got {override!r}, allowed key=value; give the key"
        if (CONF / group.lstrip("+")).is_dir() and value not in (
            names := _options(group.lstrip("+"))
        ):
            return (
                f"{group.lstrip('+')}: got {value!r}, allowed {', '.join(names)}; choose one of "
                "these"
            )
    return (
        "command line: got a number for a group, allowed the name of one of its files in conf; "
        "choose one"
    )


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _without_plus(group: str, value: str) -> str:
    """A group that is laid over the others is not among them until a plus puts it there."""
    names = _options(group)
    if value in names:
        return f"{group}: got {value!r} without a plus, allowed with one; give +{group}={value}"
    folder = (
        f", or choose a folder for a study of your own, output_dir=outputs/{value}"
        if group == "experiment"
        else ""
    )
    return (
        f"{group}: got {value!r}, allowed {', '.join(names)}, with a plus; give "
        f"+{group}=NAME{folder}"
    )


def parse(overrides: Sequence[str]) -> list[Any]:
    """Parsed overrides; OverrideParseException for one that is not key=value.

    A sweep by glob(...) can be walked through where Hydra is initialised, whose files it chooses
    from.
    """
    there = GlobalHydra.instance()
    loader = there.config_loader() if there.is_initialized() else None
    return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def _flat(error: object) -> str:
    return " ".join(str(error).split())
