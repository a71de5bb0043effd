"""The two backends that run models: PyTorch and ONNX Runtime."""
