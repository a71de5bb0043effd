"""Rescorers, one file each: what replaces the scores once the budget is known."""
