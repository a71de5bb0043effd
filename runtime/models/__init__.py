"""A model's config, files, weights and rotary embedding; none of its own code is run."""
