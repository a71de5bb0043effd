"""A model's modules in fewer kernels, for CUDA graphs."""
