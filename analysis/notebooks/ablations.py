# %% [markdown]
"""
# Ablations

What each part of the engine is worth. A figure is chosen by what differs among the rows of a study: two numbers make a heat map,
rungs of the ladder a ladder, anything else bars. Losses are against the fastest cell whose numerics agree with the reference.
"""

# %%
from IPython.display import Markdown, display

from analysis import paper, studies, tables
from analysis.figures import ablation
from analysis.notebooks import rows, show

frame = rows()
ablations = [part for _, part in frame.groupby(["experiment", "machine_name"], sort=False)]
ablations = [part for part in ablations if studies.study_of(part).kind not in ("comparison", "scale")]
names = [studies.study_of(part).name for part in ablations]
print(f"studies in analysis/results: {', '.join(names) or 'none yet; python -m sweeps.run +ablation=NAME measures one'}")

# %% [markdown]
"""
The double-buffering result, beside the paper's:
"""

# %%
print(paper.double_buffering(frame))

# %%
for part in ablations:
    study = studies.study_of(part)
    display(Markdown(f"## {study.name}\n\n{studies.sentence(study)}\n\n{tables.as_markdown(tables.study_sheet(study))}"))
    display(show(ablation.figure(part)))
