"""Evaluates results: statistics, doubts, comparisons, tables and charts."""
