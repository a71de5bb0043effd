"""Exports a policy's score, evict and update as ONNX graphs: traces, checks and describes them."""
