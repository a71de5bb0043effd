"""Measures what kvcap's makers ask: one file per benchmark, as in `evals/bench`."""
