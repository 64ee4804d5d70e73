# %% [markdown]
"""
# The paper, claim by claim

What MegaTrain (arXiv 2604.05091) says, and what was measured here, on which hardware and under which formula. The paper's numbers
are in `analysis/paper.csv` with their source; a dagger marks those with something against them. Its hardware is not ours: read
shapes and ratios, not races.

Trust: P the paper's own words; S2 two or more independent notes on it agree; S1 one note; R the public repository.
"""

# %%
from IPython.display import Markdown, display

from analysis import paper, tables
from analysis.figures import paper as drawing
from analysis.notebooks import rows, show

frame = rows()
show(drawing.figure(frame))

# %%
for study in dict.fromkeys(one.study for one in paper.claims()):
    sheet = paper.table(frame, study)
    notes = "\n".join(f"- {note}" for note in sheet.notes)
    display(Markdown(f"## {study.replace('_', ' ')}\n\n{tables.as_markdown(sheet)}\n{notes}"))

# %%
print(paper.double_buffering(frame))
