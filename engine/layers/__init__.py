"""A `transformers` model taken apart: its layers one at a time, with whatever they are called
with."""
