"""Keeps the last queries of a layer between blocks, for policies that observe a window.

Compact positions move down with every eviction; a kept query's moves by as many as its head
evicted, since every slot is older than it or pinned with it. It is rotated when it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcap.kernels import ring
from kvcap.kernels.choice import ready
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.models.rope import Rotation


class QueryWindow:
    """A window of the last queries `[B, H, w, D]`, oldest first, and their shifts `[B, K, w]`.

    A shift says how far a query's position has moved down. A segment reads and moves the part of
    its own heads.
    """

    def __init__(self, like: Tensor, heads: int, length: int) -> None:
        batch, kv_heads, _, size = like.shape
        self.queries = like.new_zeros(batch, heads, length, size)
        self.shift = torch.zeros(batch, kv_heads, length, dtype=torch.int32, device=like.device)

    def named(self) -> dict[str, Tensor]:
        """Return its buffers by name."""
        return {"queries": self.queries, "shift": self.shift}

    def append(self, queries: Tensor, count: Tensor | None = None) -> None:
        """Append a block's queries [B, H, T, D]; the newest `w` stay.

        With a `count`, int32 [] on the device, only the first so many are real, the rest fillers.
        """
        if ready(queries) and ring.covers(self.queries, self.shift, queries):
            ring.append(self.queries, self.shift, queries, count)
            return
        size = self.queries.shape[2]
        if count is not None:
            newest = count + torch.arange(size, device=queries.device)
            shift = nn.functional.pad(self.shift, (0, queries.shape[2]))
            self.queries.copy_(torch.cat((self.queries, queries), 2).index_select(2, newest))
            self.shift.copy_(shift.index_select(2, newest))
            return
        new = min(size, queries.shape[2])
        if new < size:
            queries = torch.cat((self.queries[:, :, new:], queries), dim=2)
            self.shift.copy_(self.shift.roll(-new, dims=2))
        self.queries.copy_(queries[:, :, queries.shape[2] - size :])
        self.shift[:, :, size - new :] = 0

    def fill(self, queries: Tensor, shift: Tensor) -> None:
        """Copy the newest queries and shifts of another window, which has as many or more."""
        size = self.queries.shape[2]
        self.queries.copy_(queries[:, :, queries.shape[2] - size :])
        self.shift.copy_(shift[:, :, shift.shape[2] - size :])

    def reset(self) -> None:
        """Forget the queries and how far they moved, so that the window is as a new one."""
        self.queries.zero_()
        self.shift.zero_()

    def last(self, segment: Segment | None, count: int, rotation: Rotation | None) -> Tensor:
        """Return a segment's newest `count` queries [b, k·G, count, D] at their present positions.

        Without a segment, return those of all heads.
        """
        mine = [x if segment is None else segment.rows_of(x) for x in (self.queries, self.shift)]
        queries = mine[0][:, :, -count:]
        if rotation is None:
            return queries
        shift = mine[1][:, :, -count:]
        group = queries.shape[1] // shift.shape[1]
        # A KV head's shifts are those of all its query heads. Both are views where the segment is
        # a whole layer or lies within a sequence, as the cache's all do; else copies.
        by_group = queries.unflatten(1, (-1, group)).flatten(0, 1)  # [b·k, G, count, D]
        shared = shift[:, :, None].expand(-1, -1, group, -1).flatten(0, 1)  # [b·k, G, count]
        return rotation.back(by_group, shared).view(queries.shape)

    def drop(self, segment: Segment, gone: Tensor, seen: int) -> None:
        """Move a segment's queries down by the tokens `gone` [b, k, e] that are older than each.

        Of `seen` tokens some that are older than those stay where they are.
        """
        tokens = torch.arange(seen - self.queries.shape[2], seen, device=gone.device)
        older = (gone[..., None, :] < tokens[:, None]).sum(-1)  # [b, k, w]
        segment.rows_of(self.shift).add_(older)

    def become_compact(self, segment: Segment, past: int, rotation: Rotation) -> None:
        """Move a segment's queries from true positions to compact ones, which lie `past` lower."""
        queries = segment.rows_of(self.queries)
        queries.copy_(rotation.moved(queries, torch.tensor(-past)))
        segment.rows_of(self.shift).zero_()

    def move_down(self, segment: Segment, count: int) -> None:
        """Move a segment's queries down by `count` positions."""
        segment.rows_of(self.shift).add_(count)
