"""Attention over held slots, and its registration with transformers."""
