"""Trains the built-in models: the corpus that it writes, the runs, and how well a model recalls."""
