"""Budgets, one file each: how slots are spread over layers or heads."""
