"""Correctors, one file each: what corrects attention's output for evicted tokens."""
