"""Adopts decoders that other tools exported to ONNX: tries them, and writes graphs that evict."""
