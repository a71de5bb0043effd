"""Plans memory: the bytes that a run will take, and the largest sizes that fit a cap."""
