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
        return max([0, *(segment.held - segment.target_length for segment in self.segments)])

    @property
    def mean(self) -> Tensor | None:
        """Return the mean that quantised keys are held without; None while they are rotated."""
        rotated = self.rotation_later is not None and self.positions.rotation is None
        return None if rotated else self.key_mean

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


@dataclass
class QuantisedStorage(LayerStorage):
    """A record of what a layer of quantised slots has allocated.

    Keys are held unrotated and without their mean; where they are never moved, rotated.
    """

    def quantisable(self, keys: Tensor, start: int, first: bool) -> Tensor:
        """Return a block's keys [B, K, T, D] as they are quantised, in float32.

        Args:
            keys: as the model rotated them, at the positions from `start` on.
            start: the position of the first token.
            first: whether the layer has read nothing before; their mean is kept then.
        """
        keys = keys.float()
        if self.positions.rotation is not None:
            keys = self.positions.rotation.unrotated(keys, start)
        if (mean := self.mean) is not None:
            if first:
                torch.mean(keys, dim=2, out=mean)
            keys = keys - mean[:, :, None]
        return keys

    def read_keys(self, segment: Segment) -> Tensor:
        """Return a copy of a segment's keys [b, k, held, D] at their present positions."""
        pool, slots, rotation = segment.pool, segment.held, self.positions.rotation
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

    def _move(self, segment: Segment, rotation: Rotation) -> None:
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
        """Forget all tokens and their mean; the buffers stay allocated."""
        super().reset()
        if self.key_mean is not None:
            self.key_mean.zero_()


@dataclass
class CorrectedStorage(LayerStorage):
    """A record of what a layer has allocated whose evicted tokens are kept."""

    evicted_store: EvictedStore

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


def ranks(positions: Tensor) -> Tensor:
    """Return how many held tokens of a head are older than each, by places in the text [n]."""
    return positions.argsort().argsort().to(torch.int32)
