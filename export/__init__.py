"""Exports score and evict graphs to ONNX, each checked against its policy, with a manifest.

Knows policies and the shapes of models; no cache and no weights.
"""
