"""Exports a whole decoder under a budget as ONNX graphs, with what a runner without Python needs.

Knows models, caches' layouts and graphs; no chat and no backend.
"""
