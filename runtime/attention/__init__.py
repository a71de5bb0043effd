"""Attends over held slots, and registers that attention with transformers."""
