# %% [markdown]
"""
# Convergence

A bfloat16 master against an fp32 one over the first steps, and how far the
losses of each system lie from its reference's.
"""

# %%
from analysis.notebooks import LINES, picture, table

picture("precision")

# %%
told = LINES[LINES["max_loss_difference"].notna() & LINES["study"].str.startswith("vs_")]
table(told.groupby("family")["max_loss_difference"].max().map("{:.0e}".format).reset_index())
