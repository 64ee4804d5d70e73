"""Rows -> frame -> tables and figures. Imports of the other rooms only what reads rows."""
