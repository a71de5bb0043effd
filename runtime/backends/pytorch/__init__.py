"""Implements the PyTorch backend, which runs models of transformers."""
