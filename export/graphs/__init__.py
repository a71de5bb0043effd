"""Graphs of a policy alone: score, evict and update, traced, described, checked and written."""
