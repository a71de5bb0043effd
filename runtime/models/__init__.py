"""Reads a model's config, files, weights and rotary embedding, without running its own code."""
