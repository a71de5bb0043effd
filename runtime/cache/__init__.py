"""Implements the fixed cache: slots, layers, eviction, and what is kept beside them."""
