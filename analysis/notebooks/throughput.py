# %% [markdown]
"""
# Throughput

Every system of every run with the engine, and the engine over each rival. Ratios are
taken within a run; bars are 95% intervals.
"""

# %%
from analysis.notebooks import picture, tell

tell(comparisons=True)

# %%
picture("rivals")

# %%
picture("pareto")
