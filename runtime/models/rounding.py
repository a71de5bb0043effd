"""Rounds weights to integers of few bits, in blocks of neighbours that share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # weights of a row that share a scale, by default


@dataclass(frozen=True)
class Rounding:
    """A way to round weights to `(q - zero) * scale`, with a scale for every block of a row.

    Attributes:
        bits: bits of `q`, 4 or 8.
        symmetric: whether `zero` is the middle, 8 or 128; else each block has its own.
        block: weights of a row that share a scale, a power of two of at least 16.
    """

    bits: int
    symmetric: bool = True
    block: int = BLOCK

    @property
    def middle(self) -> int:
        """Return the zero of symmetric blocks."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """Return the largest `q`."""
        return (1 << self.bits) - 1


def steps_of(blocks: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return the scales and zeros, both [..., 1], by which blocks [..., block] are rounded."""
    if rounding.symmetric:
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scales = extreme / -rounding.middle
        return scales, torch.full_like(scales, rounding.middle)
    most = blocks.amax(-1, keepdim=True).clamp_(min=0)
    scales = (most - _least(blocks)) / rounding.top
    return scales, zeros_of(blocks, scales, rounding)


def zeros_of(blocks: Tensor, scales: Tensor, rounding: Rounding) -> Tensor:
    """Return the integers [..., 1] that stand for 0, where a block's least number becomes 0."""
    return (-_least(blocks) / _nonzero(scales)).round_().clamp_(0, rounding.top)


def _least(blocks: Tensor) -> Tensor:
    return blocks.amin(-1, keepdim=True).clamp_(max=0)


def nearest(values: Tensor, scales: Tensor, zeros: Tensor, rounding: Rounding) -> Tensor:
    """Return the `q`, as floats, for which `(q - zero) * scale` is nearest to each value."""
    return (values / _nonzero(scales)).round_().add_(zeros).clamp_(0, rounding.top)


def in_blocks(rows: Tensor, size: int) -> Tensor:
    """Cut rows [N, K] into blocks [N, C, size]; zeros fill the last one."""
    missing = -rows.shape[1] % size
    blocks: Tensor = torch.nn.functional.pad(rows, (0, missing)).unflatten(1, (-1, size))
    return blocks


def _nonzero(scales: Tensor) -> Tensor:
    """Return scales to divide by: a block of zeros gets 1 in place of 0."""
    return torch.where(scales == 0, 1.0, scales)
