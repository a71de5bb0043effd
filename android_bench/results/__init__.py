"""Reads what results say: statistics, doubts, comparisons, tables and charts."""
