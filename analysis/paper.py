"""What the paper says (paper.csv), claim by claim, beside what these rows measured at the same model and length.

Invariant: a claim is quoted with its source, trust and flag, never corrected. Machines and batches differ: read shapes, not races.
trust: P the paper's own words; S2 two or more independent notes agree; S1 one note; R the public repository.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis import names, speeds

CSV = Path(__file__).with_name("paper.csv")
MODELS = {name: f"qwen2.5-{name.lower()}" for name in ("3B", "7B", "14B", "32B", "72B")}
OURS = {"megatrain": "megatrain_fast", "zero3": "zero3", "fsdp2": "fsdp2", "in_memory": "in_memory"}
NUM_COLUMNS = 13


def claims(path: Path = CSV) -> pd.DataFrame:
    """Every claim, in order; value is NaN where it ran out of memory (`oom`). Raises ValueError, one line, for what is no claim."""
    try:
        found = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a table of claims ({' '.join(str(error).split())}); see the committed file") from None
    if len(found.columns) != NUM_COLUMNS:
        raise ValueError(f"{path}: got {len(found.columns)} columns, allowed {NUM_COLUMNS}; see the committed file")
    for name in ("value", "batch_size", "seq_len"):
        numeric = pd.to_numeric(found[name].replace({"OOM": "", "": None}), errors="coerce")
        bad = found[numeric.isna() & ~found[name].isin(["", "OOM"])]
        if len(bad):
            raise ValueError(f"{path}: line {bad.index[0] + 2}: {name}: got {bad[name].iloc[0]!r}, allowed a number; mend it")
        found[f"{name}_text"], found[name] = found[name], numeric
    return found.assign(oom=found["value_text"] == "OOM")


def beside(lines: pd.DataFrame) -> pd.DataFrame:
    """Claims of throughput with the fastest line of this record for the same system, model and length, null where there is none."""
    told = claims()
    told = told[told["metric"].isin(["tflops", "tokens_per_s"]) & told["study"].isin(["headline", "context"])]
    ready = lines[speeds.comparable(lines) & ~lines["superseded"]]
    found = []
    for _, claim in told.iterrows():
        same = ready[(ready["model"] == MODELS.get(claim["model"])) & (ready["seq_len"] == claim["seq_len"])]
        family = OURS.get(claim["system"], claim["system"])
        same = same[
            same["family"].isin([family, "megatrain_long", "megatrain_stream"] if claim["system"] == "megatrain" else [family])
        ]
        best = speeds.fastest(same) if len(same) else None
        found.append(None if best is None else tflops(best, claim) if claim["metric"] == "tflops" else best["tokens_per_s"])
    return told.assign(measured=pd.Series(found, index=told.index, dtype="Float64"))


def tflops(line: pd.Series, claim: pd.Series) -> float:
    """10^12 floating-point operations a second: 6P a token and, of claims about context, the paper's 12 L h T for attention."""
    config = line["config"]["model"]["config"]
    attention = 12 * config["num_hidden_layers"] * config["hidden_size"] * line["seq_len"] if claim["study"] == "context" else 0
    return float((6 * line["num_params"] + attention) * line["tokens_per_s"] / 1e12)


def table(lines: pd.DataFrame) -> pd.DataFrame:
    """The claims as a page shows them."""
    told = beside(lines)
    return pd.DataFrame(
        {
            "system": [names.family_name(OURS.get(one, one)) if one != "megatrain" else "MegaTrain" for one in told["system"]],
            "model": told["model"],
            "tokens": [f"{value:,.0f}" for value in told["seq_len"]],
            "the paper's machine": told["hardware"],
            "paper": ["out of memory" if oom else f"{value:,.0f}" for oom, value in zip(told["oom"], told["value"], strict=True)],
            "here": ["—" if pd.isna(value) else f"{value:,.0f}" for value in told["measured"]],
            "unit": told["metric"].map({"tflops": "TFLOPS", "tokens_per_s": "tokens/s"}),
            "doubt": told["flag"],
        }
    ).reset_index(drop=True)
