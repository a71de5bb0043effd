"""Holds what kvcap's makers measure and draw with: part of the repository, not of the package."""
