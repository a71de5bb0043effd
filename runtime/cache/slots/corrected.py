"""Holds one layer's slots, and adds to its attention what evicted tokens would have given."""

from __future__ import annotations

from torch import Tensor

from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.slots.eager import EagerSlots
from kvcap.runtime.cache.slots.head_shares import SegmentEviction
from kvcap.runtime.cache.slots.policy import AttentionCall
from kvcap.runtime.cache.step import ForwardContext


class CorrectedSlots(EagerSlots):
    """An engine that works on a layer's slots, and keeps what it evicts in a store."""

    SHOWS_OUTPUT = False
    evicted_store: EvictedStore

    def _over_segment(
        self,
        index: int,
        query: Tensor,
        keys: list[Tensor],
        values: list[Tensor] | None,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        segment = self.segments[index]
        return self.evicted_store.attend(index, segment, query, keys[index], call.logits)[0]

    def _evict_slots(
        self, segment: Segment, evicted: Tensor, one: SegmentEviction | None = None
    ) -> None:
        if one is not None:  # a file that is read into a smaller cache drops what does not fit
            self.evicted_store.take(one.index, segment, evicted, one.scores, one.obs)
        super()._evict_slots(segment, evicted, one)

    def become_compact(self, seen: int) -> None:
        """Move all that is held, and what is kept of evicted tokens, to compact positions."""
        super().become_compact(seen)
        if self.rotation_later is not None:
            self.evicted_store.become_compact(self.segments, self.rotation_later)

    def restore(self, held: list[int]) -> None:
        """Set each segment's slots in use, and forget what a block that failed evicted."""
        super().restore(held)
        self.evicted_store.forget_excess()

    def reset(self) -> None:
        """Forget all tokens, evicted ones too; the buffers stay allocated."""
        super().reset()
        self.evicted_store.reset()
        if self.rotation_later is not None:
            self.evicted_store.rotation = None
