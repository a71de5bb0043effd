"""Runs models by one of two backends: PyTorch or ONNX Runtime."""
