"""The memory plan: predicted bytes, and the largest sizes that fit a cap."""
