"""Defines a type in which slots hold numbers in fewer bits; each file of `formats` has one.

A vector is quantised to bytes and to numbers of side tensors, such as its scale, which lie beside
its slot. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Numbers(NamedTuple):
    """A way to quantise vectors, each of which becomes bytes and numbers of side tensors."""

    shapes: Callable[[int], Shapes]
    """Returns shape and type of each tensor's part of a vector of so many numbers, by name."""
    quantise: Callable[[Tensor], dict[str, Tensor]]
    """Turns vectors [..., D] into tensors [..., *shape] by name."""
    dequantise: Callable[[Mapping[str, Tensor], Tensor, Tensor | None], None]
    """Writes numbers [..., n, D] back into a float32 tensor, plus a vector [..., D] if given."""
    weigh: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    """Sums vectors by weights [..., r, n] to [..., r, D]; scales of 8 bits go into weights."""
    in_pairs: bool = False
    """Says that a byte holds two numbers, so that a head must have an even number of them."""
    unrotated: bool = False
    """Says that keys are held without their rotation alone, for which positions are compact."""
    by_kernels: bool = False
    """Says that `kernels/quantise.py` and `kernels/dequantise.py` know it; else code is eager."""


def divisor(scale: Tensor) -> Tensor:
    """Return a scale that can be divided by: 1 for 0, where all that is divided is 0, too."""
    return scale.float().masked_fill_(scale == 0, 1.0)
