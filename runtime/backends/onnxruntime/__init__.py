"""The ONNX Runtime backend: runs exported decoders under the same caps, without PyTorch.

Nothing in this folder imports torch or transformers.
"""
