"""kvcap's own decoder: a model in fewer and faster kernels, for CUDA graphs."""
