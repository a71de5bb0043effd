"""Measures what a model still knows under a cap: `kvcap tune` and the demo."""
