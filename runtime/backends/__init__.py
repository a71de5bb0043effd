"""Runs models by one of three backends: PyTorch, ONNX Runtime or llama.cpp."""
