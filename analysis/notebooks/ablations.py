# %% [markdown]
"""
# Ablations

What each part of the engine is worth. A figure is chosen by what differs among the rows of a study: two numbers make a heat map,
rungs of the ladder a ladder, sizes lines, anything else bars. Losses are against the fastest cell whose numerics agree with the
reference. Files of one study are runs of their own.
"""

# %%
from IPython.display import Markdown, display

from analysis import paper, report
from analysis.notebooks import rows, show, studies

found = studies()
print(f"studies in analysis/results: {', '.join(found) or 'none yet; python -m sweeps.run +ablation=NAME measures one'}")

# %% [markdown]
"""
The double-buffering result, beside the paper's:
"""

# %%
print(paper.double_buffering(rows()))

# %%
for file, part in found.items():
    display(Markdown(f"# {file}\n\n{report.markdown(part)}"))
    display(show(part.figure()))
