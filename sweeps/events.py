"""What a cell may say: the events on its pipe, and the fields of each.

Invariant: what `event_of` lets through can be summed, shown and written into a row; anything else
is a ValueError of one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from sweeps.result import STATUSES

Check = Callable[[Any], bool]
MAX_BYTES = 64 << 20
"""No event is as long; a cell that writes on without an end of line is not waited for."""


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def whole(value: Any) -> bool:
    """An integer from 0 that tables can hold."""
    return type(value) is int and 0 <= value < 1 << 63


def number(value: Any) -> bool:
    """An integer or a float, infinities and NaN among them."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def positive(value: Any) -> bool:
    """A number of seconds that can be divided by."""
    return number(value) and 0 < value < float("inf")


def maybe(check: Check) -> Check:
    """What `check` accepts, or None."""
    return lambda value: value is None or check(value)


def every(check: Check) -> Check:
    """A list, not an empty one, of what `check` accepts."""
    return lambda value: isinstance(value, list) and bool(value) and all(map(check, value))


def several(check: Check) -> Check:
    """A list of what `check` accepts."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def named(check: Check) -> Check:
    """What `check` accepts, by name."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def plan(value: Any) -> bool:
    """Bytes by kind on device and host; a placement may be beside them."""
    shares = [value.get("device"), value.get("host")] if isinstance(value, dict) else [None]
    return all(map(named(whole), shares)) and named(number)(value.get("placement", {}))


def prediction(value: Any) -> bool:
    """Seconds a step, and what they follow from."""
    if not isinstance(value, dict):
        return False
    seconds = (value.get("step_s"), value.get("window_step_s"))
    return all(map(positive, seconds)) and named(number)(value.get("rates"))


def expected(value: Any) -> bool:
    """A plan, and a prediction after it where there is one."""
    if not isinstance(value, list) or any(map(wrong, value)):
        return False
    return [event["event"] for event in value] in (["plan"], ["plan", "predicted"])


FIELDS: Mapping[str, Mapping[str, Check]] = {
    "phase": {"name": text},
    "step": {"step": whole},
    "plan": {
        "plan": plan,
        "dtypes": named(text),
        "caveat": maybe(text),
        "num_params": whole,
        "flops_per_token": named(maybe(number)),
        "tokens_per_step": whole,
    },
    "predicted": {"prediction": prediction},
    "losses": {
        "first_step": whole,
        "losses": every(number),
        "gradient_norms": maybe(several(number)),
        "seconds": maybe(positive),
        "num_tokens": whole,
        "steady_s": maybe(positive),
        "steady_tokens": maybe(whole),
        "counters": named(number),
    },
    "done": {
        "counters": named(number),
        "allocated_bytes": maybe(whole),
        "reserved_bytes": maybe(whole),
        "all_allocated_bytes": maybe(whole),
    },
    "rank_at": {"rank": whole, "of": whole, "collectives": whole},
    "rank_ended": {"rank": whole, "exit_code": number},
    "resumed": {"seconds": positive, "losses": every(number)},
    "heldout": {"loss": number},
    "exact_match": {"share": number, "num_questions": whole},
    "evaluated": {"step": whole, "tokens": whole, "seconds": number, "loss": number},
    "not_evaluated": {"reason": text},
    "failed": {"status": lambda value: value in STATUSES and value != "ok", "reason": text},
    "invalid": {"reason": text},
    "outlook": {"cell": text, "events": expected, "refusal": maybe(text)},
}
"""All are required but those that may be None. `outlook` comes of many cells from one process
(sweeps.outlook)."""


class Emitter:
    """emit(event, **fields): one JSON line on the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: str, **fields: Any) -> None:
        """Write one event whole; infinities and NaN pass as Python's own JSON words."""
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


def wrong(event: Any) -> str | None:
    """What keeps a value from being an event, in a few words."""
    if not isinstance(event, dict) or not isinstance(name := event.get("event"), str):
        return "no event"
    if name not in FIELDS:
        return f"an unknown event {name[:40]!r}"
    lacking = [field for field, fits in FIELDS[name].items() if not fits(event.get(field))]
    return f"{name} without a {lacking[0]} that could be its own" if lacking else None


def event_of(line: bytes) -> dict[str, Any]:
    """The event that a line is; ValueError, one line, where it is none."""
    try:
        event = json.loads(line)
        json.dumps(event, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed
        found = wrong(event)
    except (ValueError, RecursionError):
        found = "no JSON"
    if found:
        raise ValueError(f"the cell sent {found}: {line[:100]!r}")
    assert isinstance(event, dict)
    return event
