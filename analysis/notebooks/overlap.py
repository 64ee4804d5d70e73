# %% [markdown]
"""
# Overlap

What every lane of the engine does in a recorded 7B step of the published algorithm and of `fast`.
"""

# %%
import pandas as pd

from analysis import record, timeline
from analysis.notebooks import picture, table

picture("timeline")

# %%
steps = [
    step
    for path in sorted((record.RESULTS / "timelines").iterdir())
    for step in timeline.load(path)
]
told = [
    {
        "step": step.name,
        "kind": "predicted" if step.predicted else "recorded",
        "lane": lane,
        "busy s": f"{step.busy_s(lane):.2f}",
    }
    for step in steps
    for lane in step.lanes
]
table(pd.DataFrame(told))
