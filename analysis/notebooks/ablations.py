# %% [markdown]
"""
# Ablations

What each part of the engine is worth: double buffering, the ladder from the published algorithm to `fast`, one setting at a time.
"""

# %%
from analysis import answers, numbers, studies, tables
from analysis.notebooks import LINES, picture, say, table

for study in studies.all_studies()[3:]:
    mine = LINES[(LINES["study"] == study.name) & ~LINES["superseded"]]
    run = mine[mine["run"] == numbers.lead(study, mine)]
    say(f"## {study.title}\n\n{study.question}\n\n{answers.sentence(study, run)}")
    table(tables.of(study, run))

# %%
picture("double_buffering")

# %%
picture("ladder")
