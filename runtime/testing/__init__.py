"""Meters of memory for tests, and the pytest plugin that holds tests to a budget."""
