"""Runs a plan on this machine, in a process of its own, and writes the measurements.

The C runner and the page do the same work on other devices. It does not judge: statistics, tables
and doubts are computed from its samples later. A run that is stopped leaves no result.
"""
