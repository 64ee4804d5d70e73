"""The bench: Hydra entry, a process per cell, the loop, samplers, rows and sinks."""
