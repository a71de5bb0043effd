"""Turns strides, pins and auxiliary tensors into named arguments of Triton kernels.

Triton 3.2 passes no tuples to kernels, so a kernel has a parameter for each stride and for each
auxiliary tensor. Kernels use the same names for them. Knows tensors only; imports no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.device import bits, seen_and_clock
from kvcap.policies.base.eviction import LOWEST

MOST_AUX = 6  # most auxiliary tensors, which have a number per slot, besides positions

Spans = Sequence[tuple[int, int]]


class Pins(NamedTuple):
    """The slots that stay whatever their scores, besides each row's own sinks and recents."""

    seen: int | Tensor  # tokens read so far, an int or one int64 on the device
    spans: Spans  # [start, stop) of pinned positions

    def of_rows(self, positions: Tensor, row_pins: Tensor) -> Tensor:
        """Return which slots stay, [B, K, n]; rows have sinks and recents of their own [B·K, 2]."""
        sinks, recents = row_pins.view(*positions.shape[:2], 2)[:, :, None].unbind(-1)  # [B, K, 1]
        pinned = (positions < sinks) | (positions >= self.seen - recents)
        for start, stop in self.spans:
            pinned |= (positions >= start) & (positions < stop)
        return pinned

    def mark(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Return scores [B, K, n] that are +inf within the spans, and finite elsewhere."""
        if self.spans:
            scores = scores.nan_to_num(nan=LOWEST)
        for start, stop in self.spans:
            inside = (positions >= start) & (positions < stop)
            scores = scores.masked_fill(inside, float("inf"))
        return scores

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments `seen`, `clock` and `marked` of `worth_of`, for marked scores."""
        seen, clock = seen_and_clock(self.seen, device)
        return {"seen": seen, "clock": clock, "marked": int(bool(self.spans))}


def aux(tensors: Sequence[Tensor], most: int = MOST_AUX) -> dict[str, Tensor | None]:
    """Return the arguments `aux_0`, `aux_1`, ... up to `most`: tensors as integers, then None."""
    assert len(tensors) <= most, "see `covers`"
    return {f"aux_{i}": bits(tensors[i]) if i < len(tensors) else None for i in range(most)}


def strides(dims: str, **tensors: Tensor | None) -> dict[str, int]:
    """Return the first strides of every tensor, named by the tensor and a letter per dimension.

    >>> strides("bh", key=torch.zeros(2, 3, 4), other=None)
    {'key_b': 12, 'key_h': 4, 'other_b': 0, 'other_h': 0}
    """
    return {
        f"{name}_{dim}": 0 if x is None else x.stride(i)
        for name, x in tensors.items()
        for i, dim in enumerate(dims)
    }
