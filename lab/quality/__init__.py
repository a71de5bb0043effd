"""Measures quality under a cap for tables: tasks, sweeps over policies and budgets, agreement."""
