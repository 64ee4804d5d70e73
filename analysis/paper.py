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
SIZES = {"7B": 7615616512, "14B": 14770033664, "32B": 32763876352}
OURS = {"megatrain": ("megatrain_fast", "megatrain_long", "megatrain_stream")}
"""Which of our systems is the paper's, where it has another name; of several the fastest counts."""
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
    here = []
    for _, claim in told.iterrows():
        same = ready["family"].isin(OURS.get(claim["system"], (claim["system"],)))
        same &= ready["model"] == f"qwen2.5-{claim['model'].lower()}"
        mine = ready[same & (ready["seq_len"] == claim["seq_len"])]
        attention = claim["study"] == "context"
        best = tflops(speeds.fastest(mine), attention=attention) if len(mine) else None
        here.append("—" if best is None else f"{best:,.0f}")
    shown = {
        "system": told["system"].map(names.family_name),
        "model": told["model"],
        "tokens": told["seq_len"].map("{:,.0f}".format),
        "the paper's machine": told["hardware"],
        "paper": told["value"].map("{:,.0f}".format).mask(told["oom"], "out of memory"),
        "here": here,
        "unit": "TFLOPS",
        "doubt": told["flag"],
    }
    return pd.DataFrame(shown)


def tflops(line: pd.Series, *, attention: bool) -> float:
    """10^12 operations a second: 6P a token and, on request, the paper's 12 L h T."""
    layers, hidden = (line[f"model.config.{name}"] for name in ("num_hidden_layers", "hidden_size"))
    work = 6 * line["num_params"] + (12 * layers * hidden * line["seq_len"] if attention else 0)
    return float(work * line["tokens_per_s"] / 1e12)
