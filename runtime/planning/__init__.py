"""The memory plan: the bytes a run will take, and the largest sizes that fit a cap."""
