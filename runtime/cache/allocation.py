"""What a cache allocates, once: pools of slots cut into segments, and where evicted tokens go."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.runtime.cache.evicted_store import Calibration
from kvcap.runtime.cache.evictor import SHIFT
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.mapped_file import MappedFile
from kvcap.runtime.cache.pool import Segment, SlotPool


class Allocation:
    """The storage of one cache.

    Args:
        layout: says how many slots every head of every layer has.
        block: slots more, for the block in hand (`T`).
    """

    def __init__(self, layout: CacheLayout, block: int) -> None:
        self.layout, self.block = layout, block
        self._file: MappedFile | None = None  # of evicted tokens
        self.balance: LayerBalance | None = None  # of layers that share one pool
        if layout.pooled:
            budget, slots = layout.eviction.layer_budget, layout.budget_tokens
            assert budget is not None
            pinned, layers = layout.eviction.pins(slots), len(layout.shape.capped)
            self.balance = LayerBalance(budget, slots, layers, pinned)

    def segments(self, index: int, like: Tensor) -> list[Segment]:
        """The segments of a capped layer, allocated. `like`: its keys [B, K, T, D]."""
        if self.balance is None:
            return self._allocate([index], like)[0]
        if not self.balance.segments:
            together = self._allocate(list(range(len(self.layout.budgets))), like)
            self.balance.segments = [segment for (segment,) in together]
        return [self.balance.segments[index]]

    def _allocate(self, layers: list[int], like: Tensor) -> list[list[Segment]]:
        """One pool for some layers, cut into segments: one a layer, or one a head."""
        layout, (batch, heads, _, size) = self.layout, like.shape
        side = {**layout.eviction.state, **({SHIFT: torch.int32} if layout.shifts(layers) else {})}
        slots = sum(layout.slots(index, batch) for index in layers)
        pool = SlotPool(slots, size, like.dtype, like.device, side)
        found, start = [], 0
        for index in layers:
            kept = layout.allotments[index]
            rows = [(0, 0, batch, heads, kept[0])]  # sequence, head, how many of both, budget
            if layout.ragged:
                rows = [(b, k, 1, 1, slots) for b in range(batch) for k, slots in enumerate(kept)]
            found.append(list[Segment]())
            for row, head, b, k, budget in rows:
                segment = Segment(
                    pool, start, budget, self.block, b, k,
                    row=row, head=head, layer_heads=heads,
                )  # fmt: skip
                found[-1].append(segment)
                start += segment.slots
        return found

    def calibration(self, segments: list[Segment]) -> Calibration | None:
        """Where a layer's evicted tokens go, if the eviction has a corrector.

        Raises:
            StoreFailed: its file cannot be made.
        """
        corrector = self.layout.eviction.corrector
        if corrector is None:
            return None
        heads, dtype = self.layout.shape.heads, segments[0].pool.keys.dtype
        if corrector.directory is None:
            return Calibration(corrector, segments, heads)
        if self._file is None:
            batch = 1 + max(s.row + s.batch - 1 for s in segments)
            needed = self.layout.nbytes(batch, dtype)["evicted_store"]
            self._file = MappedFile(corrector.directory, needed)
        return Calibration(corrector, segments, heads, self._file.new)
