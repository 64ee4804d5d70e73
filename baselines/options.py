"""The options that every baseline has, and how options are declared and checked.

Invariant: a mistake in an option is one line that names its config path, what it got and what is
allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
AS_MANY_AS_FIT = -1
"""The value of `keep_activations` that stands for the largest number that has room."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an option may be: whether it may be `value`, and the same in words with what to do."""

    accepts: Callable[[Any], bool]
    allowed: str


def at_least(least: int, default: int) -> Any:
    """A field of options that is an integer >= `least`."""
    return dataclasses.field(default=default, metadata={"rule": _integer(least, default)})


def share(default: float, *, whole: bool = True, chosen: bool = False) -> Any:
    """A field of options above 0 and up to 1, below 1 unless `whole`; with `chosen` also 0, which
    leaves the choice."""

    def accepts(value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (0 < value < 1 or (whole and value == 1) or (chosen and value == 0))

    limit = "up to" if whole else "below"
    allowed = (
        f"{'0, or a' if chosen else 'a'} number above 0 and {limit} 1; the default is {default}"
    )
    return dataclasses.field(default=default, metadata={"rule": Rule(accepts, allowed)})


def text(what: str) -> Any:
    """A field of options that is text or null; `what` says in words which text."""
    rule = Rule(
        lambda value: value is None or isinstance(value, str),
        f"{what} or null; put it in quotes or remove it",
    )
    return dataclasses.field(default=None, metadata={"rule": rule})


def one_of(*words: str) -> Any:
    """A field of options that is one of these words, the first by default."""
    rule = Rule(lambda value: value in words, f"{' or '.join(words)}; choose one of these")
    return dataclasses.field(default=words[0], metadata={"rule": rule})


def _integer(least: int, default: int) -> Rule:
    return Rule(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"an integer >= {least}; the default is {default}",
    )


def _rule(field: dataclasses.Field[Any]) -> Rule:
    """The rule that the field was declared with; else its default is true, false or a count."""
    if "rule" in field.metadata:
        rule: Rule = field.metadata["rule"]
        return rule
    if isinstance(field.default, bool):
        return Rule(lambda value: isinstance(value, bool), "true or false; choose one of these")
    default: Any = field.default
    return _integer(1, default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every baseline; a field without a rule of its own is true, false or a count."""

    preset: str | None = text("a word")
    """Label of the settings in rows and figures; it changes nothing."""
    keep_activations: int = at_least(AS_MANY_AS_FIT, 0)
    """Last decoder layers whose activations are kept: their graphs are the first to be freed. Every
    other layer is recomputed in the backward, from its input. -1 is as many as the plan has room
    for on the device."""
    loss_chunk: int = 4096
    """Tokens whose logits are alive at a time."""
    compile: bool = False
    """Run each decoder layer and the loss through torch.compile, as `baselines.loss` says."""

    @property
    def num_kept(self) -> int:
        """Layers that are not recomputed; 0 while -1 leaves the number open."""
        return max(0, self.keep_activations)


def parse_options(cls: type[T], options: Mapping[str, Any]) -> T:
    """`options` as the frozen dataclass `cls`. ValueError, in one line, names `system.<key>`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in options.items():
        got = f"system.{key}: got {value!r}"
        if key not in fields:
            raise ValueError(
                f"{got}, allowed {', '.join(fields)}; remove it or choose one of these"
            )
        rule = _rule(fields[key])
        if not rule.accepts(value):
            raise ValueError(f"{got}, allowed {rule.allowed}")
    return cls(**options)
