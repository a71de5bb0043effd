"""Measures the policies' latency on devices: a plan, runners that measure it, a report."""
