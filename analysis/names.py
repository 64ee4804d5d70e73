"""What a system is called and in which colour it is drawn, everywhere the same."""

from typing import Any

import pandas as pd

SYSTEMS: dict[str, tuple[str, str, str]] = {
    "megatrain": ("MegaTrain", "#1f5fa8", "s"),
    "megatrain_fast": ("MegaTrain fast", "#1f5fa8", "s"),
    "megatrain_fast_fp32": ("MegaTrain fast, fp32 master", "#5aa9c9", "s"),
    "megatrain_fast_bf16": ("MegaTrain fast, bf16 master", "#c0392b", "s"),
    "megatrain_stream": ("MegaTrain stream", "#6fa8dc", "o"),
    "megatrain_paper": ("MegaTrain paper", "#9db4cc", "p"),
    "megatrain_long": ("MegaTrain long", "#3d7a99", "h"),
    "published_megatrain": ("MegaTrain, authors' code", "#7d8ea3", "X"),
    "zero3": ("ZeRO-3", "#e0701f", "^"),
    "zero3_twinflow": ("Twin-Flow", "#3f8f3a", "D"),
    "zero3_optimizer": ("ZeRO-3, optimizer offloaded", "#f0a868", "<"),
    "zero2": ("ZeRO-2", "#b94082", "v"),
    "superoffload": ("SuperOffload", "#5f4690", "P"),
    "zenflow": ("ZenFlow", "#b89a1c", "*"),
    "zero_infinity": ("ZeRO-Infinity", "#6b461d", "d"),
    "fsdp2": ("FSDP2", "#2a9d8f", ">"),
    "fsdp2_grad_op": ("FSDP2, one gather", "#83c5be", "8"),
    "torchao_offload": ("torchao offload", "#7e7e7e", "H"),
    "in_memory": ("in memory", "#2b2b2b", "."),
    "lora": ("LoRA", "#c2185b", "1"),
    "qlora": ("QLoRA", "#e58bb0", "2"),
}
"""Family -> name, colour, marker; in the order of legends. The engine is in shades of blue."""
OTHER = ("#a0a0a0", "X")
MODES = {"kept": "activations kept", "tuned": "tuned", "compiled": "compiled"}
STATUSES = {
    "oom_device": "out of device memory",
    "oom_host": "out of host memory",
    "timeout": "timed out",
    "nonfinite": "loss not finite",
    "unsupported": "unsupported",
    "wont_fit": "does not fit",
    "error": "error",
}
THROTTLES = {
    "sw_power_cap": "power",
    "hw_power_brake": "power",
    "sw_thermal": "heat",
    "hw_thermal": "heat",
    "hw_slowdown": "the board",
    "sync_boost": "other GPUs",
    "applications_clocks": "a set clock",
}
"""What held the clock down, by NVML's name; an idle device and its display are no such thing."""
SETTINGS = {
    "system.depth": "weight slots",
    "system.streams": "CUDA streams",
    "system.checkpoint_interval": "layers between kept inputs",
    "system.gradient_slabs": "pinned gradient slabs",
    "system.optimizer_overlap": "optimizer overlapped",
    "recipe.clip_norm": "clip norm",
    "system.pinned": "host memory pinned",
    "system.master": "master weights",
    "system.device_optimizer": "blocks with optimizer state on the device",
    "system.preset": "switch",
    "measure.save": "state saved in every window",
    "machine.device_bytes": "device memory allowed (GB)",
    "num_params": "parameters (billions)",
    "batch_size": "sequences per step",
    "seq_len": "tokens per sequence",
    "system": "system",
    "tokens_per_s": "tokens/s",
    "tflops_6p": "TFLOPS (6P)",
}
"""Config paths and columns in the words of axes and tables."""
VALUES: dict[str, dict[Any, str]] = {
    "system.gradient_slabs": {0: "one per block"},
    "system.device_optimizer": {0: "none", -1: "as many as fit"},
    "system.optimizer_overlap": {True: "overlapped", False: "in turn"},
    "recipe.clip_norm": {0: "no clipping", 1: "clipping"},
    "measure.save": {True: "saved", False: "not saved"},
    "system.pinned": {"exact": "exact size", "torch": "powers of two", "none": "pageable"},
    "system.master": {"split": "fp32, split", "fp32": "fp32, apart", "bf16": "bf16 alone"},
}


def throttled(reasons: Any) -> str:
    """`power 80%`: what held the clock down, for which share of the time; nothing where unknown."""
    known = pd.Series(reasons if isinstance(reasons, dict) else {}, dtype=float)
    shares = known.groupby(pd.Series(THROTTLES), sort=False).max()
    return ", ".join(f"{word} {share:.0%}" for word, share in shares.items())


def family_name(family: str) -> str:
    """`Twin-Flow`; of a rung of the ladder, the switch it turns: `recompute once`."""
    if family in SYSTEMS:
        return SYSTEMS[family][0]
    return family.removeprefix("megatrain_").lstrip("0123456789_").replace("_", " ") or family


def name(line: Any) -> str:
    """`Twin-Flow, activations kept, compiled`: the family and how it was run."""
    modes = [MODES.get(word, word) for word in line["mode"].split()]
    return ", ".join([family_name(line["family"]), *modes])


def short_name(line: Any, others: pd.DataFrame) -> str:
    """The name, less what all rivals in `others` share: what is true of all tells nothing apart."""
    rivals = others[~others["family"].str.startswith("megatrain")]
    words = [set(mode.split()) for mode in rivals["mode"]]
    shared = set.intersection(*words) if words else set()
    mode = " ".join(word for word in line["mode"].split() if word not in shared)
    return name({"family": line["family"], "mode": mode})


def look(family: str) -> dict[str, Any]:
    """The family's colour and marker."""
    return {"color": color(family), "marker": marker(family)}


def color(family: str) -> str:
    """The family's colour."""
    usual = SYSTEMS["megatrain"] if family.startswith("megatrain") else ("", *OTHER)
    return SYSTEMS.get(family, usual)[1]


def marker(family: str) -> str:
    """The family's marker."""
    return SYSTEMS.get(family, ("", *OTHER))[2]


def setting(path: str) -> str:
    """A config path in words."""
    return SETTINGS.get(path, path.rpartition(".")[2].replace("_", " "))


def value(path: str, given: Any) -> str:
    """A value in words: `24` GB of bytes, `32K` tokens, `on` for true."""
    if path == "machine.device_bytes":
        return "all" if given is None or pd.isna(given) else f"{given / 1e9:.0f}"
    if path == "num_params":
        return f"{given / 1e9:.1f}B" if given >= 1e8 else f"{given / 1e6:.1f}M"
    if path == "seq_len" and given >= 1024 and given % 1024 == 0:
        return f"{given // 1024}K"
    if given in VALUES.get(path, {}):
        return VALUES[path][given]
    if isinstance(given, bool):
        return "on" if given else "off"
    return str(int(given)) if isinstance(given, float) and given.is_integer() else str(given)


def machine(details: dict[str, Any]) -> str:
    """`one H200, 64 cores, 550 GB of host memory`: decimal GB, as everywhere."""
    gpu = f"one {details['gpu'].split()[-1]}" if details.get("gpu") else "no GPU"
    host = details.get("host_bytes")
    told = f", {host / 1e9:.0f} GB of host memory" if host else ""
    return f"{gpu}, {details.get('num_cores')} cores{told}"


def work(lines: pd.DataFrame) -> str:
    """`qwen2.5-7b, 32 x 1024 tokens a step`, as far as it is one for all lines."""
    first, models = lines.iloc[0], lines["model"].nunique()
    if len(lines[["model", "batch_size", "seq_len"]].drop_duplicates()) == 1:
        return f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens a step"
    return str(first["model"]) if models == 1 else ""


def setup(lines: pd.DataFrame) -> str:
    """What was trained, and on which machine: what stands below every figure."""
    parts = work(lines), machine(lines.iloc[0]["machine_details"])
    return "; ".join(filter(None, parts))
