# %% [markdown]
"""
# Ablations

What each part of the engine is worth: double buffering, the ladder from the published algorithm
to `fast`, one setting at a time.
"""

# %%
from analysis.notebooks import picture, tell

tell(comparisons=False)

# %%
picture("double_buffering")

# %%
picture("ladder")
