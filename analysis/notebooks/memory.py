# %% [markdown]
"""
# Memory

What fills the device and the host under each system at 14B, and how far each plan was
from what was observed.
"""

# %%
from analysis.notebooks import LINES, picture, table

picture("memory")

# %%
known = LINES[LINES["tokens_per_s"].notna() & LINES["device_gb"].notna() & ~LINES["superseded"]]
planned = known["plan"].map(lambda plan: sum((plan.get("device") or {}).values()) / 1e9)
off = (
    (planned / known["device_gb"] - 1)
    .groupby(known["family"])
    .agg(["count", "min", "median", "max"])
)
table(off.map("{:+.0%}".format).assign(count=off["count"]).reset_index())
