"""What runs a model: PyTorch or ONNX Runtime."""
