# %% [markdown]
"""
# Memory

Peaks on device and host, observed above what the plan said by kind, for every comparison. A system that was refused has its plan
drawn all the same, past the line that marks what the machine has. *device* is the peak of torch's allocator, *host* the peak
PSS of the cell's processes, both from the row.
"""

# %%
import pandas as pd
from IPython.display import display

from analysis.figures import memory, quickstart
from analysis.notebooks import comparisons, show

parts = {name: part for name, part in comparisons().items() if len(part) > 1}
for name, part in parts.items():
    print(f"{name}: {quickstart.heading(part)}, {len(part)} cells")
    display(show(memory.figure(part)))

# %% [markdown]
"""
How far the plan was from what was observed, in percent of the observed peak.
"""

# %%
measured = pd.concat([part.assign(file=name) for name, part in comparisons().items()])
measured = measured.dropna(subset=["peak_device_bytes", "plan_device_bytes"])
off = {
    "device %": 100 * (measured["plan_device_bytes"] / measured["peak_device_bytes"] - 1),
    "host %": 100 * (measured["plan_host_bytes"] / measured["peak_host_bytes"] - 1).where(measured["plan_host_bytes"] > 0),
}
measured[["file", "label", "batch_size"]].assign(**off).round(1)
