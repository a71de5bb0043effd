"""Graphs compiled ahead for Qualcomm's Hexagon NPU, and simulated there."""
