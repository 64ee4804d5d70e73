"""What the config leaves to the machine: its device, and the largest model that fits every system
of a study.

Invariant: what is chosen replaces `auto` before a cell is hashed, so a row never says `auto`.

`fitting` starts `python -m sweeps.auto < configs.json`, which plans in a process of its own and
prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from baselines.checkpoint_folder import spec_of
from sweeps import environment
from sweeps.checks import build_group, require
from sweeps.config import Cell, cell_from
from sweeps.groups import Measure, require_numactl
from sweeps.identity import label

CONF = Path(__file__).resolve().parent.parent / "conf"
CHOICE = ("fallback", "candidates", "systems")
"""Fields of conf/model/auto.yaml."""
NAMELESS = ("auto", "checkpoint")
"""Files of conf/model that no model is called after."""
MOST_RANKS = {"cuda": 8, "cpu": 2}
"""How far a study of ranks goes: where there are several GPUs, beyond them by prediction. On the
CPU two show that it works."""
HEADROOM = 0.92
"""Share of the memory that a model chosen unasked may plan to fill.

The CUDA context and fragmentation take the rest."""


@lru_cache(maxsize=1)
def device() -> str:
    """cuda where torch sees a GPU, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def register(planned: str | None = None) -> None:
    """Register what the YAML may compute.

    `${by_device:A,B}` is A on the CPU and B on a GPU, of this machine or of the `planned` one;
    `${sequences:T,L}` is how many sequences of L tokens make T, one at least; `${threads:}` and
    `${numa:}` are the numbers of threads and the arguments of numactl that a search may try here;
    `${ranks:DEVICE}` the numbers of ranks that a study on that device goes through, 1 on the other;
    `${times:A,B,...}` is their product.
    """
    OmegaConf.register_new_resolver(
        "ranks", lambda kind: ranks(kind) if kind == (planned or device()) else "1", replace=True
    )
    OmegaConf.register_new_resolver("threads", threads, replace=True)
    OmegaConf.register_new_resolver("numa", numa, replace=True)
    OmegaConf.register_new_resolver(
        "times", lambda *factors: math.prod(map(int, factors)), replace=True
    )
    OmegaConf.register_new_resolver(
        "sequences", lambda tokens, length: max(1, int(tokens) // max(1, int(length))), replace=True
    )
    OmegaConf.register_new_resolver(
        "by_device",
        lambda cpu, cuda: cuda if (planned or device()) == "cuda" else cpu,
        replace=True,
    )


def ranks(kind: str) -> str:
    """1, 2, 4 and so on; 1 where there is one GPU, or one core and no GPU."""
    there = torch.cuda.device_count() if kind == "cuda" else len(os.sched_getaffinity(0))
    most = MOST_RANKS[kind] if there > 1 else 1
    return ",".join(str(1 << power) for power in range(most.bit_length()))


def threads() -> str:
    """Sweep over 0 (a system's own choice), a quarter, half and all of the cores."""
    cores = len(os.sched_getaffinity(0))
    return (
        f"choice({','.join(map(str, sorted({0, *(max(1, cores // part) for part in (4, 2, 1))})))})"
    )


@lru_cache(maxsize=1)
def numa() -> str:
    """Sweep over the bindings that numactl takes here: none, all nodes in turn, each node alone.

    It is none alone where there is one node, or no numactl.
    """
    numbers = environment.numa_nodes()
    bindings = [
        "--interleave=all",
        *(f"--cpunodebind={number} --preferred={number}" for number in numbers),
    ]
    taken = [""]
    for binding in bindings if len(numbers) > 1 else ():
        with contextlib.suppress(ValueError):
            require_numactl(tuple(binding.split()))
            taken.append(binding)
    return f"choice({','.join(map(repr, taken))})"


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The plain config of one cell with device, model and total_steps settled. Raises ValueError,
    one line."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    require("", plain, ("machine", "measure", "model", "process", "recipe"))
    require("machine.", plain["machine"], ("device",))
    require("model.", plain["model"], ())
    require("process.", plain["process"], ())
    if plain.get("system"):
        plain["system"] = label(plain["system"])
    else:  # ~system, of which the mode is left
        plain.pop("system", None)
    if plain["machine"]["device"] == "auto":
        plain["machine"]["device"] = device()
    if plain["machine"]["device"] == "cuda" and device() != "cuda":
        raise ValueError(
            "machine.device: got 'cuda', allowed cpu (torch sees no GPU here); leave it at auto"
        )
    _require_gpus(plain)
    if plain["model"].get("name") == "auto":
        plain["model"] = _model(plain)
    plain["model"] = with_checkpoint(plain["model"])
    if plain["recipe"].get("total_steps") is None:
        plain["recipe"]["total_steps"] = build_group(Measure, "measure", plain).num_steps
    return plain


def _require_gpus(plain: Mapping[str, Any]) -> None:
    """ValueError, one line, for more GPUs than there are, and more than can be predicted from
    several."""
    asked, there = plain["process"].get("num_gpus", 1), torch.cuda.device_count()
    most = max(there, MOST_RANKS["cuda"]) if there > 1 else 1
    if plain["machine"]["device"] == "cuda" and isinstance(asked, int) and asked > most:
        allowed = f"1 to {most}, of which torch sees {there} here" if most > 1 else "1"
        raise ValueError(f"process.num_gpus: got {asked}, allowed {allowed}; give fewer")


def _model(plain: Mapping[str, Any]) -> dict[str, Any]:
    asked = plain["model"]
    require("model.", asked, CHOICE)
    for name in asked:
        if name not in ("name", *CHOICE):
            raise ValueError(
                f"model.{name}: got {asked[name]!r}, allowed beside a named model only; choose "
                "one, model=tiny for example"
            )
    for name in ("candidates", "systems"):
        if not isinstance(asked[name], list):
            raise ValueError(
                f"model.{name}: got {asked[name]!r}, allowed a list of names; give one"
            )
    if plain["machine"]["device"] == "cpu":
        return _load(asked["fallback"])
    candidates = tuple(asked["candidates"])
    shared = ("seed", "shape", "recipe", "data", "measure", "process", "logging", "machine")
    settings = json.dumps({key: plain[key] for key in shared})
    return _load(_largest(candidates, tuple(asked["systems"]), asked["fallback"], settings))


def smallest(cells: Iterable[Cell], asked: Mapping[str, Any]) -> str:
    """The override of model=auto (asked: its fields) that gives all cells the smallest model that
    any of them got, so that it fits every one."""
    chosen = {cell.model.name for cell in cells}
    fitting = [name for name in asked["candidates"] if name in chosen]
    last = "" if asked["fallback"] in chosen or not fitting else fitting[-1]  # largest first
    return f"model.candidates=[{last}]"


def with_checkpoint(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's group, filled in from the checkpoint where it names one; its own config lies over
    the checkpoint's. ValueError, one line, where there is none."""
    if "checkpoint" not in model:
        return model
    path = model["checkpoint"]
    if not isinstance(path, str) or not path.strip():
        raise ValueError(
            f"model.checkpoint: got {path!r}, allowed the path of a folder; give it in quotes, or "
            "choose another model"
        )
    spec = spec_of(path)
    if model.get("model_type", spec.model_type) != spec.model_type:
        raise ValueError(
            f"model.model_type: got {model['model_type']!r}, allowed {spec.model_type}, which the "
            "checkpoint is of; leave it out"
        )
    require("model.", model, ("config",))
    require("model.config.", model["config"], ())
    config = OmegaConf.merge(spec.config, model["config"])
    filled = {
        "name": spec.name if model.get("name") is None else model["name"],
        "model_type": spec.model_type,
        "config": OmegaConf.to_container(config),
        "checkpoint": spec.checkpoint,
        "checkpoint_digest": spec.checkpoint_digest,
    }
    return {**model, **filled}


def _load(name: str) -> dict[str, Any]:
    path = CONF / "model" / f"{name}.yaml"
    if name in NAMELESS or not path.exists():
        allowed = ", ".join(
            sorted(item.stem for item in path.parent.glob("*.yaml") if item.stem not in NAMELESS)
        )
        raise ValueError(f"model.candidates: got {name!r}, allowed {allowed}; choose among these")
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(loaded, dict)
    return loaded


@lru_cache(maxsize=8)
def _largest(
    candidates: Sequence[str], systems: Sequence[str], fallback: str, settings: str
) -> str:
    shared = json.loads(settings)
    if shared["recipe"]["total_steps"] is None:
        shared["recipe"]["total_steps"] = 1 << 30
    asked = [
        {
            **shared,
            "experiment": "auto",
            "output_dir": ".",
            "model": _load(candidate),
            "system": _system(system),
        }
        for candidate in candidates
        for system in systems
    ]
    command = [sys.executable, "-m", "sweeps.auto"]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"model: got 'auto', but planning failed ({last[:300]}); name a model, for example "
            "model=qwen2.5-0.5b"
        )
    return next(
        (name for name in candidates if name not in json.loads(done.stdout.splitlines()[-1])),
        fallback,
    )


def _system(name: str) -> dict[str, Any]:
    """The settings of conf/system/NAME.yaml, with those of the files that it builds on."""
    composing = GlobalHydra.instance().is_initialized()  # as where a cell of model=auto is composed
    with (
        contextlib.nullcontext()
        if composing
        else initialize_config_dir(str(CONF), version_base="1.3")
    ):
        loaded: Any = OmegaConf.to_container(
            compose("config", [f"system={name}"]).system, resolve=True
        )
    assert isinstance(loaded, dict)
    return loaded


def too_large(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The models that some system of `configs` has no room for.

    A system that cannot run here has no say.
    """
    from baselines.system import Unsupported
    from sweeps.outlook import built, refusal_of

    refused: set[str] = set()
    for cell in map(cell_from, configs):
        with contextlib.suppress(Unsupported):
            if cell.model.name not in refused and refusal_of(built(cell).plan(), cell, HEADROOM):
                refused.add(cell.model.name)
    return refused


if __name__ == "__main__":
    print(json.dumps(sorted(too_large(json.load(sys.stdin)))))
