"""Runs other servers that benchmarks ask beside kvcap's."""
