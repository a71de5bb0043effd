"""The PyTorch backend: runs models of transformers."""
