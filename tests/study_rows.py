"""Fixture studies: rows as a study of each kind leaves them."""

from __future__ import annotations

import itertools
from typing import Any

from sweeps.result import Row
from tests.made_rows import curve, row

RUNGS = ("0_paper", "1_own_slabs", "2_overlap", "6_fast")


def config(recipe: dict[str, Any] | None = None, **system: Any) -> dict[str, Any]:
    composed = {"name": "megatrain", "dtype": "bfloat16", **system}
    machine = {"device": "cuda", "device_bytes": None}
    return {
        "system": composed,
        "recipe": recipe or {"clip_norm": 1.0},
        "measure": {"windows": 3},
        "machine": machine,
    }


def windows(step_s: float) -> list[float]:
    return [step_s, step_s * 1.004, step_s * 0.996]


def grid_rows() -> list[Row]:
    """Depth 1 to 3, streams 1 to 3: depth 1 costs half as much again; one OOM, one prediction, one
    with other numerics."""
    rows = []
    for depth, streams in itertools.product((3, 1, 2), (1, 2, 3)):
        common: dict[str, Any] = {
            "experiment": "double_buffering",
            "cell": f"{depth}{streams}",
            "preset": "stream",
        }
        common |= {"config": config(depth=depth, streams=streams), "agrees": True}
        step_s = (6.0 if depth == 1 else 4.0) * (1.2 if streams == 1 else 1.0)
        if (depth, streams) == (3, 1):
            rows.append(row("megatrain", status="oom_device", reason="141 GB", **common))
        elif (depth, streams) == (3, 2):
            rows.append(row("megatrain", status="wont_fit", plan={"step_s": 4.096}, **common))
        elif (depth, streams) == (2, 1):
            rows.append(
                row(
                    "megatrain",
                    windows(0.1),
                    **(common | {"agrees": False, "max_loss_difference": 0.1}),
                )
            )
        else:
            rows.append(row("megatrain", windows(step_s), **common))
    return rows


def ladder_rows() -> list[Row]:
    steps = zip(RUNGS, (6.0, 5.0, 4.0, 2.0), strict=True)
    common: dict[str, Any] = {"experiment": "ladder", "config": config(), "agrees": True}
    return [
        row("megatrain", windows(step_s), cell=rung, preset=rung, **common)
        for rung, step_s in reversed(list(steps))
    ]


def factor_rows() -> list[Row]:
    """Overlap on and off, with clipping and without."""
    settings = itertools.product((True, False), (1.0, 0))
    return [
        row(
            "megatrain",
            windows(2.0 + number),
            experiment="optimizer_overlap",
            cell=str(number),
            config=config(optimizer_overlap=overlap, recipe={"clip_norm": clip}),
        )
        for number, (overlap, clip) in enumerate(settings)
    ]


def size_rows() -> list[Row]:
    """Three sizes of two systems: the largest is predicted of one, does not fit for the other."""
    rows = []
    for system, preset in (("megatrain", "fast"), ("megatrain", "stream"), ("zero3", None)):
        for billions in (1, 2, 8):
            name, slow = f"{system}{preset}", {"fast": 1.0, "stream": 1.5}.get(str(preset), 3.0)
            common: dict[str, Any] = {
                "experiment": "model_size",
                "cell": f"{name}{billions}",
                "preset": preset,
            }
            common |= {"model": f"{billions}b", "num_params": billions * 10**9}
            if billions < 8:
                rows.append(row(system, windows(slow * billions), **common))
            elif system == "zero3":
                rows.append(row(system, status="wont_fit", reason="host", **common))
            else:
                rows.append(row(system, status="wont_fit", plan={"step_s": 10.0 * slow}, **common))
    return rows


def capped_rows(*caps: int | None) -> list[Row]:
    """Stream, fast and ZeRO-3 under caps of the device: ZeRO-3 has no room in the least."""
    rows = []
    for (system, preset), (number, cap) in itertools.product(
        (("megatrain", "stream"), ("megatrain", "fast"), ("zero3", None)), enumerate(caps)
    ):
        machine = {"machine": {"device": "cuda", "device_bytes": cap}}
        common: dict[str, Any] = {
            "experiment": "device_memory",
            "cell": f"{system}{preset}{cap}",
            "preset": preset,
        }
        common |= {"config": config(name=system) | machine}
        oom = system == "zero3" and number == 0
        step_s = windows({"stream": 4.0, "fast": 2.0}.get(str(preset), 8.0))
        rows.append(
            row(system, status="oom_device", reason="full", **common)
            if oom
            else row(system, step_s, **common)
        )
    return rows


def deep_rows() -> list[Row]:
    """Two systems at three depths under one model name, ZeRO-3 out of memory at the last, before
    anything was counted."""
    rows = []
    for system, layers in itertools.product(("megatrain", "zero3"), (28, 42, 56)):
        model = {
            "name": "qwen2.5-deep",
            "config": {"num_hidden_layers": layers, "hidden_size": 3584},
        }
        common: dict[str, Any] = {
            "experiment": "depth",
            "model": "qwen2.5-deep",
            "cell": f"{system}{layers}",
        }
        common |= {
            "preset": "stream" if system == "megatrain" else None,
            "num_params": layers * 10**8,
        }
        common |= {"config": config(name=system) | {"model": model}}
        if system == "zero3" and layers == 56:
            rows.append(
                row(system, status="oom_host", reason="killed", **(common | {"num_params": None}))
            )
        else:
            rows.append(
                row(system, windows(layers / (7 if system == "megatrain" else 3.5)), **common)
            )
    return rows


def batch_rows(**fields: Any) -> list[Row]:
    """Stream and fast at three batches, the measured ones with fields; streaming at the largest is
    only predicted."""
    rows = []
    for preset, batch in itertools.product(("stream", "fast"), (2, 8, 32)):
        common: dict[str, Any] = {
            "experiment": "batch_size",
            "batch_size": batch,
            "cell": f"{preset}{batch}",
            "preset": preset,
        }
        step_s = (1.0 + batch / 8) * (2 if preset == "stream" else 1)
        if (preset, batch) == ("stream", 32):
            rows.append(
                row(
                    "megatrain",
                    status="wont_fit",
                    plan={"step_s": 8.0, "window_step_s": 8.192},
                    **common,
                )
            )
        else:
            rows.append(
                row(
                    "megatrain",
                    windows(step_s),
                    tokens_per_s=batch * 1024 / step_s,
                    **(common | fields),
                )
            )
    return rows


def precision_rows() -> list[Row]:
    """Three masters: the second as the first but for rounding, the third loses updates and has more
    steps."""
    found = []
    for master, offset, num_steps in (("split", 0.0, 9), ("fp32", 1e-4, 9), ("bf16", 0.9, 12)):
        told: dict[str, Any] = {"caveat": "small updates are lost"} if master == "bf16" else {}
        told |= {
            "experiment": "precision",
            "cell": master,
            "preset": "stream",
            "losses": curve(num_steps, offset),
        }
        found.append(
            row(
                "megatrain",
                windows(3.0 if told.get("caveat") else 4.0),
                config=config(master=master),
                **told,
            )
        )
    return found


def scaled(batch: int, length: int, step_s: float, system: str = "megatrain", **fields: Any) -> Row:
    tokens_per_s = batch * length / step_s
    cell = f"{batch}x{length}{fields}"
    return row(
        system,
        windows(step_s),
        batch_size=batch,
        seq_len=length,
        cell=cell,
        tokens_per_s=tokens_per_s,
        **fields,
    )


def many_studies() -> list[Row]:
    """Three systems over size, depth, width, batch and context, as the ablations of conf measure
    them; the largest refused."""
    sizes = {
        "model_size": (0.494, 1.544, 3.4, 7.62, 14.8, 32.8, 72.7),
        "depth": (7.62, 11.1, 14.5, 21.3, 32.5, 43.4),
        "width": (1.95, 14.1, 18.9, 24.4, 37.6),
    }
    rows = []
    for number, (system, preset) in enumerate(
        (("megatrain", "stream"), ("megatrain", "fast"), ("zero3", None)), 1
    ):
        common: dict[str, Any] = {"preset": preset}
        for study, billions in sizes.items():
            for size in billions:
                params = round(size * 1e9)
                tflops = 300 / number * (1 - 0.1 * len(study) / 10)
                step_s = 6 * params * 32768 / tflops / 1e12
                fields: dict[str, Any] = {
                    "experiment": study,
                    "model": f"{study}{size}",
                    "num_params": params,
                }
                fields |= {"cell": f"{study}{size}{system}{preset}", **common}
                rows.append(
                    row(system, windows(step_s), **fields)
                    if size < 40
                    else row(system, status="wont_fit", **fields)
                )
        for batch in (2, 4, 8, 16, 32, 64, 96, 128, 192, 256):
            rows.append(
                scaled(
                    batch,
                    1024,
                    number * (0.5 + batch / 8),
                    system,
                    experiment="batch_size",
                    **common,
                )
            )
        for length in (1024 << power for power in range(10)):
            rows.append(
                scaled(
                    max(1, 32768 // length),
                    length,
                    number * 4.0,
                    system,
                    experiment="context_length",
                    **common,
                )
            )
    return rows
