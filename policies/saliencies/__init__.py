"""Saliencies, one file each: what replaces the attention weights in a score."""
