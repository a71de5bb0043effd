"""The ONNX Runtime backend: exported decoders under the same caps, without PyTorch.

Nothing in this folder imports torch or transformers.
"""
