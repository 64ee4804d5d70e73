# %% [markdown]
"""
# Overlap

What every lane of the engine does in one recorded step, above the cost model's prediction of it: copies in and out, computation,
and AdamW on the CPU. *Busy* is the union of a lane's intervals, *hidden* the share of it during which the device computes.
"""

# %%
from IPython.display import display

from analysis.figures import timeline as drawing
from analysis.notebooks import RESULTS, show
from analysis.timeline import SUFFIX, load_all

timelines = load_all(sorted(RESULTS.glob(f"*{SUFFIX}")))
for one in timelines:
    print("\n".join(drawing.lines(one)), end="\n\n")

# %%
for one in timelines:
    display(show(drawing.figure([one])))
