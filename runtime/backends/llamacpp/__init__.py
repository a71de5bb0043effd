"""Runs GGUF files by llama.cpp's own library, whose cells are kvcap's slots."""
