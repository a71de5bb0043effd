"""Measures recall under a cap: tasks, sweeps over policies and budgets, tables, the demo."""
