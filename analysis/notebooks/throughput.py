# %% [markdown]
"""
# Throughput

Speed against model size, batch and context, one line for each system and preset, from the rows in `analysis/results`.
Error bars are 95% intervals of the windows; hollow points are predictions of the cost model; a marker beside a cross was not
measured, and the legend says why. TFLOPS are 6P: 6 x parameters x tokens/s, recomputation never counted.
"""

# %%
from IPython.display import Markdown, display

from analysis import machines, tables
from analysis.compare import compare, notes
from analysis.figures import quickstart, throughput
from analysis.notebooks import comparisons, rows, show
from analysis.verdict import sentence

frame = rows()
kinds = dict(tuple(frame.groupby("machine_name", sort=False)))
for name, mine in kinds.items():
    print(f"{name}: {len(mine)} cells of {', '.join(sorted(set(mine['model'])))}")

# %%
for mine in kinds.values():
    if throughput.varies(mine):
        display(show(throughput.figure(mine)))

# %% [markdown]
"""
Systems are ranked only within one run of a study: the same file, model, batch, length and machine.
"""

# %%
for file, part in comparisons().items():
    comparison = compare(part)
    title = f"**{file}**: {quickstart.heading(part)}"
    listed = "\n".join(f"- {note}" for note in [*notes(comparison), *machines.notes(part)])
    display(Markdown(f"{title}\n\n{tables.markdown(comparison)}\n{sentence(comparison)}\n\n{listed}"))
