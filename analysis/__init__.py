"""Rows -> frame -> tables and figures. Imports nothing of the other rooms but sweeps.result."""
