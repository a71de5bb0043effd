"""Holds one capped layer's slots and all that is kept beside them, as a base of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.pool import SHIFT, Segment
from kvcap.runtime.cache.positions import CompactPositions, TruePositions
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.cache.slots.policy import AttentionCall, LayerPolicy
from kvcap.runtime.cache.step import PendingBlock
from kvcap.runtime.models.rope import Rotation
from kvcap.runtime.types import Span


class LayerMemory(NamedTuple):
    """A record of what is allocated for one capped layer."""

    segments: list[Segment]
    """Holds its slots: one segment, or one for every head where heads hold unequally many."""
    positions: TruePositions
    """Counts where its tokens lie."""
    query_window: QueryWindow | None = None
    """Holds its last queries, if the policy observes more than a block may hold."""
    evicted_store: EvictedStore | None = None
    """Holds its evicted tokens, if a corrector keeps them."""
    rotation_later: Rotation | None = None
    """Holds the rotation to use once 'auto' positions become compact; None: they do not."""
    key_mean: Tensor | None = None
    """Holds the vectors [B, K, D] float32 that are subtracted from keys before quantisation.

    They are the mean of its first block, or of the keys held when positions became compact."""


class SlotEngine:
    """A layer's slots, and what is kept beside them; one without segments before it is allocated.

    Args:
        memory: of the layer. 'auto' positions exchange its object that counts positions.
        policy: of the layer.
        balance: of the layers, if slots move between them.
    """

    def __init__(
        self, memory: LayerMemory, policy: LayerPolicy, balance: LayerBalance | None = None
    ) -> None:
        self.segments, self.positions = memory.segments, memory.positions
        self.query_window, self.evicted_store = memory.query_window, memory.evicted_store
        self.rotation_later, self.key_mean = memory.rotation_later, memory.key_mean
        self.policy, self.eviction, self.balance = policy, policy.eviction, balance

    @property
    def memory(self) -> LayerMemory:
        """Return what it works on, for another engine of the same slots."""
        beside = self.query_window, self.evicted_store, self.rotation_later, self.key_mean
        return LayerMemory(self.segments, self.positions, *beside)

    @property
    def on_device(self) -> Any:
        """Return small tensors besides the buffers that a CUDA graph must keep alive."""
        return None

    def append(self, block: PendingBlock, keys: Tensor, values: Tensor) -> None:
        """Write a block's keys and values [B, K, T, D] into the slots behind those in use."""
        raise NotImplementedError

    def attend(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with an appended block, then evict. [B, H, T, D] -> [B, H, T, D]."""
        raise NotImplementedError

    def again(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with another layer to what `block` attended to; after the last one, evict.

        The policy sees the queries of the layer whose slots these are, and no others.

        Args:
            query: [B, H, T', D], of the last T' tokens of the block: Gemma 4 leaves out those whose
                logits nobody asked for.
            block: whose own layer has attended.
            call: of the other layer.
        """
        raise NotImplementedError("layers that share slots have no rows")

    def token(
        self,
        query: Tensor,
        angles: tuple[Tensor, Tensor],
        block: PendingBlock,
        call: AttentionCall,
    ) -> Tensor | None:
        """Append and attend to a token that is not rotated yet, by one kernel, then evict.

        None, with nothing changed, where no kernel covers it: it is read as any block is.
        """
        return None

    @property
    def mean(self) -> Tensor | None:
        """Return the mean that quantised keys are held without; None while they are rotated."""
        rotated = self.rotation_later is not None and self.positions.rotation is None
        return None if rotated else self.key_mean

    @property
    def excess(self) -> int:
        """Return by how many slots the fullest head exceeds the number that an eviction leaves."""
        return max([0, *(segment.held - segment.target_length for segment in self.segments)])

    def read_keys(self, segment: Segment) -> Tensor:
        """Return a segment's keys [b, k, held, D] at their present positions: a view or a copy."""
        return self.positions.keys([segment])[0]

    def become_compact(self, seen: int) -> None:
        """Move all that is held from true positions to compact ones; `seen` tokens were read.

        Every key is rotated once, by the difference, to its rank in its head. That is done head by
        head, so that it takes less memory than a block does.
        """
        rotation = self.rotation_later
        if rotation is None:
            return
        for segment in self.segments:
            self._move(segment, rotation)
            if self.query_window is not None:
                self.query_window.become_compact(segment, seen - segment.held, rotation)
        self.positions = CompactPositions(rotation, self.positions.copy)

    def _move(self, segment: Segment, rotation: Rotation) -> None:
        """Move a segment's keys from true positions to their ranks."""
        for row in segment.each_row():
            keys, positions = segment.keys[row], segment.positions[row]
            keys.copy_(rotation.moved(keys, ranks(positions) - positions))
        segment.aux(SHIFT).zero_()

    def drop(self, spans: Sequence[Span], seen: int) -> None:
        """Evict the slots of these tokens, of `seen` ones.

        Heads of a segment evict as many as all of them hold, the oldest.
        """
        for segment in self.segments:
            positions = segment.positions
            inside = torch.zeros_like(positions, dtype=torch.bool)
            for start, stop in spans:
                inside |= (positions >= start) & (positions < stop)
            if count := int(inside.sum(-1).min()):
                slots = positions.masked_fill(~inside, seen).argsort(-1)[..., :count]
                if self.query_window is not None:
                    self.query_window.drop(segment, positions.gather(-1, slots), seen)
                self.positions.move_down(segment, slots)
                segment.evict(slots)

    def restore(self, held: list[int]) -> None:
        """Set each segment's slots in use, as before a block that failed."""
        for segment, slots in zip(self.segments, held, strict=True):
            segment.held = slots

    def reset(self) -> None:
        """Forget all tokens; the buffers stay allocated.

        All that a session's file saves besides slots is as in a new cache then.
        """
        for segment in self.segments:
            segment.held = 0
        if self.query_window is not None:
            self.query_window.reset()
        self.positions.note_moved(False)
        if self.rotation_later is not None:
            self.positions = TruePositions(self.positions.copy)


def ranks(positions: Tensor) -> Tensor:
    """Return how many held tokens of a head are older than each, by token indices [n]."""
    return positions.argsort().argsort().to(torch.int32)
