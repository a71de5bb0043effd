"""Compiles graphs ahead of time for Qualcomm's Hexagon NPU, and checks them in its simulator."""
