"""What the paper says (paper.csv), claim by claim, beside what these rows measured.

Invariant: a claim is quoted with its source, trust and flag, never corrected. Machines and batches
differ: read shapes, not races. trust: P the paper's own words; S2 two or more independent notes
agree; S1 one note; R the public repository.
"""

from pathlib import Path

import pandas as pd

from analysis import names, speeds
from analysis.studies import Study

CSV = Path(__file__).with_name("paper.csv")
MODELS = {name: f"qwen2.5-{name.lower()}" for name in ("3B", "7B", "14B", "32B", "72B")}
SIZES = {"7B": 7615616512, "14B": 14770033664, "32B": 32763876352}
OURS = {
    "megatrain": ("megatrain_fast", "megatrain_long", "megatrain_stream"),
    "zero3": ("zero3",),
    "fsdp2": ("fsdp2",),
    "in_memory": ("in_memory",),
}
"""The paper's systems, and which of ours is the same; of several the fastest that was measured."""
NUMERIC = ("value", "batch_size", "seq_len")


def claims() -> pd.DataFrame:
    """Every claim, in order; `oom` where it ran out of memory."""
    found = pd.read_csv(CSV, dtype=str, keep_default_na=False)
    numbers = {name: pd.to_numeric(found[name].replace("OOM", "")) for name in NUMERIC}
    return found.assign(oom=found["value"] == "OOM", **numbers)


def along(study: Study) -> pd.DataFrame:
    """system, x and y of the claims on a study's axes: TFLOPS, or tokens/s from step times.

    A step time that the claim's own flag calls impossible is left out.
    """
    told = claims()
    told = told[(told["study"] == study.paper) & (told["hardware"] == "GH200")]
    if study.value == "tflops_6p":
        told = told[told["metric"] == "tflops"].assign(y=told["value"], x=told["model"].map(SIZES))
    else:
        told = told[(told["metric"] == "step_s") & ~told["flag"].str.contains("would need")]
        told = told.assign(
            y=told["batch_size"] * told["seq_len"] / told["value"], x=told["seq_len"]
        )
    return told.dropna(subset=["x", "y"])[["system", "x", "y"]]


def table(lines: pd.DataFrame) -> pd.DataFrame:
    """Claims of TFLOPS, each with the fastest line here of the same system, model and length."""
    ready = lines[speeds.comparable(lines)]
    told = claims()
    told = told[(told["metric"] == "tflops") & told["study"].isin(["headline", "context"])]
    shown = []
    for _, claim in told.iterrows():
        families = OURS.get(claim["system"], ())
        same = ready["family"].isin(families) & (ready["seq_len"] == claim["seq_len"])
        mine = ready[same & (ready["model"] == MODELS.get(claim["model"]))]
        best = speeds.fastest(mine) if len(mine) else None
        attention = claim["study"] == "context"
        shown.append(
            {
                "system": names.family_name(claim["system"]),
                "model": claim["model"],
                "tokens": f"{claim['seq_len']:,.0f}",
                "the paper's machine": claim["hardware"],
                "paper": "out of memory" if claim["oom"] else f"{claim['value']:,.0f}",
                "here": "—" if best is None else f"{tflops(best, attention=attention):,.0f}",
                "unit": "TFLOPS",
                "doubt": claim["flag"],
            }
        )
    return pd.DataFrame(shown)


def tflops(line: pd.Series, *, attention: bool) -> float:
    """10^12 operations a second: 6P a token and, on request, the paper's 12 L h T."""
    config = line["config"]["model"]["config"]
    per_token = 12 * config["num_hidden_layers"] * config["hidden_size"] * line["seq_len"]
    work = 6 * line["num_params"] + (per_token if attention else 0)
    return float(work * line["tokens_per_s"] / 1e12)
