"""Runs exported decoders in ONNX Runtime under the same caps, without PyTorch.

Nothing in this folder imports torch or transformers.
"""
