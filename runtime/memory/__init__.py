"""Finds how much memory a process may still take, and holds it to a cap."""
