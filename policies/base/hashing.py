"""Numbers that look random and are the same for any block size, on any device, in any export."""

from __future__ import annotations

import torch
from torch import Tensor


def hashed(x: Tensor) -> Tensor:
    """Return a hash of every whole number: 24 bits, exact in float32.

    Args:
        x: int64.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # a 32-bit mixer
        x = (x & 0xFFFFFFFF) ^ ((x & 0xFFFFFFFF) >> shift)
        x = x * factor
    return x & 0xFFFFFF


def sign_sketch(size: int, width: int, device: torch.device) -> Tensor:
    """Return a matrix [size, width] of random signs, over `sqrt(width)`: a sketch by products."""
    index = torch.arange(size * width, device=device)
    signs = (hashed(index * 0x9E3779B1 + 0x85EBCA6B) >> 8 & 1) * 2 - 1
    sketch: Tensor = signs.view(size, width).float() / width**0.5
    return sketch
