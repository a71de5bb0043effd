"""Runs a model by kvcap's own decoder, in fewer and faster kernels, for CUDA graphs."""
