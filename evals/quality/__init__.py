"""Recall under a cap: tasks, sweeps over policies and budgets, their tables, and the demo."""
