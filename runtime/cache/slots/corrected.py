"""Holds one layer's slots, and adds to its attention what evicted tokens would have given."""

from __future__ import annotations

from torch import Tensor

from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.slots.eager import EagerSlots, HeldKeys, SegmentEviction
from kvcap.runtime.cache.slots.policy import AttentionCall
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.cache.storage import CorrectedStorage


class CorrectedSlots(EagerSlots):
    """An engine that works on a layer's slots, and keeps what it evicts in a store."""

    SHOWS_OUTPUT = False
    storage: CorrectedStorage

    def _over_segment(
        self,
        index: int,
        query: Tensor,
        held: HeldKeys,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        segment, keys = self.segments[index], held.keys[index]
        return self.storage.evicted_store.attend(index, segment, query, keys, call.logits)[0]

    def _give_up(
        self, segment: Segment, evicted: Tensor, one: SegmentEviction | None = None
    ) -> None:
        if one is not None:  # a file that is read into a smaller cache drops what does not fit
            self.storage.evicted_store.take(one.index, segment, evicted, one.scores, one.obs)
        super()._give_up(segment, evicted, one)
