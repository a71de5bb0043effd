"""Measures quality under a cap: tasks, sweeps, tables. Knows no command line."""
