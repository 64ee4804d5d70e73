# %% [markdown]
"""
# Throughput

Every system of every run with the engine, and the engine over each rival. Ratios are taken within a run; bars are 95% intervals.
"""

# %%
from analysis import answers, numbers, studies, tables
from analysis.notebooks import LINES, picture, say, table

for study in studies.all_studies()[:3]:
    mine = LINES[(LINES["study"] == study.name) & ~LINES["superseded"]]
    run = mine[mine["run"] == numbers.lead(study, mine)]
    say(f"## {study.title}\n\n{answers.sentence(study, run)}")
    table(tables.of(study, run))

# %%
picture("rivals")

# %%
picture("pareto")
