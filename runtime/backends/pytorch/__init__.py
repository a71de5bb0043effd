"""The backend of PyTorch and transformers."""
