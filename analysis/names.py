"""What a system is called and in which colour it is drawn, everywhere the same."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

WORDS = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
"""What people read; the file says what stands for what."""
SYSTEMS: dict[str, tuple[str, str, str]] = WORDS["systems"]
STATUSES: dict[str, str] = WORDS["statuses"]
SETTINGS: dict[str, str] = WORDS["settings"]
VALUES: dict[str, dict[Any, str]] = WORDS["values"]
GPU_WORDS = re.compile(r"NVIDIA |GeForce |[ -](SXM\d|\d+GB?|HBM\d\w*)(?![\w])")
"""What of a GPU's name is not said."""
UNLIKE = 0.1
"""How far a model's size is from what its name says where both are said."""


def throttled(reasons: Any) -> str:
    """`power 80%`: what held the clock down, for which share of the time; nothing where unknown."""
    known = pd.Series(reasons if isinstance(reasons, dict) else {}, dtype=float)
    shares = known.groupby(pd.Series(WORDS["throttles"]), sort=False).max()
    return ", ".join(f"{word} {share:.0%}" for word, share in shares.items())


def family_name(family: str) -> str:
    """`Twin-Flow`; of a rung of the ladder, the switch it turns: `recompute once`."""
    if family in SYSTEMS:
        return SYSTEMS[family][0]
    return family.removeprefix("megatrain_").lstrip("0123456789_").replace("_", " ") or family


def name(line: Any) -> str:
    """`Twin-Flow, activations kept, compiled`: the family and how it was run."""
    modes = [WORDS["modes"].get(word, word) for word in line["mode"].split()]
    return ", ".join([family_name(line["family"]), *modes])


def look(family: str) -> dict[str, Any]:
    """The family's colour and marker."""
    other = SYSTEMS["megatrain"] if family.startswith("megatrain") else ("", "#a0a0a0", "X")
    _, color, marker = SYSTEMS.get(family, other)
    return {"color": color, "marker": marker}


def setting(path: str) -> str:
    """A config path in words."""
    return SETTINGS.get(path, path.rpartition(".")[2].replace("_", " "))


def value(path: str, given: Any) -> str:
    """A value in words: `24` GB of bytes, `32K` tokens, `on` for true."""
    if path in ("machine.device_bytes", "machine.host_bytes"):
        return "all" if given is None or pd.isna(given) else f"{given / 1e9:.0f}"
    if path == "num_params":
        return f"{given / 1e9:.1f}B" if given >= 1e8 else f"{given / 1e6:.1f}M"
    if path == "seq_len" and given >= 1024 and given % 1024 == 0:
        return f"{int(given) // 1024}K"
    if isinstance(given, Hashable) and given in VALUES.get(path, {}):
        return VALUES[path][given]
    if given is None or given != given:
        return "—"
    if isinstance(given, bool):
        return "on" if given else "off"
    return str(int(given)) if isinstance(given, float) and given.is_integer() else str(given)


def gpu(driver_name: str) -> str:
    """`H100` of NVML's `NVIDIA H100 80GB HBM3`: without maker, memory and socket."""
    return GPU_WORDS.sub("", driver_name).strip()


def machine(lines: pd.DataFrame) -> str:
    """`one H200, 64 cores, 550 GB of host memory`: decimal GB, as everywhere. GPUs are those that
    were trained on, from the fewest to the most; lines of unlike machines name all there were."""
    known: dict[str, set[Any]] = {
        of: {details[of] for details in lines["machine_details"] if details.get(of)}
        for of in ("gpu", "host_bytes")
    }
    told_gpu = "no GPU"
    if known["gpu"]:
        numbers = sorted({int(lines["num_ranks"].min()), int(lines["num_ranks"].max())})
        many = " to ".join(map(str, numbers)) if numbers != [1] else "one"
        named = " or ".join(sorted({gpu(name) for name in known["gpu"]}))
        told_gpu = f"{many} {named}{'s' if numbers != [1] else ''}"
    told = f"{told_gpu}, {' or '.join(_cores(lines))} cores"
    host = sorted({f"{num_bytes / 1e9:.0f}" for num_bytes in known["host_bytes"]}, key=int)
    return (
        f"{told}, {' to '.join(dict.fromkeys((host[0], host[-1])))} GB of host memory"
        if host
        else told
    )


def _cores(lines: pd.DataFrame) -> list[str]:
    """`16`, or `16 of 64` where a process was kept to some of its host's, the fewest first."""
    counts = {
        (mine, details.get("host_cores") or mine)
        for details in lines["machine_details"]
        if (mine := details.get("num_cores"))
    }
    return [f"{mine} of {there}" if mine < there else str(mine) for mine, there in sorted(counts)]


def work(lines: pd.DataFrame) -> str:
    """`qwen2.5-7b, 32 x 1024 tokens a step, without clipping`, what is one for all lines."""
    first, models = lines.iloc[0], lines["model"].nunique()
    clipping = lines.reindex(columns=["recipe.clip_norm"])["recipe.clip_norm"]
    unlike = ", without clipping" if (clipping == 0).all() else ""
    model = f"{first['model']}{_size_unlike_its_name(first)}"
    if len(lines[["model", "batch_size", "seq_len"]].drop_duplicates()) == 1:
        return f"{model}, {first['batch_size']} x {first['seq_len']} tokens a step{unlike}"
    return f"{model}{unlike}" if models == 1 else ""


def _size_unlike_its_name(line: Any) -> str:
    """` of 20.3B parameters` for a dense-24b whose layers were set otherwise."""
    said = re.search(r"(\d+(?:\.\d+)?)b$", line["model"])
    size = line["num_params"]
    if not said or pd.isna(size) or abs(size / (float(said[1]) * 1e9) - 1) < UNLIKE:
        return ""
    return f" of {value('num_params', size)} parameters"


def setup(lines: pd.DataFrame) -> str:
    """What was trained, on which machine and how it was timed: what stands below every figure."""
    return "; ".join(filter(None, [work(lines), machine(lines), windows(lines)]))


def windows(lines: pd.DataFrame) -> str:
    """`windows of 2 to 4 steps`, of each of which a system pays the wait at its end."""
    steps = lines.reindex(columns=["measure.steps_per_window"])["measure.steps_per_window"]
    if not len(known := steps.dropna().astype(int)):
        return ""
    least, most = known.min(), known.max()
    many = f"{least} to {most}" if most > least else str(most)
    return f"windows of {many} step{'s' if most > 1 else ''}"
