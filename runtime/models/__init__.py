"""A model's config, files, weights and rotary embedding, read without running its code."""
