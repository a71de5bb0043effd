"""Decoders that others exported to ONNX: tried, and given graphs beside them that evict."""
