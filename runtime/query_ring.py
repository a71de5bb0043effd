"""The last queries of a layer, kept between blocks for policies that observe a window.

Compact positions move down with every eviction; a kept query's moves by as many as were evicted,
since every slot is older than it or pinned with it. It is rotated when it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.runtime.rope import Rotation


class QueryRing:
    """`[B, H, w, D]` queries, oldest first, and how far each one's position has moved, `[w]`."""

    def __init__(self, like: Tensor, heads: int, length: int) -> None:
        self.queries = like.new_zeros(like.shape[0], heads, length, like.shape[3])
        self.shift = torch.zeros(length, dtype=torch.int32, device=like.device)

    @property
    def nbytes(self) -> int:
        """Exact bytes of storage."""
        return sum(x.untyped_storage().nbytes() for x in (self.queries, self.shift))

    def append(self, queries: Tensor) -> None:
        """Take in a block's queries [B, H, T, D], of which the newest `w` stay."""
        size = self.queries.shape[2]
        new = min(size, queries.shape[2])
        if new < size:  # a copy of the part that stays, as source and target overlap
            self.queries[:, :, :-new] = self.queries[:, :, new:].clone()
            self.shift[:-new] = self.shift[new:].clone()
        self.queries[:, :, size - new :] = queries[:, :, queries.shape[2] - new :]
        self.shift[size - new :] = 0

    def last(self, count: int, rotation: Rotation | None) -> Tensor:
        """The newest `count` queries [B, H, count, D], at today's positions if they move."""
        queries, shift = self.queries[:, :, -count:], self.shift[-count:]
        return (
            queries if rotation is None else rotation.back(queries, shift.expand(queries.shape[:3]))
        )

    def evicted(self, count: int) -> None:
        """Move down by `count` evicted slots."""
        self.shift.add_(count)
