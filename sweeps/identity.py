"""What a cell is known by: the part of a composed config that can change a measurement, as a
digest.

Invariant: the digests of rows stand. A setting that is as good as not there leaves a digest as it
was; a field that moved or is gone is hashed as it was first written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TUNED = Path(__file__).resolve().parent.parent / "conf" / "system" / "tuned"
"""Folder of what searches found, and of their trials (sweeps/tuner.py)."""
UNHASHED = ("experiment", "logging", "output_dir", "process", "time_limit_s")
"""Groups that cannot change a measurement; and `process`, which is hashed where it stood first."""
PATHS = {
    "checkout": ("published_megatrain", "slideformer"),
    "nvme_path": ("zero_infinity", "megatrain"),
}
"""Field of machine that says where something lies there -> the systems that are built with it. No
row has these fields."""
DRIVES = "drives"
"""Field of a row's machine: a digest of the folders on drives that its system used."""
CHECKPOINT = "checkpoint"
"""Field of a model that says where its weights lie on this machine. A row has the folder's name."""
UNHASHED_MEASURE = (
    "timeout_s",
    "repeated",
    "stop_below",
    "heldout_tokens",
    "heldout_every_window",
    "exact_match",
    "answer_pattern",
)
KEPT = "kept"
"""Word of the preset of a rival that keeps activations instead of recomputing every layer."""
FALLBACK = "torch_adamw"
"""The engine's option that runs a slower part in place of its own. A cell with it is never
ranked."""
IMPLEMENTATION = "implementation"
"""The field of a system that says where its code is, which its name stands for."""
NEUTRAL = (
    "num_micro_batches",
    "omp_num_threads",
    "huge_pages",
    "numactl",
    "disk_blocks",
    "keep_attention",
    "offload_attention",
    FALLBACK,
)
"""Knobs that are as good as not there while they are 0, false or empty."""
LEFT_OPEN = {"reload_weights": -1, "products": "plain"}
"""Knobs that are as good as not there at this value, which leaves all as it was before them."""
PLAIN = LEFT_OPEN["products"]
RANKS = ("num_gpus", "num_cpu_ranks")
"""Fields of process that are as good as not there while they are 1."""
MOVED = {
    "system.omp_num_threads": "process.omp_num_threads",
    "system.num_threads": "process.omp_num_threads",
    "system.huge_pages": "process.huge_pages",
    "system.numactl": "process.numactl",
    "measure.timeout_s": "process.timeout_s",
    "system.checkout": "machine.checkout",
    "system.nvme_path": "machine.nvme_path",
}
"""Where a field of older rows stands now. A config without `process` is of that age."""
RIVAL = {"activation_checkpointing": True}
DEEPSPEED = {**RIVAL, "pin_memory": True}
STAGE3 = {**DEEPSPEED, "max_reuse_distance": 1_000_000_000}
RETIRED: Mapping[str, Mapping[str, Any]] = {
    "in_memory": RIVAL,
    "fsdp2": RIVAL,
    "torchao_offload": RIVAL,
    "zero2": DEEPSPEED,
    "zenflow": {**DEEPSPEED, "select_interval": 0},
    "zero3": STAGE3,
    "superoffload": STAGE3,
    "zero_infinity": {**STAGE3, "buffer_count": 12, "io_block_size": 1 << 20, "nvme_path": None},
    "published_megatrain": {"checkout": None},
    "megatrain": {"num_threads": 0, "poison": False},
}
"""System -> knobs that no row ever had at another value. They are gone from the config, and are
hashed all the same."""
UNDECIDED = {"decayed": "all"}
"""Fields of the recipe that older rows have not, and what they then stood at."""
RETIRED_DATA = {"source": "stdlib"}
FILES = "files"
"""The field of data that a text of files has, and the one of the standard library has not."""


def hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that a cell is called after: its settings and their label."""
    config = as_first_written(config)
    kept = {name: value for name, value in config.items() if name not in UNHASHED}
    measure = config["measure"].items()
    kept["measure"] = {name: value for name, value in measure if name not in UNHASHED_MEASURE}
    if kept["measure"].get("repeat") == 1:  # the cell as it was before there were repeats
        del kept["measure"]["repeat"]
    if not kept["measure"].get("save"):  # as it was before states were saved beside windows
        kept["measure"].pop("save", None)
    if CHECKPOINT in (config.get("model") or {}):  # its digest stays, wherever it lies
        kept["model"] = {key: value for key, value in config["model"].items() if key != CHECKPOINT}
    kept["system"] = effective(config["system"])
    if "recipe" in config:
        kept["recipe"] = dict(config["recipe"])
        _drop(kept["recipe"], UNDECIDED)
    kept["machine"] = {"device": config["machine"]["device"]}
    if config["machine"].get("device_bytes") is not None:  # placement fills what the cap leaves
        kept["machine"]["device_bytes"] = config["machine"]["device_bytes"]
    if (drives := drives_of(config)) is not None:
        kept["machine"][DRIVES] = drives
    if config["system"].get("disk_blocks") and config["machine"].get("host_bytes") is not None:
        kept["machine"]["host_bytes"] = config["machine"]["host_bytes"]  # what must be on disk
    return kept


def drives_of(config: Mapping[str, Any]) -> str | None:
    """Digest of the folders on drives that a cell uses, whose speed is theirs; None where it uses
    none, and of a row from before there was one."""
    machine, system = config["machine"], config["system"]
    if machine.get(DRIVES) is not None:
        return str(machine[DRIVES])
    uses = system.get("name") == "zero_infinity" or system.get("disk_blocks")
    if not uses or not isinstance(machine.get("nvme_path"), str):
        return None
    folders = folders_of(machine["nvme_path"])
    return digest([os.path.realpath(os.path.expanduser(folder)) for folder in folders])


def folders_of(nvme_path: str | None) -> list[str]:
    """The folders of machine.nvme_path."""
    return [folder for folder in (nvme_path or "").split(os.pathsep) if folder]


def kind(machine: Mapping[str, Any]) -> str:
    """GPU (or cpu) and cores of a row's machine, `h200-16cores`: what a measurement depends on
    most, and no host's name."""
    gpu = str(machine.get("gpu") or "cpu").removeprefix("NVIDIA ")
    return f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{machine.get('num_cores')}cores"


def searched(choice: str, model: str, machine: Mapping[str, Any]) -> str:
    """Name of the files in TUNED that a search from `system=choice` writes for a model on such a
    machine: a search for another model leaves them alone."""
    name = re.sub(r"[^\w.]+", "-", f"{choice}-{model}")
    return f"{name}-{kind(machine)}"


def as_first_written(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config as the first rows would have it, whose digests stand; theirs are that already."""
    if "process" not in config:
        return config
    asked = (*NEUTRAL, *RANKS)
    moved = {name: value for name, value in config["process"].items() if name in asked}
    retired = RETIRED.get(config["system"]["name"], {})
    system = {**retired, **moved, **config["system"]}
    return {**config, "data": _text(config["data"]), "system": system}


def _text(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a text is known by. That of files is known by its digest, which stands for their bytes,
    the tokenizer and the fields that are read, and not by where they lie."""
    if FILES not in data:
        return {**RETIRED_DATA, **data}
    return {name: data[name] for name in ("heldout_fraction", "digest") if name in data}


def current(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a row of any age, its fields where they stand now."""
    if "process" in config:
        return dict(config)
    groups: dict[str, Any] = {"process": {}}
    groups |= {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()
    }
    for old, new in MOVED.items():
        (group, name), (place, field) = old.split("."), new.split(".")
        value = groups.get(group, {}).pop(name, None)
        if value:
            groups.setdefault(place, {})[field] = value
    _drop(groups.get("system", {}), RETIRED.get(str(groups.get("system", {}).get("name")), {}))
    _drop(groups.get("data", {}), RETIRED_DATA)
    return groups


def _drop(group: dict[str, Any], retired: Mapping[str, Any]) -> None:
    """Take out of the group what it has of the retired fields at their one value."""
    for name, value in retired.items():
        if group.get(name, value) == value:
            group.pop(name, None)


def in_force(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a row of any age as one of today, without what is as good as not there."""
    groups = current(config)
    for name in ("system", "process"):
        groups[name] = effective(groups.get(name, {}))
    groups["process"] = {**dict.fromkeys(RANKS, 1), **groups["process"]}
    groups["system"] = {"products": PLAIN, **groups["system"]}
    if groups["system"].get("name") == "megatrain":
        groups["system"] = {"disk_blocks": 0, **groups["system"]}
    if "recipe" in groups:
        groups["recipe"] = dict(groups["recipe"])
        _drop(groups["recipe"], UNDECIDED)
    return groups


def effective(system: Mapping[str, Any]) -> dict[str, Any]:
    """A system's settings without those that are as good as not there."""
    rival = (
        system.get("name") != "megatrain"
    )  # and recomputed every layer before it could keep some
    neutral = (*NEUTRAL, "keep_activations") if rival else NEUTRAL
    return {
        name: value
        for name, value in system.items()
        if name != IMPLEMENTATION
        and (value or name not in neutral)
        and (value != 1 or name not in RANKS)
        and (name not in LEFT_OPEN or value != LEFT_OPEN[name])
    }


def identity(config: Mapping[str, Any]) -> str:
    """Digest of what a measurement depends on: two presets of equal settings are one cell."""
    known = hashed(config)
    unlabelled = {name: value for name, value in known["system"].items() if name != "preset"}
    return digest({**known, "system": unlabelled})


def relabelled(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a row with the label of another config of the same identity, or without one."""
    bare = {name: value for name, value in config.get("system", {}).items() if name != "preset"}
    word = {name: value for name, value in other["system"].items() if name == "preset"}
    return {**config, "system": {**bare, **word}}


def label(system: Any) -> Any:
    """A system's settings, in whose `preset` a rival that keeps activations says so.

    Settings that are no mapping, or whose preset is no text, are left for the check that follows.
    """
    if not isinstance(system, Mapping) or system.get("name") == "megatrain":
        return system
    if not system.get("keep_activations"):
        return system
    preset = system.get("preset") or ""
    if not isinstance(preset, str) or KEPT in preset.split():
        return system
    return {**system, "preset": f"{preset} {KEPT}".strip()}


def published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as its row has it: without this machine's paths, but for the names of the output
    folder and of the checkpoint's."""
    kept = {name: value for name, value in config.items() if name != "time_limit_s"}
    kept["output_dir"] = Path(config["output_dir"]).name
    kept["machine"] = {
        name: value for name, value in config["machine"].items() if name not in PATHS
    }
    if (drives := drives_of(config)) is not None:
        kept["machine"][DRIVES] = drives
    if FILES in config["data"]:
        names = {name: _names(config["data"].get(name)) for name in (FILES, "tokenizer")}
        kept["data"] = {**config["data"], **names}
    if CHECKPOINT in config["model"]:
        kept["model"] = {**config["model"], CHECKPOINT: Path(config["model"][CHECKPOINT]).name}
    return kept


def _names(paths: Any) -> Any:
    """Paths without the folders of this machine."""
    if isinstance(paths, (list, tuple)):
        return [_names(path) for path in paths]
    return Path(paths).name if isinstance(paths, str) else paths


def digest(value: Any) -> str:
    """Twelve hex digits."""
    return hashlib.sha256(
        json.dumps(_keyed(value), sort_keys=True, default=str).encode()
    ).hexdigest()[:12]


def file_id(path: Path) -> str:
    """What tells one file of rows from others on this machine, here and in W&B."""
    return digest(str(path.resolve()))


def configuration(config: Mapping[str, Any]) -> str:
    """Digest of what the repeats of one measurement share: all but the number of the repeat."""
    return digest(hashed({**config, "measure": {**config["measure"], "repeat": 1}}))


def comparison_key(config: Mapping[str, Any]) -> str:
    """Digest of what two cells share whose losses are comparable: not the knobs, not the timing."""
    shared = {
        name: value for name, value in hashed(config).items() if name not in ("system", "measure")
    }
    return digest(
        {
            **shared,
            "machine": {"device": config["machine"]["device"]},
            "dtype": config["system"]["dtype"],
            **({"products": products} if (products := products_of(config)) != PLAIN else {}),
        }
    )


def products_of(config: Mapping[str, Any]) -> str:
    """What the layers of a config of any age multiply in."""
    return str(config.get("system", {}).get("products", PLAIN))


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field of a nested config."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _keyed(value: Any) -> Any:
    """The same with text for keys, as in JSON: keys of two types cannot be sorted."""
    if isinstance(value, Mapping):
        return {str(key): _keyed(item) for key, item in value.items()}
    return [_keyed(item) for item in value] if isinstance(value, list) else value
