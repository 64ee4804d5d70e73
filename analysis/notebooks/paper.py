# %% [markdown]
"""
# The paper, claim by claim

What MegaTrain (arXiv 2604.05091) says, and what was measured here at the same model and length.
Its hardware is not ours: read shapes, not races.
"""

# %%
from analysis import paper
from analysis.notebooks import LINES, picture, table

picture("model_size")

# %%
picture("context_length")

# %%
table(paper.table(LINES))
