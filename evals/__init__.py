"""Quality under a cap: tasks, sweeps, tables. Runs the runtime, knows no command line."""
