"""What a cell is known by: the part of a composed config that can change a measurement, as a digest.

Invariant: a setting that is as good as not there leaves the digest as it was, so rows from before it existed stay known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

UNHASHED = ("experiment", "logging", "output_dir", "time_limit_s")
"""Groups of a config that cannot change a measurement. Of machine only device and its cap can, of measure all but the next."""
PATHS = ("checkout", "nvme_path")
"""Fields of machine that stand for a system's option of the same name: where something lies on one machine, which no row tells."""
UNHASHED_MEASURE = ("timeout_s", "repeated", "stop_below", "heldout_tokens")
KEPT = "kept"
"""Word of the preset of a rival that keeps activations instead of recomputing every layer."""
FALLBACK = "torch_adamw"
"""The engine's option that runs a slower part in place of its own: a cell with it is measured, and never ranked."""
IMPLEMENTATION = "implementation"
"""The field of a system that says where its code is, which its name stands for."""
NEUTRAL = ("num_micro_batches", "omp_num_threads", "huge_pages", "numactl", FALLBACK)
"""Knobs that are as good as not there while they are 0, false or empty: any system's, and the engine's last."""


def hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a composed config that can change a measurement: what a cell is known by."""
    kept = {name: value for name, value in config.items() if name not in UNHASHED}
    kept["measure"] = {name: value for name, value in config["measure"].items() if name not in UNHASHED_MEASURE}
    if kept["measure"].get("repeat") == 1:  # the cell as it was before there were repeats
        del kept["measure"]["repeat"]
    kept["system"] = effective(config["system"])
    kept["machine"] = {"device": config["machine"]["device"]}
    if config["machine"].get("device_bytes") is not None:  # a cap binds, and placement fills what it leaves
        kept["machine"]["device_bytes"] = config["machine"]["device_bytes"]
    return kept


def effective(system: Mapping[str, Any]) -> dict[str, Any]:
    """A system's settings without those that are as good as not there."""
    rival = "activation_checkpointing" in system  # and recomputed every layer before it could keep some
    neutral = (*NEUTRAL, "keep_activations") if rival else NEUTRAL
    return {name: value for name, value in system.items() if name != IMPLEMENTATION and (value or name not in neutral)}


def label(system: Any) -> Any:
    """A system's settings whose `preset` says, after its own word, whether a rival keeps activations.

    Settings that are no mapping, or whose preset is no text, are left for the check that follows.
    """
    if not isinstance(system, Mapping) or system.get("name") == "megatrain" or not system.get("keep_activations"):
        return system
    preset = system.get("preset") or ""
    if not isinstance(preset, str) or KEPT in preset.split():
        return system
    return {**system, "preset": f"{preset} {KEPT}".strip()}


def published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as its row has it: of where things lie on this machine, a folder's own name alone."""
    kept = {name: value for name, value in config.items() if name != "time_limit_s"}
    kept["output_dir"] = Path(config["output_dir"]).name
    kept["machine"] = {name: value for name, value in config["machine"].items() if name not in PATHS}
    own = {name: Path(value).name for name, value in config["system"].items() if name in PATHS and isinstance(value, str)}
    kept["system"] = {**config["system"], **own}
    return kept


def digest(value: Any) -> str:
    """Twelve hex digits."""
    return hashlib.sha256(json.dumps(_keyed(value), sort_keys=True, default=str).encode()).hexdigest()[:12]


def file_id(path: Path) -> str:
    """What tells one file of rows from others on this machine, here and in W&B."""
    return digest(str(path.resolve()))


def configuration(config: Mapping[str, Any]) -> str:
    """Digest of what the repeats of one measurement share: all that a cell is known by but the number of the repeat."""
    return digest(hashed({**config, "measure": {**config["measure"], "repeat": 1}}))


def comparison_key(config: Mapping[str, Any]) -> str:
    """Digest of what two cells must share for their losses to be comparable: all but the system's own knobs and the timing."""
    shared = {name: value for name, value in hashed(config).items() if name not in ("system", "measure")}
    return digest({**shared, "machine": {"device": config["machine"]["device"]}, "dtype": config["system"]["dtype"]})


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field of a nested config."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _keyed(value: Any) -> Any:
    """The same with text for keys, as JSON has them: keys of two types cannot be sorted."""
    if isinstance(value, Mapping):
        return {str(key): _keyed(item) for key, item in value.items()}
    return [_keyed(item) for item in value] if isinstance(value, list) else value
