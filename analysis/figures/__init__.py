"""Figures: one module each, pure functions frame -> matplotlib Figure."""
