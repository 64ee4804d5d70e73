# %% [markdown]
"""
# Convergence

Loss curves of all systems of a comparison on one axis, and below them each one's difference from the reference: plain training
in memory or, where that was not measured, ZeRO-3 (eager, else compiled, else kept). The grey band is the tolerance within which a
row *agrees*; a row outside it is labelled and not ranked.
"""

# %%
import pandas as pd
from IPython.display import display

from analysis.figures import convergence
from analysis.notebooks import comparisons, show

parts = {name: part for name, part in comparisons().items() if part["losses"].map(bool).sum() > 1}
for name, part in parts.items():
    print(name)
    display(show(convergence.figure(part)))

# %% [markdown]
"""
The largest difference of each row from its reference, nats per token.
"""

# %%
drawn = pd.concat([part.assign(file=name) for name, part in parts.items()]).dropna(subset=["max_loss_difference"])
drawn[["file", "label", "final_loss", "max_loss_difference", "agrees"]]
