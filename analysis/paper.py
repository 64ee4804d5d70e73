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
OURS = dict.fromkeys(["megatrain_fast", "megatrain_long", "megatrain_stream"], "megatrain")
"""Which of our systems is the paper's, where it has another name; of several the fastest counts."""


def claims() -> pd.DataFrame:
    """Every claim, in order; its value is infinite where it ran out of memory."""
    found = pd.read_csv(CSV).fillna({"flag": ""})
    return found.assign(value=found["value"].replace("OOM", "inf").astype(float))


def along(study: Study) -> pd.DataFrame:
    """system, x and y of the claims on a study's axes: TFLOPS, or tokens/s from step times less
    those that the claim's own flag calls impossible."""
    told = claims().query("study == @study.paper and hardware == 'GH200'")
    if study.value == "tflops_6p":
        told = told[(told["metric"] == "tflops") & (told["value"] < float("inf"))]
        told = told.assign(x=told["model"].map(SIZES), y=told["value"])
    else:
        told = told[(told["metric"] == "step_s") & ~told["flag"].str.contains("would need")]
        speed = told["batch_size"] * told["seq_len"] / told["value"]
        told = told.assign(x=told["seq_len"], y=speed)
    return told.dropna(subset=["x", "y"])[["system", "x", "y"]]


def table(lines: pd.DataFrame) -> pd.DataFrame:
    """Claims of TFLOPS, each with the fastest line here of the same system, model and length: 6P a
    token, and with the paper's term for attention where the claim is of long contexts."""
    told, shared = claims(), ["system", "model", "seq_len"]
    told = told[(told["metric"] == "tflops") & told["study"].isin(["headline", "context"])]
    mine = lines[speeds.comparable(lines)]
    mine = mine.assign(system=mine["family"].replace(OURS), model=mine["size"])
    told = told.join(mine.groupby(shared)[["tflops_6p", "tflops_paper"]].max(), on=shared)
    here = told["tflops_paper"].where(told["study"] == "context", told["tflops_6p"])
    shown = {
        "system": told["system"].map(names.family_name),
        "model": told["model"],
        "tokens": told["seq_len"].map("{:,.0f}".format),
        "the paper's machine": told["hardware"],
        "paper": told["value"].map("{:,.0f}".format).replace("inf", "out of memory"),
        "here": here.map("{:,.0f}".format, na_action="ignore").fillna("—"),
        "unit": "TFLOPS",
        "doubt": told["flag"],
    }
    return pd.DataFrame(shown)
