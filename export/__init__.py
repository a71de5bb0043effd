"""Score graphs and decoders to ONNX. Nothing is exported yet."""
