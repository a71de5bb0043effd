"""Holds everything that one capped layer has allocated, and reads its keys where they count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.pool import SHIFT, Segment
from kvcap.runtime.cache.positions import CompactPositions, TruePositions
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.models.rope import Rotation


@dataclass
class LayerStorage:
    """A record of everything that one capped layer has allocated."""

    segments: list[Segment]
    """Holds its slots: one segment, or one for every head where heads hold unequally many."""
    query_window: QueryWindow | None
    """Holds its last queries, if the policy observes more than a block may hold."""
    evicted_store: EvictedStore | None
    """Holds its evicted tokens, if a corrector keeps them."""
    positions: TruePositions
    """Counts where its tokens lie; 'auto' positions exchange it."""
    rotation_later: Rotation | None = None
    """Holds the rotation to use once 'auto' positions become compact; None: they do not."""
    key_mean: Tensor | None = None
    """Holds the vectors [B, K, D] float32 that are subtracted from keys before quantisation.

    They are the mean of its first block, or of the keys held when positions became compact; see
    `mean`."""

    @property
    def excess(self) -> int:
        """Return by how many slots the fullest head exceeds the number that an eviction leaves."""
        return max(0, max(segment.held - segment.target_length for segment in self.segments))

    @property
    def mean(self) -> Tensor | None:
        """Return the mean that quantised keys are held without; None while they are rotated."""
        rotated = self.rotation_later is not None and self.positions.rotation is None
        return None if rotated else self.key_mean

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, start: int, first: bool
    ) -> None:
        """Write a block into quantised slots, behind those in use.

        Keys are held unrotated and without their mean; where they are never moved, rotated.

        Args:
            keys: [B, K, T, D] as the model rotated them, at the positions from `start` on.
            values: [B, K, T, D].
            positions: [T] int32, the tokens' places in the conversation.
            start: the position of the first token.
            first: whether the layer has read nothing before; their mean is kept then.
        """
        keys = self._quantisable(keys, start, first)
        for segment in self.segments:
            segment.append(segment.rows_of(keys), segment.rows_of(values), positions)

    def _quantisable(self, keys: Tensor, start: int, first: bool) -> Tensor:
        """Return keys [B, K, T, D] as they are quantised, in float32; see `append`."""
        keys = keys.float()
        if self.positions.rotation is not None:
            keys = self.positions.rotation.unrotated(keys, start)
        if (mean := self.mean) is not None:
            if first:
                torch.mean(keys, dim=2, out=mean)
            keys = keys - mean[:, :, None]
        return keys

    def read_keys(self, segment: Segment) -> Tensor:
        """Return a segment's keys [b, k, held, D] at their present positions: a view or a copy."""
        pool, slots, rotation = segment.pool, segment.held, self.positions.rotation
        if not pool.format.quantised:
            return self.positions.keys(segment)
        whole = segment.held_views()
        parts = pool.format.parts("key", whole)
        mean = None if self.mean is None else segment.rows_of(self.mean)
        assert pool.format.keys is not None, "all formats of fewer bits quantise keys"
        found, ranks = segment.empty(slots), whole[SHIFT].neg() if rotation else None
        for piece in segment.pieces(slots):
            out = found[piece]
            keys = out if ranks is None else torch.empty_like(out)
            those = {name: x[piece] for name, x in parts.items()}
            pool.format.keys.dequantise(those, keys, None if mean is None else mean[piece[:2]])
            if rotation is not None and ranks is not None:
                rotation.on(keys, ranks[piece], out)
        return found.to(pool.read_dtype)

    def become_compact(self, seen: int) -> None:
        """Move all that is held from true positions to compact ones.

        Every key is rotated once, by the difference, to its rank in its head. That is done head by
        head, so that it takes less memory than a block does. Quantised keys are quantised anew.

        Args:
            seen: tokens read.
        """
        rotation = self.rotation_later
        if rotation is None:
            return
        for segment in self.segments:
            if segment.pool.format.quantised:
                self._unrotate(segment, rotation)
            else:
                for row in segment.each_row():
                    keys, positions = segment.keys[row], segment.positions[row]
                    keys.copy_(rotation.moved(keys, ranks(positions) - positions))
                segment.aux(SHIFT).zero_()
            if self.query_window is not None:
                self.query_window.become_compact(segment, seen - segment.held, rotation)
        if self.evicted_store is not None:
            self.evicted_store.become_compact(self.segments, rotation)
        self.positions = CompactPositions(rotation, self.positions.copy)

    def _unrotate(self, segment: Segment, rotation: Rotation) -> None:
        """Quantise keys anew, from true positions to unrotated ones without their mean."""
        whole, found = segment.held_views(), self.read_keys(segment)
        numbers = segment.pool.format.keys
        assert numbers is not None, "all formats of fewer bits quantise keys"
        assert self.key_mean is not None, "and those that are unrotated have a mean"
        means = segment.rows_of(self.key_mean)
        for row in segment.each_row():
            positions = segment.positions[row]
            keys = rotation.moved(found[row].float(), -positions)
            means[row].copy_(keys.mean(0))
            for part, x in numbers.quantise(keys - means[row]).items():
                whole[f"key_{part}" if part else "keys"][row].copy_(x)
            whole[SHIFT][row].copy_(-ranks(positions))

    def reset(self) -> None:
        """Forget all tokens; the buffers stay allocated.

        All that a session's file saves besides slots is as in a new cache then.
        """
        for segment in self.segments:
            segment.held = 0
        if self.query_window is not None:
            self.query_window.reset()
        if self.key_mean is not None:
            self.key_mean.zero_()
        if self.evicted_store is not None:
            self.evicted_store.reset()
        self.positions.note_moved(False)
        if self.rotation_later is not None:
            self.positions = TruePositions(self.positions.copy)
            if self.evicted_store is not None:
                self.evicted_store.rotation = None


def ranks(positions: Tensor) -> Tensor:
    """Return how many held tokens of a head are older than each, by places in the text [n]."""
    return positions.argsort().argsort().to(torch.int32)
