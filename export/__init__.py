"""Export to ONNX: score and evict graphs, each checked against its policy, with a manifest.

Knows policies and the shapes of models; no cache and no weights.
"""
