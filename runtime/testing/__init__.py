"""Measures memory in tests, and holds tests to a budget by a pytest plugin."""
